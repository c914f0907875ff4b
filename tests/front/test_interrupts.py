"""Calls interrupted anywhere, by Ctrl-C or an error: the next call is served correctly."""

import random
import signal
import time
import warnings
from contextlib import suppress

import pytest
from conftest import check_invariants, greedy, random_prompt

from nanovllm import DEMO_MODEL, LLM, SamplingParams
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.request import Request

GREEDY = greedy(6)
PROMPTS = [random_prompt(i, 5 + i) for i in range(4)]
ROUNDS = 30


def interrupt(*_, **__):
    raise KeyboardInterrupt


class CtrlC:
    """Sends Ctrl-C as a real signal at a chosen time, once or twice within 20 microseconds."""

    def __init__(self):
        self.is_awaited = self.comes_again = False

    def handle(self, number, frame):
        if self.is_awaited:
            self.is_awaited = False
            signal.setitimer(signal.ITIMER_REAL, 20e-6 * self.comes_again)
            raise KeyboardInterrupt
        if self.comes_again:
            self.comes_again = False
            raise KeyboardInterrupt

    def interrupts(self, call, seconds, num=1):
        """Return whether Ctrl-C, sent `num` times after `seconds`, interrupts the call."""
        try:
            return self._interrupts(call, seconds, num)
        except KeyboardInterrupt:  # the second one
            return True

    def _interrupts(self, call, seconds, num):
        try:
            self.is_awaited, self.comes_again = True, num == 2
            signal.setitimer(signal.ITIMER_REAL, seconds)
            call()
            self.is_awaited = self.comes_again = False
            return False
        except KeyboardInterrupt:
            self.comes_again = False
            return True


@pytest.fixture(scope="module")
def ctrl_c():
    ctrl_c = CtrlC()
    before = signal.signal(signal.SIGALRM, ctrl_c.handle)
    yield ctrl_c
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def demo():
    return LLM(
        DEMO_MODEL,
        dtype="float32",
        num_kvcache_blocks=26,
        kvcache_block_size=4,
        max_num_batched_tokens=24,
    )


KINDS = [
    {"temperature": 0.0},
    {"frequency_penalty": 0.5},
    {"logprobs": 1},
    {"stop": ["zqzq"], "temperature": 0.0},
    {"n": 2},
]
REQUESTS = [
    ([5 + i] * (10 + 4 * i), SamplingParams(max_tokens=7, ignore_eos=True, seed=i, **kind))
    for i, kind in enumerate(KINDS)
]


def summarize(outputs):
    """The token ids, text and finish reason of each request."""
    last = {output["request_id"]: output for output in outputs}
    return [(last[i]["token_ids"], last[i]["text"], last[i]["finish_reason"]) for i in sorted(last)]


def by_generate(llm):
    return summarize(llm.generate(*map(list, zip(*REQUESTS)), use_tqdm=False))


def by_stream(llm):
    return summarize(list(llm.stream(*map(list, zip(*REQUESTS)))))


def shortest_of(times, call):
    """Seconds of the fastest call, so that a slow moment does not delay Ctrl-C past the end."""
    durations = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        durations.append(time.perf_counter() - start)
    return min(durations)


@pytest.mark.parametrize("call", [by_generate, by_stream])
def test_ctrl_c_at_any_moment(demo, ctrl_c, call):
    """Another request that is queued at the time continues."""
    rng = random.Random(0)
    expected = by_generate(demo)
    demo.scheduler.num_preemptions = 0
    assert call(demo) == expected and demo.stats["num_preemptions"]
    duration = shortest_of(3, lambda: call(demo))
    num_interrupted = 0
    for _ in range(ROUNDS):
        other = demo.add_request(*REQUESTS[0])
        num_interrupted += ctrl_c.interrupts(
            lambda: call(demo), rng.uniform(1e-4, 1.1 * duration), rng.choice([1, 2])
        )
        assert call(demo) == expected
        check_invariants(demo)
        outputs: list[dict] = []
        while not demo.is_finished():
            outputs += demo.step()
        outputs += demo.step()
        assert outputs[-1]["request_id"] == other and summarize(outputs[-1:]) == expected[:1]
        assert demo.stats["num_free_blocks"] == 26 and demo.step() == []
    assert num_interrupted > ROUNDS / 3


