"""prompt_logprobs are those of transformers' forward pass, whatever steps compute a prompt."""

from dataclasses import replace

import pytest
import torch
from conftest import check_invariants, generate_ids, greedy, make_drafts_free, random_prompt

from nanovllm import SamplingParams
from nanovllm.engine.feature import Feature
from nanovllm.engine.step import Row

PROMPTS = [random_prompt(length, length) for length in (1, 2, 9, 23, 40)]
LONGEST = PROMPTS[-1]
SCORING = SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=3)


@pytest.fixture(scope="module")
def check(tiny):
    """Compares the prompt_logprobs of an output with transformers."""
    _, oracle = tiny

    def check(output, num_top=3):
        prompt = output["prompt_token_ids"]
        logprobs = oracle.find_logprobs(prompt)
        first, *entries = output["prompt_logprobs"]
        assert first is None
        for token_id, entry, expected in zip(prompt[1:], entries, logprobs, strict=True):
            top_ids = expected.topk(num_top).indices.tolist()
            assert list(entry) == list(dict.fromkeys([*top_ids, token_id]))
            assert list(entry.values()) == pytest.approx(expected[list(entry)].tolist(), abs=1e-4)

    return check


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 3, "max_num_batched_tokens": 30},  # logits in parts of 3 rows
        {"num_kvcache_blocks": 13, "max_num_batched_tokens": 7},  # chunks and preemptions
        {"num_kvcache_blocks": 13, "enable_chunked_prefill": False},
        {"enable_prefix_caching": False, "enable_kernels": False},
        pytest.param({"tensor_parallel_size": 2, "max_num_seqs": 3}, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_they_match_transformers(tiny, make_llm, check, options):
    _, oracle = tiny
    prompts = PROMPTS * 2
    params = [SCORING] * len(PROMPTS) + [greedy(6)] * len(PROMPTS)
    with make_llm(**options) as llm:
        for _ in range(2):  # with a cold prefix cache, then with a warm one
            outputs = llm.generate(prompts, params)
            assert [o["token_ids"] for o in outputs] == [oracle(prompt, 6) for prompt in prompts]
            for output in outputs[: len(PROMPTS)]:
                check(output)
                assert output["num_cached_tokens"] == 0, "a cached token has no logits"
            for output in outputs[len(PROMPTS) :]:
                assert output["prompt_logprobs"] is None
            check_invariants(llm)
        if "num_kvcache_blocks" in options:
            assert llm.stats["num_preemptions"] > 0


@pytest.mark.parametrize("num_blocks", [8, 10, 12])
def test_scoring_a_cached_prompt_keeps_it_in_the_cache(make_llm, num_blocks):
    """It is computed again, and its cached blocks are evicted meanwhile."""
    llm = make_llm(num_kvcache_blocks=num_blocks, kvcache_block_size=4)
    prompt = random_prompt(0, 17)
    for num_scores, expected in ((None, 0), (0, 0), (None, 16)):
        params = replace(greedy(14), prompt_logprobs=num_scores, ignore_eos=True)
        (output,) = llm.generate([prompt], params)
        assert output["num_cached_tokens"] == expected


def test_a_preempted_sequence_keeps_its_scores(make_llm, check):
    """It then reuses its own blocks up to the first prompt token that is not scored."""
    llm = make_llm(max_num_batched_tokens=11)
    llm.add_request(LONGEST, SCORING)
    llm.step()
    llm.step()
    (seq,) = llm.scheduler.running
    assert len(seq.prompt_logprobs) == 23
    llm.scheduler.preempt(seq)
    llm.step()
    assert seq.num_computed_tokens == 20 + 11
    while not llm.is_finished():
        outputs = llm.step()
    check(outputs[0])


def test_a_step_computes_no_more_rows_of_logits_at_once_than_the_profile_run(make_llm, monkeypatch):
    llm = make_llm(max_num_seqs=4)
    model = llm.executor.worker.model
    compute_logits = model.compute_logits
    sizes = []

    def record(hidden):
        sizes.append(len(hidden))
        return compute_logits(hidden)

    monkeypatch.setattr(model, "compute_logits", record)
    generate_ids(llm, LONGEST, SCORING)
    assert sum(sizes) >= len(LONGEST)
    assert max(sizes) == 4


class Picks(Feature):
    """Wants rows of its own, and keeps what it receives."""

    serves = "picks"

    def __init__(self, choose):
        self.choose = choose
        self.received = []

    def wanted_rows(self, step):
        rows = []
        for seq, num_tokens, _ in step:
            computed = range(seq.num_computed_tokens, seq.num_computed_tokens + num_tokens)
            rows += [Row(seq, position) for position in computed if self.choose(position)]
        return rows

    def receive_rows(self, rows, logits):
        assert len(rows) == len(logits)
        for (seq, position), row in zip(rows, logits):
            self.received.append(
                (seq.seq_id, position, seq.token_ids[: position + 1], row.tolist())
            )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 3, "max_num_batched_tokens": 30},  # logits in parts of 3 rows
        {"max_num_batched_tokens": 7, "num_kvcache_blocks": 14, "num_speculative_tokens": 3},
        {"enable_kernels": False, "num_speculative_tokens": 3},
    ],
    ids=str,
)
def test_features_share_the_rows_of_a_sequence(tiny, make_llm, check, options):
    """Two features want rows of the same tokens, beside prompt log probabilities and drafts."""
    _, oracle = tiny
    llm = make_llm(enable_prefix_caching=False, **options)
    if "num_speculative_tokens" in options:
        make_drafts_free(llm)
    features = [Picks(lambda position: position % 3 == 0), Picks(lambda position: position > 5)]
    for feature in features:
        llm.add_feature(feature)
    prompts = [[7, 8, 9] * 5, *PROMPTS[1:4]]
    params = [replace(SCORING, max_tokens=12), SCORING, greedy(6), SCORING]
    outputs = llm.generate(prompts, params)
    for output, each in zip(outputs, params):
        if each.prompt_logprobs is not None:
            check(output)
    assert bool(llm.stats["num_accepted_tokens"]) == ("num_speculative_tokens" in options)
    texts = [output["prompt_token_ids"] + output["token_ids"] for output in outputs]
    for feature in features:
        for seq_id, position, token_ids, row in feature.received:
            if token_ids == texts[seq_id][: position + 1]:  # no rejected draft
                expected = oracle.find_logprobs([*token_ids, 0])[-1]
                assert torch.tensor(row).log_softmax(-1).allclose(expected, atol=1e-4)
        found = {(seq_id, position) for seq_id, position, *_ in feature.received}
        for seq_id, text in enumerate(texts):
            assert found >= {(seq_id, i) for i in range(len(text) - 1) if feature.choose(i)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kvcache_blocks": 13, "max_num_batched_tokens": 7},  # chunks and preemptions
        {"num_kvcache_blocks": 13, "enable_chunked_prefill": False},
        {"num_speculative_tokens": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_sequence_can_end_with_its_prompt(tiny, make_llm, check, options, overlaps):
    """It generates nothing, and changes nothing for sequences beside it."""
    llm = make_llm(**options)
    llm.overlaps = overlaps
    others = [llm.add_request(prompt, SCORING) for prompt in PROMPTS]
    prepared = [
        each.with_fields(ends_with_prompt=True) for each in llm.prepare_prompts(PROMPTS, SCORING)
    ]
    scored = [llm.add_prepared(each) for each in prepared * 2]
    outputs = {}
    while not llm.is_finished():
        for output in llm.step():
            outputs[output["request_id"]] = output
        check_invariants(llm)
    for request_id, prompt in zip(others, PROMPTS):
        assert outputs[request_id]["token_ids"] == tiny[1](prompt, SCORING.max_tokens)
    for request_id in (*others, *scored):
        check(outputs[request_id])
    for request_id in scored:
        assert outputs[request_id]["token_ids"] == []
        assert outputs[request_id]["finish_reason"] == "length"
