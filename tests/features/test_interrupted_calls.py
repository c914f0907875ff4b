"""An interrupt at any event of a call leaves an engine that gives the same results.

A first run lists the events of the call. It is then interrupted at the first event of each place in
the code in turn, or, with `-m sweep`, at each event.
"""

from contextlib import suppress
from unittest.mock import patch

import pytest
from conftest import copy_tokenizer, find_feature, make_checkpoint
from event_interrupts import ENGINE, EventInterrupts, at_event
from random_calls import check_idle
from random_engines import find_difference

from nanovllm import LLM, SamplingParams
from nanovllm.engine.feature import Feature
from nanovllm.engine.request import Request
from nanovllm.features.speculation.drafts import Drafts

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["the cat", "the mat"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
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
    costs = find_feature(llm, Drafts).costs
    costs.choose_count = lambda step, found: len(found)
    return llm


@pytest.fixture(scope="module")
def overlapping(model):
    """An engine without drafts. Each call is interrupted while a step is in flight."""
    llm = LLM(model, **OPTIONS)
    llm.overlaps = True
    return llm


@pytest.fixture(scope="module")
def expected(llm):
    outputs = finish(llm, start(llm))
    assert 0 < llm.stats["num_accepted_tokens"] < llm.stats["num_draft_tokens"]
    return outputs


def start(llm):
    """Add the requests. Return the samples of all of them."""
    ids = [llm.add_request(*request) for request in REQUESTS]
    return [sample for request_id in ids for sample in llm.requests[request_id]]


def finish(llm, requests):
    while not llm.is_finished():
        llm.step()
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


NUM_EVENTS = 2500  # of a call, which are some steps of generate
CALLS = {  # name -> call, steps before it, distance of the places that are tried
    "a step": (step, 5, 2),
    "a first step": (step, 0, 8),
    "a reset": (step_after_interrupt, 5, 5),
    "abort": (abort, 5, 2),
    "add_request": (add, 1, 4),
    "generate": (generate, 0, 8),
    "stream": (stream, 5, 12),
}


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
    return finish(llm, requests)


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


def interrupt_at_places(llm, expected, name, distance):
    call, num_steps, _ = CALLS[name]
    places = []
    for place in dict.fromkeys(list_events(llm, call, num_steps)[:NUM_EVENTS]):
        path, _, kind = place
        if kind != "line" or path.endswith(("/request.py", "/masks.py")):
            places.append(place)
    for place in places[::distance]:
        check(interrupt(llm, call, num_steps, place.__eq__), expected, call)


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_each_place_changes_no_result(llm, expected, name):
    """At calls and returns, and in requests, whose state a reset rolls back, at lines, too."""
    *_, distance = CALLS[name]
    interrupt_at_places(llm, expected, name, distance)


@pytest.mark.parametrize("name, distance", [("a step", 6), ("a reset", 20), ("abort", 4)])
def test_an_interrupt_with_a_step_in_flight_changes_no_result(
    overlapping, expected, name, distance
):
    interrupt_at_places(overlapping, expected, name, distance)


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
    check(finish(llm, requests), expected, step)


@pytest.mark.sweep
@pytest.mark.parametrize("engine", ["llm", "overlapping"])
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_each_event_changes_no_result(request, expected, name, engine):
    llm = request.getfixturevalue(engine)
    call, num_steps, _ = CALLS[name]
    for number in range(len(list_events(llm, call, num_steps))):
        check(interrupt(llm, call, num_steps, at_event(number)), expected, call)
