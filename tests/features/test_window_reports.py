"""What users of other engines have reported of sliding windows does not happen here.

Each test names a report. The models are random, and transformers computes the expected tokens.
"""

import pytest
import torch
from conftest import (
    check_invariants,
    edit_weights,
    find_feature,
    generate_ids,
    greedy,
    random_prompt,
)
from families import make_family

from nanovllm import LLM, SamplingParams
from nanovllm.features.speculation.costs import StepCosts
from nanovllm.features.speculation.drafts import Drafts

POOL = {"num_kvcache_blocks": 200, "kvcache_block_size": 4}
NAN_TOKEN = 96


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """The path of a checkpoint with windows of 8 tokens, and its oracle."""
    directory = tmp_path_factory.mktemp("gemma3")
    return str(directory), make_family(directory, "gemma3")


@torch.inference_mode()
def compute_by_definition(model, prompt, num_tokens):
    """Return the greedy tokens without a cache, because that of transformers needs windows of 2."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits = model(torch.tensor([tokens]), use_cache=False).logits
        tokens.append(logits[0, -1].argmax().item())
    return tokens[len(prompt) :]


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_next_turn_of_a_chat_reuses_all_full_blocks(gemma, num_drafts):
    """mlx-lm #980, llama.cpp #21831: it computed all again. vLLM #40624: with drafts, too."""
    path, oracle = gemma
    history = []
    with LLM(path, num_speculative_tokens=num_drafts, **POOL) as llm:
        if num_drafts:
            find_feature(llm, Drafts).costs = StepCosts(1.0, 1.0, per_token=0.0)
        for turn in range(3):
            num_computed = max(0, len(history) - 1)  # the last token has no K/V
            history += random_prompt(turn, 30)
            (output,) = llm.generate(history, greedy(25), use_tqdm=False)
            assert output["token_ids"] == oracle(history, 25)
            assert output["num_cached_tokens"] == num_computed // 4 * 4
            history += output["token_ids"]


def test_an_earlier_point_of_a_chat_is_reused(gemma):
    """vLLM #57610: a prompt that was edited close to its end reused nothing.

    Windows have left this point, but their blocks are cached as long as others are free.
    """
    path, oracle = gemma
    prompt = random_prompt(1, 80)
    edited = prompt[:71] + random_prompt(2, 5)
    with LLM(path, **POOL) as llm:
        for each, num_cached in ((prompt, 0), (prompt, 76), (edited, 68)):
            (output,) = llm.generate(each, greedy(40), use_tqdm=False)
            assert output["token_ids"] == oracle(each, 40)
            assert output["num_cached_tokens"] == num_cached


@pytest.mark.parametrize(
    "window, options",
    [
        (1, dict(kvcache_block_size=2, max_num_batched_tokens=1, num_kvcache_blocks=16)),
        (1, dict(kvcache_block_size=256, num_kvcache_blocks=1, num_speculative_tokens=2)),
        (2, dict(kvcache_block_size=2, num_kvcache_blocks=16, policy="prefill_first")),
        (5, dict(kvcache_block_size=3, kvcache_memory_bytes=30_000, max_model_len=32)),
        (31, dict(kvcache_block_size=4, num_kvcache_blocks=8, max_num_seqs=1)),
    ],
    ids=str,
)
def test_the_smallest_engines_serve_what_they_accept(tmp_path, window, options):
    """vLLM #39734, #2163: a pool that was too small for a prompt was a hang."""
    model = make_family(tmp_path, "gemma3", sliding_window=window).model
    prompts = [random_prompt(length, length) for length in (1, 13, 20)]
    prompts.append([*prompts[-1][:17], 3])
    expected = [compute_by_definition(model, prompt, 12) for prompt in prompts]
    with LLM(tmp_path, **options) as llm:
        for _ in range(2):
            for prompt in prompts:
                llm.add_request(prompt, greedy(12))
            results = {}
            num_steps = 0
            while not llm.is_finished():
                results.update((each["request_id"], each["token_ids"]) for each in llm.step())
                check_invariants(llm)
                num_steps += 1
                assert num_steps < 500
            assert [results[request_id] for request_id in sorted(results)] == expected


def test_beams_and_samples_share_windows(gemma):
    """llama.cpp #14097: parallel sequences failed. Beams also branch where a window has passed."""
    path, oracle = gemma
    prompt = random_prompt(3, 30)
    ids = torch.tensor([prompt])
    settings = dict(num_beams=3, num_return_sequences=3, do_sample=False, pad_token_id=0)
    expected = oracle.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, **settings
    )
    with LLM(path, max_num_batched_tokens=9, **POOL) as llm:
        (beams,) = llm.beam_search(prompt, beam_width=3, max_tokens=12)
        assert [beam["token_ids"] for beam in beams] == expected[:, len(prompt) :].tolist()
        params = SamplingParams(temperature=0.0, max_tokens=30, n=3)
        assert generate_ids(llm, prompt, params) == [oracle(prompt, 30)] * 3
        params = SamplingParams(temperature=1.0, max_tokens=30, n=3, seed=1)
        samples = generate_ids(llm, prompt, params)
        assert samples == generate_ids(llm, prompt, params)
        assert len(set(map(tuple, samples))) == 3


def test_prompt_logprobs_do_not_depend_on_the_cache(gemma):
    """vLLM #3251, #42245: a hit has no logits, and its entries were missing or those of others."""
    path, _ = gemma
    prompt = random_prompt(5, 60)
    params = SamplingParams(temperature=0.0, max_tokens=9, prompt_logprobs=2)
    with LLM(path, max_num_batched_tokens=7, **POOL) as llm:
        entries = []
        for each in (params, greedy(9), params):
            (output,) = llm.generate(prompt, each, use_tqdm=False)
            entries.append(output["prompt_logprobs"])
        assert output["num_cached_tokens"] == 0
    cold, _, warm = entries
    assert [list(entry) for entry in cold[1:]] == [list(entry) for entry in warm[1:]]
    for one, other in zip(cold[1:], warm[1:]):
        assert list(one.values()) == pytest.approx(list(other.values()), abs=1e-4)


def test_nan_of_one_request_reaches_no_other(tmp_path):
    """mlxcel #401, vLLM #17364: NaN of a window spread, and all tokens were padding.

    Requests share a prefix with those that have NaN, and reuse their blocks.
    """
    oracle = make_family(tmp_path, "gemma3", tie_word_embeddings=False)
    embedding = "model.embed_tokens.weight"
    edit_weights(tmp_path, lambda weights: weights[embedding][NAN_TOKEN].fill_(torch.nan))
    shared = [token for token in random_prompt(7, 60) if token != NAN_TOKEN]
    prompts = [shared[:40], [*shared[:40], NAN_TOKEN, 1], [*shared[:20], NAN_TOKEN, *shared[20:50]]]
    prompts += [shared[:52], [*shared[:48], 4]]
    with LLM(tmp_path, num_speculative_tokens=2, **POOL) as llm:
        for _ in range(2):
            with pytest.warns(RuntimeWarning, match="its logits are NaN"):
                outputs = llm.generate(prompts, greedy(20), use_tqdm=False)
            check_invariants(llm)
            for prompt, output in zip(prompts, outputs):
                has_nan = NAN_TOKEN in prompt
                assert output["finish_reason"] == ("error" if has_nan else "length")
                assert has_nan or output["token_ids"] == oracle(prompt, 20)
