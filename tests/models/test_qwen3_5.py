"""Qwen3.5 gives the tokens of transformers, whatever the chunks, preemptions and snapshots."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    VOCAB_SIZE,
    Oracle,
    check_invariants,
    cover_pairs,
    edit_weights,
    find_feature,
    generate_ids,
    greedy,
    make_checkpoint,
    make_drafts_free,
    random_prompt,
)
from families import DELTA
from transformers import Qwen3_5TextConfig

from nanovllm import LLM
from nanovllm.features.recurrent_states import RecurrentStates
from nanovllm.worker.state_slots import FIRST_LANE, ZEROS

SETTINGS = dict(
    DELTA,
    family=Qwen3_5TextConfig,
    linear_conv_kernel_dim=4,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],  # has no effect on text
        "mrope_interleaved": True,
    },
)
POOL = {"num_kvcache_blocks": 200, "kvcache_block_size": 4}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """The path of a checkpoint, and its oracle."""
    directory = tmp_path_factory.mktemp("qwen3_5")
    return str(directory), Oracle(make_checkpoint(directory, **SETTINGS))


def make_llm(path, **options) -> LLM:
    """Make an engine that checks the slots of each step."""
    llm = LLM(path, **{**POOL, **options})
    forward = llm.model_runner.forward

    def check_and_forward(step):
        check_slots(llm, step.seqs)
        return forward(step)

    llm.model_runner.forward = check_and_forward
    return llm


def check_slots(llm, seqs):
    """Check what a step reads and writes, before it runs."""
    states = find_feature(llm, RecurrentStates)
    num_lanes = llm.scheduler.max_num_seqs
    kept = set(states.snapshots.values())
    new = set(states.new_snapshots.values())
    slots = states.slots
    written = [slots[seq].write for seq in seqs]
    assert len(set(written)) == len(written)
    for seq in seqs:
        own = {FIRST_LANE + seq.lane}
        if llm.config.num_speculative_tokens:
            own.add(FIRST_LANE + num_lanes + seq.lane)
        assert slots[seq].write in own | new
        assert (slots[seq].read == ZEROS) == (seq.num_computed_tokens == 0)
        assert slots[seq].read in own | {ZEROS, *states.snapshot_slots}
        others = [slots[other].read for other in seqs if other is not seq]
        assert slots[seq].write not in others
    assert kept.isdisjoint(written)
    assert new <= set(written)


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


# A chunk of up to 3 tokens is shorter than the window of the convolution.
@pytest.mark.parametrize(
    "budget, num_blocks, is_chunked, is_caching, with_kernels, size",
    cover_pairs(
        [3, 24, 200],
        [33, 200],
        [True, False],
        [True, False],
        [True, False],
        [1, 2],
        allowed=lambda budget, _, is_chunked, __, ___, size: (
            budget == 200 or (is_chunked and (size == 1 or budget == 24))
        ),
    ),
)
def test_grid(hybrid, budget, num_blocks, is_chunked, is_caching, with_kernels, size):
    path, oracle = hybrid
    prompts = [random_prompt(length, length) for length in (1, 2, 3, 4, 5, 33, 100)]
    prompts += [prompts[-1][:50] + random_prompt(seed, 7 + seed) for seed in range(3)]
    prompts.append(prompts[-1])
    params = [greedy(6 + index) for index in range(len(prompts))]
    expected = [oracle(prompt, each.max_tokens) for prompt, each in zip(prompts, params)]
    with make_llm(
        path,
        max_num_batched_tokens=budget,
        num_kvcache_blocks=num_blocks,
        enable_chunked_prefill=is_chunked,
        enable_prefix_caching=is_caching,
        enable_kernels=with_kernels,
        tensor_parallel_size=size,
    ) as llm:
        for _ in range(2):
            assert generate_ids(llm, prompts, params) == expected
            check_engine(llm)
        assert num_blocks == 200 or budget < 24 or llm.stats["num_preemptions"] > 0
        assert is_caching or llm.stats["num_cached_tokens"] == 0
        assert not is_caching or num_blocks < 200 or llm.stats["num_cached_tokens"] > 0


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


def test_no_slot_leaks(hybrid):
    """Aborts and preemptions at any moment: afterwards every slot can still get a snapshot."""
    path, _ = hybrid
    llm = make_llm(path, max_num_seqs=3, max_num_batched_tokens=9, num_kvcache_blocks=24)
    for seed in range(40):
        shared = random_prompt(seed % 3, 21)
        request_id = llm.add_request(shared + random_prompt(seed, 8), greedy(9))
        for _ in range(seed % 7):
            llm.step()
        if seed % 2:
            llm.abort(request_id)
    while not llm.is_finished():
        llm.step()
    assert llm.stats["num_preemptions"] > 0
    find_feature(llm, RecurrentStates)._forget_snapshots()
    for seed in range(3):
        for _ in range(2):
            generate_ids(llm, random_prompt(100 + seed, 22), greedy(1))
    assert len(find_feature(llm, RecurrentStates).snapshots) == 3
    check_engine(llm)


@pytest.mark.parametrize("is_caching", [True, False])
def test_a_lane_starts_from_zeros(hybrid, is_caching):
    """Prompts of one token and aborted prefills leave nothing behind in a lane."""
    path, oracle = hybrid
    options = dict(max_num_seqs=2, max_num_batched_tokens=7, enable_prefix_caching=is_caching)
    llm = make_llm(path, **options)
    for token_id in range(6):
        request_id = llm.add_request(random_prompt(token_id, 40), greedy(4))
        llm.step()
        llm.step()
        llm.abort(request_id)
        assert generate_ids(llm, [[token_id]], greedy(5)) == [oracle([token_id], 5)]


def test_an_interrupted_step_publishes_no_snapshot(hybrid, monkeypatch):
    """The step that would write the snapshot is interrupted. Others must not read its slot."""
    path, oracle = hybrid
    llm = make_llm(path, max_num_batched_tokens=64)
    shared = random_prompt(1, 20)
    prompts = [shared + [index] * 3 for index in range(4)]
    expected = [oracle(prompt, 6) for prompt in prompts]
    assert generate_ids(llm, prompts[:1], greedy(6)) == expected[:1]
    for prompt in prompts:
        llm.add_request(prompt, greedy(6))
    with monkeypatch.context() as patch:
        patch.setattr(llm.model_runner, "forward", None)
        with pytest.raises(TypeError):
            llm.step()
    assert find_feature(llm, RecurrentStates).new_snapshots
    outputs = {}
    while not llm.is_finished():
        outputs.update((output["request_id"], output["token_ids"]) for output in llm.step())
    assert [outputs[request_id] for request_id in sorted(outputs)] == expected
    check_engine(llm)


@pytest.mark.parametrize("is_caching", [True, False])
def test_nan_does_not_outlive_its_request(tmp_path, is_caching):
    """Neither in a lane nor in a snapshot."""
    oracle = Oracle(make_checkpoint(tmp_path, **SETTINGS))
    prompts = [[3] * 20 + [index] * 4 for index in range(4)]
    expected = [oracle(prompt, 4) for prompt in prompts]
    options = dict(max_num_seqs=2, enable_kernels=False, enable_prefix_caching=is_caching)
    llm = make_llm(str(tmp_path), **options)
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
    assert generate_ids(llm, prompts, greedy(4)) == expected


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
    families = [random_prompt(5, 28), random_prompt(6, 28)]
    prompts = [families[index % 2] + random_prompt(index, rest) for index in range(6)]
    outputs = {}
    for index in range(0, 6, 2):  # the next two arrive while the others decode
        for prompt in prompts[index : index + 2]:
            llm.add_request(prompt, greedy(12))
        for _ in range(4):
            outputs.update((output["request_id"], output) for output in llm.step())
    while not llm.is_finished():
        outputs.update((output["request_id"], output) for output in llm.step())
    for prompt, request_id in zip(prompts, sorted(outputs)):
        assert outputs[request_id]["token_ids"] == oracle(prompt, 12)
    assert [outputs[each]["num_cached_tokens"] for each in sorted(outputs)] == [0, 0, 0, 0, 28, 28]
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

    make_drafts_free(llm).make_proposer = make_proposer


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
    make_checkpoint(tmp_path, dtype=torch.bfloat16, **SETTINGS)
    edit_weights(
        tmp_path,
        lambda weights: weights.update(
            {name: each.float() for name, each in weights.items() if name.endswith("A_log")}
        ),
    )
    text_config = json.loads((tmp_path / "config.json").read_text())
    text_config["eos_token_id"] = 7
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


def test_a_preempted_sequence_leaves_no_snapshot_of_its_own(hybrid):
    """It finds its own blocks again, which no other sequence shares."""
    path, oracle = hybrid
    llm = make_llm(path)
    prompt = random_prompt(0, 21)
    llm.add_request(prompt, greedy(9))
    for _ in range(4):
        llm.step()
    llm.scheduler.preempt(llm.scheduler.running[0])
    while not llm.is_finished():
        outputs = llm.step()
    assert outputs[0]["token_ids"] == oracle(prompt, 9)
    assert not find_feature(llm, RecurrentStates).snapshots