def test_ctrl_c_in_a_servers_loop(demo, ctrl_c):
    """A loop that continues misses nothing but, rarely, the report of the interrupted step."""
    rng = random.Random(1)
    expected = by_generate(demo)
    duration = shortest_of(3, lambda: by_generate(demo))
    num_interrupted = num_lost = 0
    for _ in range(ROUNDS // 2):
        ids = [demo.add_request(*request) for request in REQUESTS]
        last: dict[int, dict] = {}

        def serve(last=last):
            while not demo.is_finished():
                last.update((output["request_id"], output) for output in demo.step())

        while ctrl_c.interrupts(serve, rng.uniform(1e-4, duration / 2), rng.choice([1, 2])):
            num_interrupted += 1
        assert sorted(last) == [*ids, ids[-1] + 1]
        reports = summarize(list(last.values()))
        num_lost += sum(finish_reason is None for *_, finish_reason in reports)
        assert all(
            entry == known
            for entry, known in zip(reports, expected, strict=True)
            if entry[2] is not None
        )
    assert num_interrupted > ROUNDS / 3 and num_lost <= num_interrupted / 5


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("where", ["prepare_batch", "prepare_sampling"])
def test_interrupted_generate(tiny, make_llm, monkeypatch, error, where):
    """Its requests are cancelled, others continue, and listed blocks without K/V are not reused."""
    llm, prompts = make_llm(), [random_prompt(i, 9) for i in range(3)]
    other = llm.add_request(prompts[0], GREEDY)
    llm.step()
    calls = []
    with monkeypatch.context() as patch:
        original = getattr(ModelRunner, where)

        def fail_on_second_call(self, *args):
            calls.append(1)
            if len(calls) == 2:
                raise error
            return original(self, *args)

        patch.setattr(ModelRunner, where, fail_on_second_call)
        with pytest.raises(error):
            llm.generate(prompts, GREEDY, use_tqdm=False)
    check_invariants(llm)
    assert llm.stats["num_waiting"] == 1
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [o["token_ids"] for o in outputs] == [tiny[1](prompt, 6) for prompt in prompts]
    (news,) = llm.step()
    assert news["request_id"] == other and news["token_ids"] == tiny[1](prompts[0], 6)


def test_ctrl_c_again_while_starting_over(tiny, make_llm, monkeypatch):
    llm = make_llm()
    other = llm.add_request(PROMPTS[3], GREEDY)
    llm.step()
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "run", interrupt)
        patch.setattr(BlockManager, "reset", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [o["token_ids"] for o in outputs] == [tiny[1](prompt, 6) for prompt in PROMPTS]
    check_invariants(llm)
    assert [(o["request_id"], o["token_ids"]) for o in llm.step()] == [
        (other, tiny[1](PROMPTS[3], 6))
    ]


def test_text_of_a_token_that_is_cut_off(demo, monkeypatch):
    """Ctrl-C between the stop string search and the commit: the text has no uncommitted token."""
    request_id = demo.add_request("1, 2, 3", SamplingParams(temperature=0.0, stop="#"))
    demo.step()
    with monkeypatch.context() as patch:
        patch.setattr(Request, "commit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            demo.step()
    demo.abort(request_id)
    (output,) = demo.step()
    assert (
        output["text"] == demo.tokenizer.decode(output["token_ids"])
        and len(output["token_ids"]) == 1
    )


def test_a_hit_that_is_not_used(tiny, make_llm, monkeypatch):
    """Ctrl-C in a request's first step: its prefix is recomputed, and not reported as cached."""
    llm = make_llm()
    prompt = random_prompt(3, 14)
    llm.generate(prompt, GREEDY, use_tqdm=False)
    llm.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=1))
    with monkeypatch.context() as patch:
        patch.setattr(llm.model_runner, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.step()
    num_prefill_tokens = llm.stats["num_prefill_tokens"]
    (output,) = llm.step()
    assert (
        llm.stats["num_prefill_tokens"] - num_prefill_tokens == 14
        and output["num_cached_tokens"] == 0
    )
    assert output["token_ids"] == tiny[1](prompt, 1)


def test_an_end_that_is_not_committed(tiny, make_llm, monkeypatch):
    """Ctrl-C after the scheduler finishes a sequence and before the commit: it finishes again."""
    llm = make_llm()
    request_id = llm.add_request(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=2))
    llm.step()
    with monkeypatch.context() as patch:
        patch.setattr(Request, "commit", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.step()
    assert not llm.is_finished() and llm.requests[request_id].committed == (1, None)
    (output,) = llm.step()
    assert (output["token_ids"], output["finish_reason"]) == (tiny[1](PROMPTS[0], 2), "length")


def test_a_request_whose_id_was_not_returned_is_cancelled(make_llm, monkeypatch):
    """Ctrl-C after add_request has queued a request: it is cancelled and not reported."""
    llm = make_llm()
    with monkeypatch.context() as patch:
        patch.setattr(
            llm.scheduler, "add", lambda seq, add=llm.scheduler.add: (add(seq), llm.abort(10**9))
        )
        cancel_aborted = llm._cancel_aborted
        patch.setattr(
            llm,
            "_cancel_aborted",
            lambda: (cancel_aborted(), interrupt() if llm.requests else None),
        )
        with pytest.raises(KeyboardInterrupt):
            llm.add_request(PROMPTS[0], GREEDY)
    assert (
        llm.step() == []
        and llm.is_finished()
        and not llm._inbox
        and llm.stats["num_free_blocks"] == 64
    )


def test_a_report_that_fails_comes_again(demo, monkeypatch):
    request_id = demo.add_request("hello", SamplingParams(max_tokens=1))
    with monkeypatch.context() as patch:
        patch.setattr("nanovllm.detokenizer.Detokenizer.read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            demo.step()
    assert not demo.is_finished()
    assert [o["request_id"] for o in demo.step()] == [request_id]


def test_a_warning_that_raises_affects_no_other_request(tiny, make_llm):
    """The warning about NaN logits can raise. Other requests continue, and the end is reported."""
    llm = make_llm()
    sample = llm.model_runner.sample
    bad, *good = (llm.add_request(prompt, GREEDY) for prompt in PROMPTS)

    def poison(logits, seqs):
        token_ids, logprobs = sample(logits, seqs)
        return [[-1] if seq.seq_id == bad else own for seq, own in zip(seqs, token_ids)], logprobs

    llm.model_runner.sample = poison
    outputs: list[dict] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(
            RuntimeWarning, match=f"request {bad} ends with an error: its logits are NaN"
        ):
            while True:
                outputs += llm.step()
    while not llm.is_finished():
        outputs += llm.step()
    last = {output["request_id"]: output for output in outputs}
    assert [output["finish_reason"] for output in outputs if output["request_id"] == bad] == [
        "error"
    ]
    assert [last[i]["token_ids"] for i in good] == [tiny[1](prompt, 6) for prompt in PROMPTS[1:]]
    check_invariants(llm)


def test_penalties_interrupted_while_they_count(make_llm, ctrl_c):
    """Tokens are counted by the next step, and none twice."""
    params = SamplingParams(
        temperature=0.0, max_tokens=12, frequency_penalty=1.0, repetition_penalty=1.3
    )
    (expected,) = make_llm().generate(PROMPTS[0], params, use_tqdm=False)
    llm = make_llm()
    count, rng, num_interrupted = llm.model_runner.penalties._count, random.Random(2), 0

    def count_and_be_interrupted(seqs):
        nonlocal num_interrupted
        if ctrl_c.interrupts(lambda: count(seqs), rng.uniform(1e-6, 2e-4)):
            num_interrupted += 1
            raise KeyboardInterrupt
        return count(seqs)

    llm.model_runner.penalties._count = count_and_be_interrupted
    for _ in range(20):
        request_id = llm.add_request(PROMPTS[0], params)
        outputs: list[dict] = []
        while not llm.is_finished():
            with suppress(KeyboardInterrupt):
                outputs += llm.step()
        assert (outputs[-1]["request_id"], outputs[-1]["token_ids"]) == (
            request_id,
            expected["token_ids"],
        )
    assert num_interrupted > 20
