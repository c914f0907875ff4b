"""prompt_logprobs are those of transformers' forward pass, however a prompt is computed."""

from pathlib import Path

import pytest
import torch
from conftest import VOCAB_SIZE, check_invariants, generate_ids, greedy, random_prompt

from nanovllm import SamplingParams

LENGTHS = (1, 2, 9, 23, 40)
PROMPTS = [random_prompt(seed, length) for seed, length in enumerate(LENGTHS)]
SCORING = SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=3)


@pytest.fixture(scope="module")
def score(tiny):
    """Scores a prompt with transformers: log probabilities [len(prompt) - 1, vocab_size]."""
    _, oracle = tiny

    @torch.inference_mode()
    def score(prompt):
        return oracle.model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)

    return score


def check(output, prompt, score, num_top=3):
    first, *entries = output["prompt_logprobs"]
    assert first is None
    assert len(entries) == len(prompt) - 1
    for token_id, entry, expected in zip(prompt[1:], entries, score(prompt)):
        top_ids = expected.topk(num_top).indices.tolist()
        assert list(entry) == list(dict.fromkeys([*top_ids, token_id]))
        for each, logprob in entry.items():
            assert logprob == pytest.approx(expected[each].item(), abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7},  # chunks
        {"max_num_seqs": 3, "max_num_batched_tokens": 30},  # parts of 3 rows of logits
        {"num_kvcache_blocks": 13},  # preemptions
        {"num_kvcache_blocks": 13, "max_num_batched_tokens": 7},
        {"enable_chunked_prefill": False},
        {"enable_prefix_caching": False},
        {"enable_kernels": False},
        {"num_speculative_tokens": 3},
        {"tensor_parallel_size": 2, "max_num_seqs": 3},
    ],
    ids=str,
)
def test_they_match_transformers(tiny, make_llm, score, options):
    _, oracle = tiny
    with make_llm(**options) as llm:
        params = [SCORING, greedy(6)] * len(PROMPTS)
        prompts = [prompt for prompt in PROMPTS for _ in range(2)]
        for _ in range(2):  # the second time with a warm prefix cache
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for prompt, output in zip(prompts, outputs):
                assert output["token_ids"] == oracle(prompt, 6)
            for prompt, output in zip(PROMPTS, outputs[::2]):
                check(output, prompt, score)
            for output in outputs[1::2]:
                assert output["prompt_logprobs"] is None
            check_invariants(llm)
        if options.get("num_kvcache_blocks") == 13:
            assert llm.stats["num_preemptions"] > 0


def test_a_scored_prompt_reuses_nothing_and_can_be_reused(make_llm, score):
    llm = make_llm()
    prompt = PROMPTS[-1]
    for params, num_cached in ((SCORING, 0), (SCORING, 0), (greedy(1), 36)):
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert output["num_cached_tokens"] == num_cached


def test_a_preempted_sequence_keeps_what_is_scored(make_llm, score):
    """It then reuses its own blocks up to the first prompt token that is not scored."""
    llm = make_llm(max_num_batched_tokens=10)
    prompt = PROMPTS[-1]
    llm.add_request(prompt, SCORING)
    llm.step()
    llm.step()
    (seq,) = llm.scheduler.running
    assert len(seq.prompt_logprobs) == 21
    llm.scheduler.preempt(seq)
    llm.step()
    assert seq.num_computed_tokens == 20 + 10
    while not llm.is_finished():
        outputs = llm.step()
    check(outputs[0], prompt, score)


def test_an_interrupted_step_is_scored_again(make_llm, score, monkeypatch):
    llm = make_llm(max_num_batched_tokens=10)
    llm.add_request(PROMPTS[-1], SCORING)
    llm.step()

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.scheduler, "postprocess", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.step()
    outputs = []
    while not llm.is_finished():
        outputs = llm.step()
    check(outputs[0], PROMPTS[-1], score)


def test_no_more_rows_of_logits_at_once_than_were_profiled(make_llm, monkeypatch):
    llm = make_llm(max_num_seqs=4)
    model = llm.model_runner.executor.worker.model
    compute_logits = model.compute_logits
    sizes = []

    def record(hidden):
        sizes.append(len(hidden))
        return compute_logits(hidden)

    monkeypatch.setattr(model, "compute_logits", record)
    generate_ids(llm, PROMPTS[-2:], SCORING)
    assert sum(sizes) >= sum(LENGTHS[-2:])
    assert max(sizes) <= 4


def test_every_sample_and_every_kind_of_output_has_them(make_llm, score, tmp_path):
    llm = make_llm(trace=Path(tmp_path) / "trace.json")
    params = SamplingParams(n=2, max_tokens=2, logprobs=1, prompt_logprobs=0)
    for output in llm.generate(PROMPTS[2], params, use_tqdm=False):
        check(output, PROMPTS[2], score, num_top=0)
    for output in llm.stream(PROMPTS[2], SCORING):
        check(output, PROMPTS[2], score)


@pytest.mark.parametrize("value", [-1, 1.5, "2", True])
def test_invalid_numbers_are_rejected(value):
    with pytest.raises((TypeError, ValueError), match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=value)


def test_more_than_the_vocabulary_gives_all(make_llm):
    llm = make_llm()
    params = SamplingParams(max_tokens=1, prompt_logprobs=1000)
    (output,) = llm.generate([1, 2], params, use_tqdm=False)
    assert len(output["prompt_logprobs"][1]) == VOCAB_SIZE
