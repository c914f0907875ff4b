"""Calls within a step, from threads and in forked processes give no wrong token and no hang."""

import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from conftest import check_invariants, generate_ids
from front_helpers import GREEDY, PROMPTS, finish
from project_helpers import start
from tqdm import tqdm

from nanovllm import SamplingParams
from nanovllm.engine.model_runner import ModelRunner


@pytest.fixture
def expected(tiny):
    """The greedy tokens of PROMPTS."""
    return [tiny[1](prompt, 6) for prompt in PROMPTS]


@contextmanager
def within_steps(call):
    """Call something in every step, after scheduling and before the forward pass."""
    prepare_batch = ModelRunner.prepare_batch

    def call_and_prepare(*args):
        call()
        return prepare_batch(*args)

    with patch.object(ModelRunner, "prepare_batch", call_and_prepare):
        yield


@contextmanager
def on_signal(handler):
    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def check_is_empty(llm, num_blocks=64):
    assert llm.is_finished()
    assert llm.stats["num_free_blocks"] == num_blocks


# --- within a step


def test_an_abort_within_a_step_takes_effect_after_it(expected, make_llm):
    llm = make_llm()
    ids = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
    llm.step()
    with within_steps(lambda: llm.abort(ids[1])):
        last = finish(llm)
    check_invariants(llm)
    assert [last[i]["finish_reason"] for i in ids] == ["length", "abort", "length", "length"]
    expected[1] = expected[1][:2]
    assert [last[i]["token_ids"] for i in ids] == expected


def test_a_stream_may_be_collected_within_a_step(expected, make_llm):
    llm = make_llm(max_num_seqs=8)

    def abandon_a_stream():
        stream = llm.stream(PROMPTS[3], SamplingParams(max_tokens=30))
        next(stream)
        cycle = [stream]
        cycle.append(cycle)

    abandon_a_stream()
    with within_steps(gc.collect):
        assert generate_ids(llm, PROMPTS[0], GREEDY) == expected[:1]
    check_is_empty(llm)


def test_a_signal_handler_may_only_abort(expected, make_llm):
    """Every other call within a step is rejected and changes nothing."""
    llm = make_llm()
    aborted = llm.add_request(PROMPTS[0], GREEDY)
    calls = [
        llm.step,
        llm.exit,
        lambda: llm.add_request([1]),
        lambda: next(llm.stream(PROMPTS[1])),
        lambda: llm.beam_search(PROMPTS[1], 2, 2),
    ]
    num_rejected = 0

    def handler():
        nonlocal num_rejected
        llm.abort(aborted)
        for call in calls:
            with pytest.raises(RuntimeError, match="only abort\\(\\) is allowed within a step"):
                call()
            num_rejected += 1

    with on_signal(handler), within_steps(lambda: os.kill(os.getpid(), signal.SIGUSR1)):
        token_ids = generate_ids(llm, PROMPTS[1:], GREEDY)
    assert token_ids == expected[1:]
    assert num_rejected == 6 * len(calls)
    check_invariants(llm)
    assert [output["finish_reason"] for output in llm.step()] == ["abort"]


# --- other threads


def test_a_call_does_not_wait_for_the_lock_of_tqdm(expected, make_llm):
    """Ctrl-C within tqdm can leave its lock held."""
    llm = make_llm()
    with ThreadPoolExecutor(1) as pool, tqdm.get_lock():
        outputs = pool.submit(llm.generate, PROMPTS, GREEDY, use_tqdm=True).result(60)
    assert [output["token_ids"] for output in outputs] == expected


def test_threads_share_steps(expected, make_llm):
    llm = make_llm(num_kvcache_blocks=48)

    def generate():
        for _ in range(20):
            assert generate_ids(llm, PROMPTS, GREEDY) == expected

    def stream():
        for i in range(20):
            *_, last = llm.stream(PROMPTS[i % 4], GREEDY)
            assert last["token_ids"] == expected[i % 4]

    calls = (generate, generate, stream, stream)
    count = patch.object(llm.scheduler, "schedule", side_effect=llm.scheduler.schedule)
    with count as steps, ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result(60)
    check_invariants(llm)
    check_is_empty(llm, num_blocks=48)
    assert steps.call_count < 4 * 20 * 6, "as many as without sharing"


def test_a_signal_handler_aborts_while_its_thread_waits(make_llm):
    """The abort returns at once, and takes effect after the other thread's step."""
    llm = make_llm()
    request_id = llm.add_request(PROMPTS[0], GREEDY)
    thread = threading.Thread(target=llm.step)
    is_held = threading.Event()
    reasons = []

    def hold():
        if threading.current_thread() is thread:
            is_held.set()
            while len(llm._threads_inside) < 2:
                time.sleep(0.001)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            time.sleep(0.04)
            reasons.extend(each.finish_reason for each in llm.requests[request_id])

    with on_signal(lambda: llm.abort(request_id)), within_steps(hold):
        thread.start()
        assert is_held.wait(30)
        (token_ids,) = generate_ids(llm, PROMPTS[1], GREEDY)
        thread.join(30)
    assert len(token_ids) == 6
    assert reasons == [None]
    assert [output["finish_reason"] for output in llm.step()] == ["abort"]
    check_is_empty(llm)


def test_an_abort_while_a_call_releases_the_lock_is_not_left_to_a_later_call(make_llm):
    llm = make_llm()
    request_id = llm.add_request(PROMPTS[0], GREEDY)
    was_locked = []

    class Callers(set):
        """Aborts while the lock is free and its last owner is still listed."""

        def discard(self, thread):
            if not was_locked:
                was_locked.append(llm._lock.locked())
                llm.abort(request_id)
            super().discard(thread)

    llm._threads_inside = Callers()
    assert [output["finish_reason"] for output in llm.step()] == [None]
    assert was_locked == [False]
    assert [output["finish_reason"] for output in llm.step()] == ["abort"]
    assert not llm.requests
    check_is_empty(llm)


def test_exit_waits_for_the_step_of_another_thread(make_llm):
    """Calls that wait get an error."""
    llm = make_llm()
    thread = threading.Thread(target=llm.exit)

    def exit_soon():
        if thread.ident is None:
            thread.start()
            time.sleep(0.05)

    with within_steps(exit_soon), pytest.raises(RuntimeError, match="exit"):
        llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=200))
    thread.join(30)
    check_is_empty(llm)


# --- other processes


FORK = """
import os, sys
from nanovllm import LLM

make = lambda: LLM(sys.argv[1], num_kvcache_blocks=64)
llm = make()
generate = lambda: llm.generate([1, 2, 3], use_tqdm=False)
generate()
if os.fork() == 0:
    for call in (generate, llm.step, llm.is_finished, lambda: llm.abort(0), make):
        try:
            call()
        except RuntimeError as error:
            print("rejected:", error, flush=True)
    os._exit(0)
os.wait()
print(len(generate()[0]["token_ids"]))
"""


def test_a_forked_process_can_neither_use_nor_make_an_engine(tiny):
    """OpenMP's threads are missing there. The parent's engine goes on."""
    done = start("-c", FORK, tiny[0], check=True, timeout=100)
    assert done.stdout.count("rejected: this process was forked") == 5
    assert done.stdout.endswith("64\n")
