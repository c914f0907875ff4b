"""An engine serves correctly after calls that Ctrl-C or an error interrupted at any moment.

A first run lists the events of a call. The call is then interrupted at the first event of each
place in the code in turn. Random engines are interrupted at random events.
"""

import random
import signal
import time
import warnings
from contextlib import suppress
from unittest.mock import patch

import pytest
from conftest import (
    check_idle,
    check_invariants,
    copy_tokenizer,
    disturb_logits,
    make_checkpoint,
    make_drafts_free,
    random_prompt,
)
from event_interrupts import ENGINE, EventInterrupts
from front_helpers import GREEDY, PROMPTS, finish
from random_engines import find_difference

from nanovllm import LLM, SamplingParams
from nanovllm.engine.feature import Feature
from nanovllm.engine.request import Request

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["the cat", "the mat"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
MAX_EVENTS = 2500  # of a call, which are some steps of generate
MAX_STEPS = 200  # until all requests have finished
# Their state must be whole at each line.
LINE_BY_LINE = ("/request.py", "/generated_text.py", "/masks.py", "/llm_engine.py")
PROMPT = '{"a": 12, "b": "the cat"} {"a": 12, "b": "the cat"} '
CONSTRAINED = SamplingParams(
    temperature=0.0, max_tokens=12, logprobs=1, structured_outputs={"json": SCHEMA}
)
FREE = SamplingParams(seed=1, n=2, max_tokens=8, logprobs=1, prompt_logprobs=0, stop=["zq"])
REQUESTS = [(PROMPT, CONSTRAINED), ("the cat the cat the cat", FREE)]
OPTIONS = {"num_kvcache_blocks": 64, "kvcache_block_size": 4, "max_model_len": 100}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("interrupted")
    make_checkpoint(directory, vocab_size=805, num_hidden_layers=1)
    copy_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def llm(model):
    llm = LLM(model, num_speculative_tokens=3, **OPTIONS)
    make_drafts_free(llm)
    return llm


@pytest.fixture(scope="module")
def overlapping(model):
    """An engine without drafts. Each call is interrupted while a step is in flight."""
    llm = LLM(model, **OPTIONS)
    llm.overlaps = True
    return llm


@pytest.fixture(scope="module")
def expected(llm):
    outputs = complete(llm, start(llm))
    assert 0 < llm.stats["num_accepted_tokens"] < llm.stats["num_draft_tokens"]
    return outputs


def start(llm):
    """Add the requests. Return the samples of all of them."""
    ids = [llm.add_request(*request) for request in REQUESTS]
    return [sample for request_id in ids for sample in llm.requests[request_id]]


def complete(llm, requests):
    for _ in range(MAX_STEPS):
        llm.step()
        if llm.is_finished():
            break
    assert llm.is_finished()
    check_idle(llm)
    return [request.output() for request in requests]


def step(llm, requests):
    llm.step()


def step_after_interrupt(llm, requests):
    """The reset of the engine is interrupted, too."""
    with patch.object(Request, "commit", side_effect=MemoryError), suppress(MemoryError):
        llm.step()
    llm.step()


def abort(llm, requests):
    llm.abort(requests[0].seq_id)


def add(llm, requests):
    llm.add_request(*REQUESTS[0])


def generate(llm, requests):
    llm.generate(*REQUESTS[0])


def stream(llm, requests):
    for _ in llm.stream(*REQUESTS[0]):
        pass


def interrupt(llm, call, num_steps, is_chosen):
    """Interrupt a call after some steps. Return the outputs of all requests before it."""
    requests = start(llm)
    for _ in range(num_steps):
        llm.step()
    try:
        with EventInterrupts(is_chosen, prefixes=ENGINE):
            call(llm, requests)
    except KeyboardInterrupt as interrupt:
        print(interrupt)
    if call in (generate, stream):
        llm.step()  # resets the engine if it was interrupted
        assert set(llm._list_requests()) <= set(requests), "the call has cancelled its own"
    return complete(llm, requests)


def list_events(llm, call, num_steps):
    """The locations of all events of a call in the engine's code."""
    locations = []
    interrupt(llm, call, num_steps, locations.append)
    return locations


def check(outputs, expected, call):
    for output, other in zip(outputs, expected, strict=True):
        assert find_difference(output, other) is None
        if output["finish_reason"] == "abort":
            assert call is abort
            assert output is outputs[0]


@pytest.mark.parametrize(
    "engine, call, num_steps, distance",  # of the places that are tried
    [
        ("llm", step, 5, 3),
        ("llm", step, 0, 8),
        ("llm", step_after_interrupt, 5, 5),
        ("llm", abort, 5, 2),
        ("llm", add, 1, 4),
        ("llm", generate, 0, 8),
        ("llm", stream, 5, 12),
        ("overlapping", step, 5, 6),
        ("overlapping", step_after_interrupt, 5, 20),
        ("overlapping", abort, 5, 4),
    ],
)
def test_an_interrupt_at_each_place_changes_no_result(
    request, expected, engine, call, num_steps, distance
):
    """At calls and returns, and at lines where a reset rolls back or requests are removed."""
    llm = request.getfixturevalue(engine)
    places = []
    for place in dict.fromkeys(list_events(llm, call, num_steps)[:MAX_EVENTS]):
        path, _, kind = place
        if kind != "line" or path.endswith(LINE_BY_LINE):
            places.append(place)
    for place in places[::distance]:
        check(interrupt(llm, call, num_steps, place.__eq__), expected, call)


def test_a_feature_is_added_after_an_interrupt(model, expected):
    """The step in flight cannot be completed, so the engine is reset first."""
    llm = LLM(model, **OPTIONS)
    llm.overlaps = True
    requests = start(llm)
    for _ in range(3):
        llm.step()
    with patch.object(llm.scheduler, "advance", side_effect=KeyboardInterrupt):
        with suppress(KeyboardInterrupt):
            llm.step()
    feature = Feature()
    feature.can_overlap = False
    llm.add_feature(feature)
    assert not llm.overlaps
    check(complete(llm, requests), expected, step)


def test_ctrl_c_changes_no_later_result(llm, expected):
    """As a real signal, which CPython handles where it likes."""
    begin = time.perf_counter()
    complete(llm, start(llm))
    duration = time.perf_counter() - begin
    rng = random.Random(0)
    num_interrupted = 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    for _ in range(40):
        requests = start(llm)
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, duration))
            llm.generate(*REQUESTS[0])
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            num_interrupted += 1
        check(complete(llm, requests), expected, generate)
    signal.signal(signal.SIGALRM, before)
    assert num_interrupted > 10


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
    execute = executor.execute
    late = []

    def execute_too_late(*task):
        late.append(task)
        raise KeyboardInterrupt

    def execute_in_order(*task):
        while late:
            execute(*late.pop())
        return execute(*task)

    request_ids = [llm.add_request(prompt, params) for prompt in prompts]
    with patch.object(executor, "execute", execute_too_late), pytest.raises(KeyboardInterrupt):
        llm.step()
    if is_aborted:
        llm.abort(request_ids[0])
    with patch.object(executor, "execute", execute_in_order):
        last = finish(llm)
    for request_id, output in list(zip(request_ids, expected))[is_aborted:]:
        for name in ("token_ids", "prompt_logprobs"):
            assert last[request_id][name] == output[name]
