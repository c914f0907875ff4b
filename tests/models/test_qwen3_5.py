"""Qwen3.5 gives the tokens of transformers, whatever the chunks, preemptions and snapshots."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    VOCAB_SIZE,
    check_invariants,
    cover_pairs,
    edit_weights,
    find_feature,
    generate_ids,
    greedy,
    make_drafts_free,
    random_prompt,
)
from families import make_family
from front_helpers import finish, interrupt_in

from nanovllm import LLM
from nanovllm.features.recurrent_states import RecurrentStates
from nanovllm.worker.state_slots import ZEROS

ROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.25,
    "mrope_section": [1, 1, 0],  # has no effect on text
    "mrope_interleaved": True,
}
POOL = {"num_kvcache_blocks": 200, "kvcache_block_size": 4}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """The path of a checkpoint, and its oracle."""
    directory = tmp_path_factory.mktemp("qwen3_5")
    return str(directory), make_family(directory, "qwen3.5", rope_parameters=ROPE)


def make_llm(path, **options) -> LLM:
    return LLM(path, **{**POOL, **options})


def check_engine(llm):
    """Check an engine between two steps."""
    check_invariants(llm)
    states = find_feature(llm, RecurrentStates)
    assert not states.new_snapshots
    slots = [*states.empty_slots, *states.snapshots.values()]
    assert sorted(slots) == list(states.snapshot_slots)
    worker = llm.executor.worker
    num_slots = {len(cache) for cache in worker.kv_caches if cache.dim() == 2}
    last = states.snapshot_slots.stop
    assert num_slots == {last}
    for cache in worker.kv_caches:
        assert cache.dim() > 2 or not cache[ZEROS].any()


@pytest.mark.parametrize(
    "options",
    [
        # Chunks are shorter than the window of the convolution.
        dict(max_num_batched_tokens=3, num_kvcache_blocks=33, enable_kernels=False),
        dict(max_num_batched_tokens=3, enable_prefix_caching=False),
        dict(enable_chunked_prefill=False, num_kvcache_blocks=33),
    ],
    ids=str,
)
def test_tokens_match_transformers(hybrid, options):
    path, oracle = hybrid
    prompts = [random_prompt(length, length) for length in (1, 2, 3, 4, 5, 33, 100)]
    prompts += [prompts[-1][:50] + random_prompt(seed, 7 + seed) for seed in range(3)]
    params = [greedy(6 + index) for index in range(len(prompts))]
    expected = [oracle(prompt, each.max_tokens) for prompt, each in zip(prompts, params)]
    llm = make_llm(path, **options)
    for _ in range(2):
        assert generate_ids(llm, prompts, params) == expected
        check_engine(llm)
    has_hits = options.get("enable_prefix_caching", True)
    assert (llm.stats["num_cached_tokens"] > 0) == has_hits


def test_a_shared_prefix_is_computed_twice(hybrid):
    """The second request leaves a snapshot at the end of the shared prefix. Others reuse it."""
    path, oracle = hybrid
    shared = random_prompt(0, 42)  # 10 blocks and 2 tokens
    prompts = [shared + [index] * 5 for index in range(6)]
    expected = [oracle(prompt, 4) for prompt in prompts]
    one_by_one = make_llm(path)
    outputs = [one_by_one.generate(prompt, greedy(4))[0] for prompt in prompts]
    at_once = make_llm(path).generate(prompts, greedy(4))
    for each in (outputs, at_once):
        assert [output["token_ids"] for output in each] == expected
        assert [output["num_cached_tokens"] for output in each] == [0, 0, 40, 40, 40, 40]


def test_snapshots_are_evicted(hybrid):
    """More shared prefixes than slots, and requests that read a snapshot while it is evicted."""
    path, oracle = hybrid
    llm = make_llm(path, max_num_seqs=3, max_num_batched_tokens=16)
    states = find_feature(llm, RecurrentStates)
    assert len(states.snapshot_slots) == 3
    prompts = []
    for seed in range(36):
        shared = random_prompt(seed % 5, 13 + seed % 5)
        prompts.append(shared + random_prompt(seed, 1 + seed % 7))
    expected = [oracle(prompt, 3) for prompt in prompts]
    for _ in range(2):
        assert generate_ids(llm, prompts, greedy(3)) == expected
        check_engine(llm)
        assert len(states.snapshots) == 3
    assert llm.stats["num_cached_tokens"] > 0


def test_an_interrupted_step_publishes_no_snapshot(hybrid):
    """The step that would write the snapshot is interrupted. Others must not read its slot."""
    path, oracle = hybrid
    llm = make_llm(path, max_num_batched_tokens=64)
    prompts = [random_prompt(1, 20) + [index] * 3 for index in range(4)]
    expected = [oracle(prompt, 6) for prompt in prompts]
    assert generate_ids(llm, prompts[:1], greedy(6)) == expected[:1]
    for prompt in prompts:
        llm.add_request(prompt, greedy(6))
    interrupt_in(llm.model_runner, "forward", llm.step)
    assert find_feature(llm, RecurrentStates).new_snapshots
    outputs = sorted(finish(llm).items())
    assert [output["token_ids"] for _, output in outputs] == expected
    check_engine(llm)


def test_nan_does_not_outlive_its_request(hybrid):
    """Neither in a lane nor in a snapshot."""
    path, oracle = hybrid
    prompts = [[3] * 20 + [index] * 4 for index in range(4)]
    llm = make_llm(path, max_num_seqs=2, enable_kernels=False)
    weight = llm.executor.worker.model.model.embed_tokens.weight
    row = weight[3].clone()
    with torch.inference_mode():
        weight[3] = float("nan")
    with pytest.warns(RuntimeWarning, match="NaN"):
        outputs = llm.generate(prompts, greedy(4))
    assert {output["finish_reason"] for output in outputs} == {"error"}
    assert not find_feature(llm, RecurrentStates).snapshots
    with torch.inference_mode():
        weight[3] = row
    assert generate_ids(llm, prompts, greedy(4)) == [oracle(prompt, 4) for prompt in prompts]


@pytest.mark.parametrize("rest", [1, 7])
def test_prefill_first_steps_are_all_prefill_or_all_decode(hybrid, rest):
    """Prompts that are cut for snapshots, two in one step, finish before decodes go on."""
    path, oracle = hybrid
    llm = make_llm(path, enable_chunked_prefill=False)
    kinds = []
    forward = llm.model_runner.forward

    def record(step):
        kinds.append({step.is_decode(index) for index in range(len(step.seqs))})
        return forward(step)

    llm.model_runner.forward = record
    prompts = [random_prompt(5 + index % 2, 28) + random_prompt(index, rest) for index in range(6)]
    for index, prompt in enumerate(prompts):
        llm.add_request(prompt, greedy(12))
        if index % 2 == 1:  # the next two arrive while the others decode
            for _ in range(4):
                llm.step()
    outputs = [output for _, output in sorted(finish(llm).items())]
    expected = [oracle(prompt, 12) for prompt in prompts]
    assert [output["token_ids"] for output in outputs] == expected
    assert [output["num_cached_tokens"] for output in outputs] == [0, 0, 0, 0, 28, 28]
    assert all(len(kind) == 1 for kind in kinds)


def let_draft(llm, answers, is_right):
    """Let an engine draft the tokens of `answers` (prompt and completion), right or wrong."""

    def make_proposer(token_ids):
        def propose(num_tokens):
            start = len(token_ids)
            answer = next(each for each in answers if each[:start] == token_ids)
            draft = answer[start : start + num_tokens]
            wrong = {"always": [], "never": [0], "sometimes": [(5 - start) % 7]}[is_right]
            return [(each + (i in wrong)) % VOCAB_SIZE for i, each in enumerate(draft)]

        return SimpleNamespace(propose=propose)

    make_drafts_free(llm).proposer.make_lookup = make_proposer


@pytest.mark.parametrize(
    "is_right, is_chunked, num_blocks",
    cover_pairs(["always", "never", "sometimes"], [True, False], [200, 30]),
)
def test_drafts_change_no_token(hybrid, is_right, is_chunked, num_blocks):
    """After a rejected draft the state before it is read again."""
    path, oracle = hybrid
    prompts = [random_prompt(9, 30) + random_prompt(index, 9 + index) for index in range(4)]
    expected = [oracle(prompt, 30) for prompt in prompts]
    answers = [prompt + answer for prompt, answer in zip(prompts, expected)]
    llm = make_llm(
        path,
        num_kvcache_blocks=num_blocks,
        num_speculative_tokens=7,
        enable_chunked_prefill=is_chunked,
    )
    let_draft(llm, answers, is_right)
    for _ in range(2):
        assert generate_ids(llm, prompts, greedy(30)) == expected
        check_engine(llm)
    assert (llm.stats["num_preemptions"] > 0) == (num_blocks == 30)
    assert llm.stats["num_draft_tokens"] > 0
    num_accepted = llm.stats["num_accepted_tokens"]
    assert (num_accepted > 0) == (is_right != "never")


@pytest.mark.parametrize("where", ["text_config", "config", "embedding"])
def test_dtype_and_eos_ids_are_found(tmp_path, where):
    """Some tensors are float32 in a model of bfloat16, and one of these can come first."""
    make_family(tmp_path, "qwen3.5", dtype=torch.bfloat16, eos_token_id=7)
    edit_weights(
        tmp_path,
        lambda weights: weights.update(
            {name: each.float() for name, each in weights.items() if name.endswith("A_log")}
        ),
    )
    text_config = json.loads((tmp_path / "config.json").read_text())
    dtype = text_config.pop("dtype")
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text_config,
        "tie_word_embeddings": True,
        "eos_token_id": [8, 9],
    }
    if where != "embedding":
        {"text_config": text_config, "config": config}[where]["dtype"] = dtype
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 10}')
    llm = LLM(tmp_path, **POOL, enable_kernels=False)
    assert llm.eos_token_ids == {7, 8, 9, 10}
    model = llm.executor.worker.model.model
    assert model.embed_tokens.weight.dtype == torch.bfloat16
    assert model.layers[0].linear_attn.delta_rule.A_log.dtype == torch.float32


def test_prompts_without_a_shared_prefix_leave_no_snapshot(hybrid):
    """A snapshot of each prompt would evict those that are hit."""
    path, _ = hybrid
    llm = make_llm(path, max_num_seqs=2)
    shared = random_prompt(0, 20)
    generate_ids(llm, [[*shared, 1], [*shared, 2]], greedy(1))
    generate_ids(llm, [random_prompt(seed, 20) for seed in range(1, 9)], greedy(1))
    assert len(find_feature(llm, RecurrentStates).snapshots) == 1
    (output,) = llm.generate([*shared, 3], greedy(1))
    assert output["num_cached_tokens"] == 20
