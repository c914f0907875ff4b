"""Calls within a step, from other threads, and in forked processes: no wrong token, no hang."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from conftest import check_invariants, greedy, random_prompt

from nanovllm import SamplingParams
from nanovllm.engine.model_runner import ModelRunner

GREEDY = greedy(6)
PROMPTS = [random_prompt(i, 5 + i) for i in range(4)]


@pytest.fixture
def within_a_step(monkeypatch):
    """Call something in every step, after scheduling and before the forward pass."""

    def install(call):
        prepare_batch = ModelRunner.prepare_batch
        monkeypatch.setattr(
            ModelRunner,
            "prepare_batch",
            lambda self, seqs: (call() and None) or prepare_batch(self, seqs),
        )

    return install


# --- within a step


def test_abort_within_a_step(tiny, make_llm, within_a_step):
    llm = make_llm()
    ids = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
    llm.step()
    within_a_step(lambda: llm.abort(ids[1]))
    last: dict[int, dict] = {}
    while not llm.is_finished():
        last.update((output["request_id"], output) for output in llm.step())
        check_invariants(llm)
    assert [last[i]["finish_reason"] for i in ids] == ["length", "abort", "length", "length"]
    assert [last[i]["token_ids"] for i in ids] == [
        tiny[1](p, len(last[i]["token_ids"])) for i, p in zip(ids, PROMPTS)
    ]
    assert len(last[ids[1]]["token_ids"]) == 2, "the step that it was aborted in still counts"


def test_a_stream_is_collected_within_a_step(tiny, make_llm, within_a_step):
    llm = make_llm(max_num_seqs=8)

    def abandon_a_stream():
        stream = llm.stream(PROMPTS[3], SamplingParams(max_tokens=30))
        next(stream)
        cycle: list = [stream]
        cycle.append(cycle)

    abandon_a_stream()
    within_a_step(gc.collect)
    outputs = llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
    assert [o["token_ids"] for o in outputs] == [tiny[1](prompt, 6) for prompt in PROMPTS[:3]]
    assert llm.is_finished() and llm.stats["num_free_blocks"] == 64


def test_a_signal_handler_may_abort(tiny, make_llm, within_a_step):
    """Every other call within a step is rejected and changes nothing."""
    llm = make_llm()
    other = llm.add_request(PROMPTS[0], GREEDY)
    refusals: list[str] = []

    def handler(*_):
        llm.abort(other)
        calls = (
            llm.step,
            lambda: llm.generate(PROMPTS[0], use_tqdm=False),
            lambda: llm.add_request([1]),
            llm.exit,
        )
        for call in (
            *calls,
            lambda: next(llm.stream(PROMPTS[1])),
            lambda: llm.beam_search(PROMPTS[1], 2, 2),
        ):
            try:
                call()
            except RuntimeError as error:
                refusals.append(str(error))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        within_a_step(lambda: os.kill(os.getpid(), signal.SIGUSR1))
        outputs = llm.generate(PROMPTS[1:], GREEDY, use_tqdm=False)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [o["token_ids"] for o in outputs] == [tiny[1](prompt, 6) for prompt in PROMPTS[1:]]
    assert len(refusals) == 6 * 6 and all(
        "only abort() is allowed within a step" in refusal for refusal in refusals
    )
    check_invariants(llm)
    assert [output["finish_reason"] for output in llm.step()] == ["abort"]


# --- other threads


def in_threads(*calls):
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_threads_share_steps(tiny, make_llm):
    """Four threads with twenty calls each get correct results in fewer steps than one after the
    other.
    """
    llm = make_llm(num_kvcache_blocks=48)
    expected = [tiny[1](prompt, 6) for prompt in PROMPTS]
    steps: list[int] = []
    schedule = llm.scheduler.schedule
    llm.scheduler.schedule = lambda: (steps.append(1), schedule())[1]
    wrongs: list[object] = []

    def generate():
        for _ in range(20):
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            wrongs.extend(
                o for o, token_ids in zip(outputs, expected) if o["token_ids"] != token_ids
            )

    def stream():
        for i in range(20):
            *_, last = llm.stream(PROMPTS[i % 4], GREEDY)
            wrongs.extend([last] * (last["token_ids"] != expected[i % 4]))

    def beams():
        for i in range(20):
            (best,) = llm.beam_search(PROMPTS[i % 4], 1, 6, ignore_eos=True)[0]
            wrongs.extend([best] * (best["token_ids"] != expected[i % 4]))

    in_threads(generate, generate, stream, beams)
    assert not wrongs
    check_invariants(llm)
    assert llm.is_finished() and llm.stats["num_free_blocks"] == 48
    assert len(steps) < 4 * 20 * 6, "as many as without sharing"


def test_a_loop_beside_a_thread(tiny, make_llm):
    """`step` reports the requests of `add_request` only, whichever thread ran the steps."""
    llm, stop = make_llm(), threading.Event()

    def generate():
        while not stop.is_set():
            assert llm.generate(PROMPTS[3], GREEDY, use_tqdm=False)[0]["token_ids"] == tiny[1](
                PROMPTS[3], 6
            )

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        for _ in range(10):
            ids = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS[:3]]
            last: dict[int, dict] = {}
            while any(i not in last or last[i]["finish_reason"] is None for i in ids):
                last.update((output["request_id"], output) for output in llm.step())
            assert list(last) == ids and [last[i]["token_ids"] for i in ids] == [
                tiny[1](prompt, 6) for prompt in PROMPTS[:3]
            ]
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive() and llm.is_finished() and llm.step() == []


def test_a_signal_handler_aborts_while_its_thread_waits(make_llm, within_a_step):
    """The abort takes effect after the other thread's step."""
    llm, handled = make_llm(), []
    other = llm.add_request(PROMPTS[0], GREEDY)
    is_held = threading.Event()

    def hold():
        if threading.current_thread() is thread and not is_held.is_set():
            is_held.set()
            while len(llm._callers) < 2:
                time.sleep(0.001)
            time.sleep(0.02)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
            time.sleep(0.02)
            assert llm.requests[other].finish_reason is None

    before = signal.signal(signal.SIGUSR1, lambda *_: handled.append(llm.abort(other)))
    within_a_step(hold)
    thread = threading.Thread(target=llm.step)
    try:
        thread.start()
        assert is_held.wait(30)
        assert len(llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)[0]["token_ids"]) == 6
    finally:
        signal.signal(signal.SIGUSR1, before)
        thread.join(30)
    assert handled == [None] and llm.is_finished() and llm.stats["num_free_blocks"] == 64


