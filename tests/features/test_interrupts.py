"""An engine serves correctly after calls that Ctrl-C or an error interrupted at any moment."""

import random
import signal
import time
import warnings
from unittest.mock import patch

import pytest
from conftest import check_invariants, disturb_logits, generate_ids, random_prompt
from front_helpers import GREEDY, PROMPTS, finish, interrupt_in

from nanovllm import DEMO_MODEL, LLM, SamplingParams

NUM_BLOCKS = 26  # few enough that the requests below are preempted
ROUNDS = 20
SAMPLING = [
    {"temperature": 0.0},
    {"frequency_penalty": 0.5},
    {"logprobs": 1},
    {"stop": ["zqzq"], "temperature": 0.0},
    {"n": 2},
    {"prompt_logprobs": 1},
    {"structured_outputs": {"regex": "[a-z ]{3,30}"}},
]
REQUESTS = [
    ([5 + i] * (10 + 4 * i), SamplingParams(max_tokens=7, ignore_eos=True, seed=i, **options))
    for i, options in enumerate(SAMPLING)
]
BATCH = [list(column) for column in zip(*REQUESTS)]


class CtrlC:
    """Sends Ctrl-C as a real signal at a chosen time."""

    num_left = 0

    def handle(self, *_):
        if self.num_left == 0:
            return
        self.num_left -= 1
        if self.num_left > 0:
            signal.setitimer(signal.ITIMER_REAL, 20e-6)
        raise KeyboardInterrupt

    def interrupts(self, call, seconds, num=1):
        """Return whether `num` signals after `seconds`, 20 microseconds apart, interrupt `call`."""
        was_interrupted = False
        try:
            try:
                self.num_left = num
                signal.setitimer(signal.ITIMER_REAL, seconds)
                call()
            except KeyboardInterrupt:
                was_interrupted = True
            self.num_left = 0
        except KeyboardInterrupt:  # the second signal, while the first one was handled
            was_interrupted = True
        return was_interrupted


@pytest.fixture(scope="module")
def ctrl_c():
    ctrl_c = CtrlC()
    before = signal.signal(signal.SIGALRM, ctrl_c.handle)
    yield ctrl_c
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def demo():
    options = {"num_kvcache_blocks": NUM_BLOCKS, "kvcache_block_size": 4}
    return LLM(DEMO_MODEL, dtype="float32", max_num_batched_tokens=24, **options)


def summarize(outputs):
    """The token ids, text, finish reason and number of scores of each request."""
    last = {output["request_id"]: output for output in outputs}
    summaries = []
    for _, output in sorted(last.items()):
        num_scores = len(output["prompt_logprobs"] or [])
        reason = output["finish_reason"]
        summaries.append((output["token_ids"], output["text"], reason, num_scores))
    return summaries


def by_generate(llm):
    return summarize(llm.generate(*BATCH))


def measure(call):
    """Seconds of the fastest of three calls, so that most signals come before the end."""
    durations = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        durations.append(time.perf_counter() - start)
    return min(durations)


def test_ctrl_c_at_any_moment_changes_no_later_result(demo, ctrl_c):
    """Another request that is queued at the time continues."""
    rng = random.Random(0)
    expected = by_generate(demo)
    assert demo.stats["num_preemptions"] > 0
    duration = measure(lambda: by_generate(demo))
    num_interrupted = 0
    for _ in range(ROUNDS):
        other = demo.add_request(*REQUESTS[0])
        seconds = rng.uniform(1e-4, 1.1 * duration)
        num_interrupted += ctrl_c.interrupts(lambda: by_generate(demo), seconds, rng.choice([1, 2]))
        assert by_generate(demo) == expected
        check_invariants(demo)
        assert summarize([finish(demo)[other]]) == expected[:1]
        assert demo.stats["num_free_blocks"] == NUM_BLOCKS
        assert demo.step() == []
    assert num_interrupted > ROUNDS / 3


def test_a_prefix_hit_of_an_interrupted_step_is_recomputed(tiny, make_llm):
    llm = make_llm()
    generate_ids(llm, PROMPTS[3], GREEDY)
    llm.add_request(PROMPTS[3], GREEDY)
    interrupt_in(llm.model_runner, "forward", llm.step)
    before = llm.stats["num_prefill_tokens"]
    (output,) = finish(llm).values()
    assert llm.stats["num_prefill_tokens"] - before == len(PROMPTS[3])
    assert output["num_cached_tokens"] == 0
    assert output["token_ids"] == tiny[1](PROMPTS[3], 6)


def test_a_request_whose_id_was_not_returned_is_cancelled(make_llm):
    """It is not reported either."""
    llm = make_llm()
    queue = llm._queue

    def queue_and_be_interrupted(requests):
        queue(requests)
        raise KeyboardInterrupt

    interrupted = patch.object(llm, "_queue", queue_and_be_interrupted)
    with interrupted, pytest.raises(KeyboardInterrupt):
        llm.add_request(PROMPTS[0], GREEDY)
    assert llm.step() == []
    assert llm.is_finished()
    assert llm.stats["num_free_blocks"] == 64


def test_a_warning_that_raises_loses_no_output(tiny, make_llm):
    llm = make_llm()
    bad = llm.add_request([1], GREEDY)
    good = llm.add_request(PROMPTS[0], GREEDY)
    disturb_logits(llm, lambda seq: seq.seq_id == bad)
    message = f"request {bad} ends with an error: its logits are NaN"
    with warnings.catch_warnings(), pytest.raises(RuntimeWarning, match=message):
        warnings.simplefilter("error")
        llm.step()
    last = finish(llm)
    assert last.pop(bad)["finish_reason"] == "error"
    assert last[good]["token_ids"] == tiny[1](PROMPTS[0], 6)
    check_invariants(llm)


@pytest.mark.parametrize("is_aborted", [True, False])
def test_an_interrupted_step_scores_no_later_prompt(make_llm, is_aborted):
    """With several ranks it ends when the next step has already been prepared."""
    llm = make_llm(max_num_batched_tokens=8)
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    prompts = [random_prompt(length, length) for length in (12, 13)]
    expected = llm.generate(prompts, params)
    executor = llm.model_runner.executor
    call = executor.call
    late = []

    def call_too_late(*task):
        late.append(task)
        raise KeyboardInterrupt

    def call_in_order(*task):
        while late:
            call(*late.pop())
        return call(*task)

    request_ids = [llm.add_request(prompt, params) for prompt in prompts]
    with patch.object(executor, "call", call_too_late), pytest.raises(KeyboardInterrupt):
        llm.step()
    if is_aborted:
        llm.abort(request_ids[0])
    with patch.object(executor, "call", call_in_order):
        last = finish(llm)
    for request_id, output in list(zip(request_ids, expected))[is_aborted:]:
        for name in ("token_ids", "prompt_logprobs"):
            assert last[request_id][name] == output[name]
