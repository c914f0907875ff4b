"""Several ranks compute what one rank computes."""

import itertools
import signal
import sys
import threading
import time
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from conftest import (
    check_invariants,
    generate_ids,
    greedy,
    random_prompt,
)
from rank_helpers import check_nothing_is_left, find_ranks, make_executor

from nanovllm import SamplingParams
from nanovllm.layers.tensor_parallel import FIRST_PART
from nanovllm.worker import executor as executor_module
from nanovllm.worker.process_groups import Place, connect

nothing_is_left = pytest.fixture(autouse=True)(check_nothing_is_left)
PROMPT = random_prompt(3, 9)


def test_four_ranks_match_transformers(tiny, make_llm):
    """Cold and from a warm cache, in chunks, and after preemptions. Two ranks share a KV head."""
    prompts = [random_prompt(length, length) for length in (1, 3, 4, 5, 17, 33)]
    expected = [tiny[1](prompt, 10) for prompt in prompts]
    options = {"num_kvcache_blocks": 20, "max_num_batched_tokens": 12}
    with make_llm(**options, tensor_parallel_size=4) as llm:
        for _ in range(2):
            assert generate_ids(llm, prompts, greedy(10)) == expected
            check_invariants(llm)
        assert llm.stats["num_preemptions"] > 0
        assert llm.stats["num_cached_tokens"] > 0


def test_samples_are_the_same_on_any_number_of_ranks(make_llm):
    prompts = [random_prompt(seed, 5 + 3 * seed) for seed in range(4)]
    params = SamplingParams(top_k=9, repetition_penalty=1.3, n=3)
    token_ids = []
    for size in (1, 2):
        with make_llm(tensor_parallel_size=size) as llm:
            outputs = llm.generate(prompts, params)
            outputs += llm.beam_search(prompts[0], beam_width=3, max_tokens=6)[0]
        token_ids.append([output["token_ids"] for output in outputs])
    assert token_ids[0] == token_ids[1]


def test_two_engines_live_side_by_side(tiny, make_llm):
    expected = [tiny[1](PROMPT, 5)]
    engines = [make_llm(tensor_parallel_size=2) for _ in range(2)]
    assert len(find_ranks()) == 2
    for llm in engines + engines:
        assert generate_ids(llm, [PROMPT], greedy(5)) == expected
    engines.pop().exit()
    assert generate_ids(engines[0], [PROMPT], greedy(5)) == expected
    assert len(find_ranks()) == 1
    # The garbage collector ends the other one.


def test_the_cache_is_divided(make_llm):
    """With one KV head per rank, blocks have half the bytes, so memory holds twice as many."""
    num_blocks = []
    for size in (1, 2):
        options = {"num_kvcache_blocks": None, "kvcache_memory_bytes": 1 << 20}
        with make_llm(tensor_parallel_size=size, **options) as llm:
            num_blocks.append(llm.stats["num_blocks"])
    assert num_blocks[1] == 2 * num_blocks[0]


def test_ranks_stay_in_step_after_interrupts(tiny, make_llm):
    """Ctrl-C at any moment of a step. The next call is correct."""
    prompts = [random_prompt(seed, 20) for seed in range(4)]
    # A shell starts its background jobs without this handler.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    num_interrupts = 0
    with make_llm(tensor_parallel_size=2, enable_prefix_caching=False) as llm:
        for attempt in range(20):
            timer = threading.Timer(0.003 * attempt, signal.raise_signal, [signal.SIGINT])
            try:
                timer.start()
                llm.generate(prompts, greedy(50))
                timer.join()
                time.sleep(0.01)
            except KeyboardInterrupt:
                num_interrupts += 1
            assert generate_ids(llm, [PROMPT], greedy(4)) == [tiny[1](PROMPT, 4)]
            check_invariants(llm)
    assert num_interrupts > 5


def test_an_interrupt_anywhere_in_a_call_does_not_block_the_next_one(monkeypatch):
    """Not even between the steps of a lock that is written in Python, such as Condition."""
    executor = make_executor(None)
    num_checks = itertools.count()

    def give_up():
        assert next(num_checks) < 40

    executor.raise_if_stopped = give_up
    monkeypatch.setattr(executor_module, "_POLL_INTERVAL", 0.05)
    num_left = 0

    def interrupt(*_):
        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            raise KeyboardInterrupt
        return interrupt

    before = sys.gettrace()
    for place in itertools.count(1):
        num_left = place
        num_checks = itertools.count()
        try:
            sys.settrace(interrupt)
            executor.call(time.sleep, 0.003)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert executor.call(abs, -place) == place
        if num_left > 0:
            break
    executor.tasks.put(None)
    assert place > 5


def test_long_messages_arrive(monkeypatch):
    """In two parts, and from host to host, without NCCL."""
    nccl = MagicMock()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    store = dist.HashStore()
    lengths = (FIRST_PART - 1, FIRST_PART, 3 * FIRST_PART, 5, 0)
    messages = [torch.arange(length, dtype=torch.int32) for length in lengths]
    received = []

    def join(rank):
        return connect(torch.device("cuda"), 2, Place(rank, rank, store))

    def receive():
        tp = join(1)
        for _ in messages:
            received.append(tp.receive().tolist())

    thread = threading.Thread(target=receive)
    thread.start()
    tp = join(0)
    for message in messages:
        tp.send(message)
    thread.join(60)
    assert received == [message.tolist() for message in messages]
    assert not nccl.return_value.mock_calls
