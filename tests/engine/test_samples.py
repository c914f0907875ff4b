"""The n samples of a request share their prompt and differ in their noise."""

import sys

import pytest
from conftest import generate_ids, random_prompt

from nanovllm import SamplingParams


@pytest.mark.parametrize(
    "options", [{}, {"enable_chunked_prefill": False}, {"max_num_batched_tokens": 8}], ids=str
)
def test_samples_share_the_prompt(make_llm, options):
    """Also a prompt that is computed in chunks."""
    prompts = [random_prompt(0, 13), random_prompt(1, 9)]
    params = SamplingParams(n=3, seed=5, max_tokens=8)
    llm = make_llm(**options)
    outputs = llm.generate(prompts, params)
    assert [output["sample_index"] for output in outputs] == [0, 1, 2] * 2
    assert [output["num_cached_tokens"] for output in outputs] == [0, 12, 12, 0, 8, 8]
    assert llm.stats["num_prefill_tokens"] == 13 + 9 + 4
    samples = [output["token_ids"] for output in outputs]
    assert generate_ids(make_llm(num_kvcache_blocks=9), prompts, params) == samples


def test_every_sample_has_its_own_noise(make_llm):
    """The first sample has that of a request without n. Seeds side by side share nothing."""
    llm = make_llm()
    samples = generate_ids(llm, [1, 2], SamplingParams(n=3, seed=5, max_tokens=8))
    assert generate_ids(llm, [1, 2], SamplingParams(seed=5, max_tokens=8)) == samples[:1]
    samples += generate_ids(llm, [1, 2], SamplingParams(n=3, seed=6, max_tokens=8))
    assert len(set(map(tuple, samples))) == 6


def count_opcodes_of_abort(llm, num_others):
    """Count bytecode instructions, which measures time without a clock."""
    for _ in range(num_others):
        llm.add_request([1], SamplingParams(n=2))
    request_id = llm.add_request([1], SamplingParams(n=2))
    events = []

    def trace(frame, event, arg):
        frame.f_trace_opcodes = True
        events.append(event)
        return trace

    sys.settrace(trace)
    llm.abort(request_id)
    sys.settrace(None)
    assert len(llm.requests) == 2 * num_others
    return len(events)


def test_abort_costs_the_same_beside_any_number_of_requests(make_llm):
    few = count_opcodes_of_abort(make_llm(), num_others=2)
    assert few == count_opcodes_of_abort(make_llm(), num_others=60)