def test_another_thread_waits_for_the_step(make_llm, within_a_step):
    """An abort returns at once and takes effect after the step."""
    llm, threads = make_llm(), []
    request_id = llm.add_request(PROMPTS[0], GREEDY)
    done: list[str] = []

    def call():
        llm.abort(request_id)
        done.append("abort")
        llm.step()
        done.append("step")

    def from_another_thread():
        if not threads:
            threads.append(threading.Thread(target=call))
            threads[0].start()
            while not done:
                time.sleep(0.001)
            time.sleep(0.05)
            assert done == ["abort"] and llm.requests[request_id].finish_reason is None

    within_a_step(from_another_thread)
    llm.generate(PROMPTS[2], SamplingParams(max_tokens=1), use_tqdm=False)
    threads[0].join(30)
    assert done == ["abort", "step"] and llm.is_finished() and llm.step() == [], (
        "the thread's step has reported it"
    )


def test_an_abort_after_the_last_look(make_llm):
    """An abort while a call releases the lock is not left to a later call."""
    llm, late = make_llm(), []
    request_id = llm.add_request(PROMPTS[0], GREEDY)

    class Callers(set):
        """Aborts while the lock is free and its last owner is still listed."""

        def discard(self, thread):
            if not late:
                late.append(llm._lock.locked())
                llm.abort(request_id)
            super().discard(thread)

    llm._callers = Callers()
    assert [output["finish_reason"] for output in llm.step()] == [None]
    assert (
        late == [False]
        and not llm.requests
        and llm.is_finished()
        and llm.stats["num_free_blocks"] == 64
    )


def test_aborts_from_another_thread_are_in_nobodys_way(tiny, make_llm):
    llm, stop = make_llm(), threading.Event()

    def abort_often():
        while not stop.wait(1e-5):
            llm.abort(10**9)

    thread = threading.Thread(target=abort_often)
    thread.start()
    try:
        for _ in range(20):
            *_, output = llm.stream(PROMPTS[0], GREEDY)
            assert output["token_ids"] == tiny[1](PROMPTS[0], 6)
    finally:
        stop.set()
        thread.join()


def test_exit_from_another_thread(make_llm, within_a_step):
    """exit waits for the step. Calls that wait get an error."""
    llm, threads = make_llm(), []

    def exit_soon():
        if not threads:
            threads.append(threading.Thread(target=llm.exit))
            threads[0].start()
            time.sleep(0.05)

    within_a_step(exit_soon)
    with pytest.raises(RuntimeError, match="exit"):
        llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=200), use_tqdm=False)
    threads[0].join(30)
    assert llm.is_finished() and llm.stats["num_free_blocks"] == 64


# --- other processes


def test_after_a_fork(tiny):
    """Neither the parent's engine nor a new one computes there, because OpenMP's threads are
    missing.
    """
    code = f"""if True:
        import os, sys
        from nanovllm import LLM
        llm = LLM({tiny[0]!r}, num_kvcache_blocks=64)
        llm.generate([1, 2, 3], use_tqdm=False)
        if os.fork() == 0:
            for call in (
                lambda: llm.generate([1, 2], use_tqdm=False), llm.step, lambda: llm.abort(0),
                lambda: LLM({tiny[0]!r}, num_kvcache_blocks=64),
            ):
                try:
                    call()
                except RuntimeError as error:
                    print("rejected:", error, flush=True)
            os._exit(0)
        os.wait()
        print(len(llm.generate([1, 2, 3], use_tqdm=False)[0]["token_ids"]))"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.count("rejected: this process was forked") == 4 and done.stdout.endswith(
        "64\n"
    )
