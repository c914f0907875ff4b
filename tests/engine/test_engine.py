"""The engine's calls, alone and mixed at random: generate, stream, add_request, step and abort."""

import pytest
import torch
from conftest import check_invariants, generate_ids, greedy, random_prompt

from nanovllm import LLM, SamplingParams
from nanovllm.llm import ProgressBar

GREEDY = greedy(6)


@pytest.fixture(scope="module")
def llm(tiny):
    """An engine for tests that leave it idle."""
    return LLM(tiny[0], num_kvcache_blocks=64, kvcache_block_size=4)


def test_step_reports_what_requests_gained_during_other_calls(llm):
    mine = llm.add_request(random_prompt(0, 5), GREEDY)
    (other,) = llm.generate(random_prompt(1, 5), greedy(9))
    assert other["request_id"] == mine + 1
    assert not llm.is_finished()
    (output,) = llm.step()
    assert output["request_id"] == mine
    assert output["finish_reason"] == "length"
    assert len(output["token_ids"]) == 6
    assert llm.is_finished()
    assert llm.step() == []


def test_a_stream_reports_each_token(llm):
    prompts = [random_prompt(i, 5) for i in range(2)]
    streamed = [output["token_ids"] for output in llm.stream(prompts, GREEDY)]
    expected = generate_ids(llm, prompts, GREEDY)
    assert streamed == [ids[:length] for length in range(1, 7) for ids in expected]


def test_leaving_a_stream_cancels_its_requests(make_llm):
    """They are queued when the first output is requested."""
    llm = make_llm(max_num_seqs=2)
    stream = llm.stream([random_prompt(i, 5) for i in range(5)], GREEDY)
    assert llm.is_finished()
    next(stream)
    stream.close()
    assert llm.is_finished()
    assert llm.step() == []
    assert llm.stats["num_free_blocks"] == 64


def test_a_stream_goes_on_after_other_calls(llm):
    last = {}
    for output in llm.stream([random_prompt(i, 5) for i in range(3)], GREEDY):
        if not last:
            llm.abort(output["request_id"] + 1)
            llm.generate(random_prompt(9, 4), greedy(2))
        last[output["request_id"]] = output
    assert [o["finish_reason"] for o in last.values()] == ["length", "abort", "length"]
    assert llm.is_finished()


def test_abort_ends_one_sample_or_a_whole_request(make_llm):
    """Two samples run, and the third one waits."""
    llm = make_llm(max_num_seqs=2)
    request_id = llm.add_request([1, 2, 3], SamplingParams(n=3))
    llm.step()
    unknown = 12345
    for aborted, num_left in (unknown, 3), (request_id + 1, 2), (request_id, 0), (request_id, 0):
        llm.abort(aborted)
        assert llm.stats["num_running"] + llm.stats["num_waiting"] == num_left
    for invalid in ("0", None, True):
        with pytest.raises(TypeError, match="request_id"):
            llm.abort(invalid)
    assert not llm.is_finished()  # the aborts are yet to be reported
    check_invariants(llm)
    outputs = llm.step()
    assert [output["finish_reason"] for output in outputs] == ["abort"] * 3
    assert sorted(len(output["token_ids"]) for output in outputs) == [0, 1, 1]
    assert llm.is_finished()


def test_the_progress_bar_counts_requests_when_they_finish(make_llm, monkeypatch):
    llm = make_llm(max_num_batched_tokens=64)
    num_left = []

    def count_left(bar):
        assert (bar.total, bar.unit) == (4, "seq")
        num_left.append(len(llm.scheduler.running))

    monkeypatch.setattr(ProgressBar, "update", count_left)
    nums = [8, 2, 4, 2]
    prompts = [random_prompt(num, num) for num in nums]
    outputs = llm.generate(prompts, [*map(greedy, nums)], use_tqdm=True)
    assert [len(output["token_ids"]) for output in outputs] == nums
    assert num_left == [2, 2, 1, 0]
    num_left.clear()
    llm.generate(prompts[:2], SamplingParams(n=2, max_tokens=1), use_tqdm=True)  # counts samples
    assert len(num_left) == 4


def test_outputs_do_not_copy_the_prompt(llm):
    params = SamplingParams(prompt_logprobs=1, max_tokens=3)
    first, *others = llm.stream(random_prompt(0, 9), params)
    assert others
    for output in others:
        assert output["prompt_token_ids"] is first["prompt_token_ids"]
        assert output["prompt_logprobs"] is first["prompt_logprobs"]


def test_engines_are_independent_and_end(tiny, make_llm):
    prompt = random_prompt(0, 9)
    with make_llm(kvcache_block_size=2) as one, make_llm(kvcache_block_size=8) as two:
        pairs = list(zip(one.stream(prompt, GREEDY), two.stream(prompt, GREEDY), strict=True))
        assert [output["token_ids"] for output in pairs[-1]] == [tiny[1](prompt, 6)] * 2
    one.exit()
    for call in (one.generate, one.add_request):
        with pytest.raises(RuntimeError, match="exit"):
            call(prompt)


def test_torchs_random_state_is_untouched(llm):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    generate_ids(llm, [1, 2, 3])
    assert torch.equal(torch.get_rng_state(), before)
