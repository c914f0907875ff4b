"""If a rank is lost, the call ends with an error that names it, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from multiprocessing import Pipe
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import psutil
import pytest
import torch
from conftest import generate_ids, greedy, make_checkpoint, random_prompt
from rank_helpers import check_nothing_is_left, find_ranks, make_executor, serve_and_fail

from nanovllm.features.speculation.drafts import Drafts
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.worker import executor as executor_module
from nanovllm.worker import rank_process
from nanovllm.worker.rank_process import Failure
from nanovllm.worker.worker import Worker

nothing_is_left = pytest.fixture(autouse=True)(check_nothing_is_left)
DEAD = "rank 1 of 2 has ended with exit code -9"


def lose(llm, complaint):
    """The running call fails, and so does every later one."""
    prompts = [random_prompt(seed, 60) for seed in range(8)]
    deadline = time.monotonic() + 10
    with pytest.raises(RuntimeError, match=complaint):
        while time.monotonic() < deadline:
            generate_ids(llm, prompts, greedy(190))
    with pytest.raises(RuntimeError, match=complaint):
        llm.add_request([1])
    assert find_ranks() == []
    llm.exit()
    with pytest.raises(RuntimeError, match=complaint):
        llm.step()


def test_a_rank_dies_while_idle(make_llm):
    llm = make_llm(tensor_parallel_size=2)
    generate_ids(llm, [[1, 2]], greedy(2))
    find_ranks()[0].kill()
    lose(llm, DEAD)


@pytest.mark.parametrize("enable_kernels", [True, False])
def test_a_rank_dies_in_a_step(make_llm, enable_kernels):
    """The others wait for it in a collective operation."""
    options = {"enable_prefix_caching": False, "num_kvcache_blocks": 1024}
    llm = make_llm(tensor_parallel_size=2, enable_kernels=enable_kernels, **options)
    threading.Timer(0.2, find_ranks()[0].kill).start()
    lose(llm, DEAD)


def test_a_rank_dies_at_the_start(make_llm):
    def kill_when_it_comes():
        while not find_ranks():
            time.sleep(0.001)
        find_ranks()[0].kill()

    threading.Thread(target=kill_when_it_comes).start()
    with pytest.raises(RuntimeError, match=DEAD):
        make_llm(tensor_parallel_size=2)


def test_a_gpu_waits_for_a_lost_rank(make_llm, monkeypatch):
    """Tokens never arrive until NCCL is aborted. The call ends nevertheless."""
    llm = make_llm(tensor_parallel_size=2)
    worker = llm.executor.worker
    aborted = threading.Event()
    tokens = MagicMock(tolist=lambda: [0] * aborted.wait(60))
    monkeypatch.setattr(llm.model_runner.sampler, "forward", lambda logits, batch: tokens)
    monkeypatch.setattr(worker, "disconnect", aborted.set)
    monkeypatch.setattr(worker, "device", torch.device("cuda"))
    monkeypatch.setattr("nanovllm.worker.worker.copy_to", lambda batch, device: batch)
    threading.Timer(0.2, find_ranks()[0].kill).start()
    lose(llm, DEAD)
    assert aborted.is_set()


def test_an_error_at_the_end_of_the_start_stops_the_ranks(make_llm, monkeypatch):
    runners = []

    def fail(drafts, engine):
        runners.append(engine.model_runner)
        raise KeyboardInterrupt

    monkeypatch.setattr(Drafts, "start", fail)
    with pytest.raises(KeyboardInterrupt):
        make_llm(tensor_parallel_size=2, num_speculative_tokens=2)
    assert not runners[0].executor.processes


def test_a_rank_fails(make_llm, monkeypatch):
    """The error has its traceback. Ranks that fail because of it are not named."""
    make_llm(tensor_parallel_size=2).exit()  # starts the fork server, which knows no PURPOSE
    monkeypatch.setenv("PURPOSE", "on purpose")
    monkeypatch.setattr(rank_process, "run_rank", serve_and_fail)
    with make_llm(tensor_parallel_size=4) as llm:
        generate_ids(llm, [[1]], greedy(3))
        monkeypatch.setattr(executor_module, "_POLL_INTERVAL", 1.5)  # time for other ranks to fail
        expected = r"^rank 2 of 4 has failed: \n(?s:.*)ZeroDivisionError: on purpose\n$"
        with pytest.raises(RuntimeError, match=expected):
            generate_ids(llm, [[1, 2, 3]], greedy(3))


def test_rank_0_fails(make_llm, monkeypatch):
    """In the middle of a step, while the others wait for it."""
    llm = make_llm(tensor_parallel_size=2)
    monkeypatch.setattr(llm.executor.worker, "compute", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate_ids(llm, [[1, 2]])
    lose(llm, "rank 0 has failed: ZeroDivisionError")


def test_a_checkpoint_that_does_not_fit(tmp_path, make_llm):
    make_checkpoint(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 2000)
    with pytest.raises(ValueError, match="model.safetensors"):
        make_llm(str(tmp_path), tensor_parallel_size=2)


def test_exit_in_a_step(make_llm):
    """By another thread. The call ends with an error, and exit() returns."""
    llm = make_llm(tensor_parallel_size=2)
    timer = threading.Timer(0.2, llm.exit)
    timer.start()
    with pytest.raises(RuntimeError, match="exit"):
        while True:
            generate_ids(llm, [[1, 2]] * 8, greedy(100))
    timer.join(3)
    assert not timer.is_alive()


def test_a_script_without_a_guard(tmp_path, tiny, make_llm, monkeypatch):
    """The process of rank 1 imports the script, which makes the engine again."""
    script = ModuleType("__main__")
    script.__file__ = str(tmp_path / "script.py")
    code = f"from nanovllm import LLM\nLLM({tiny[0]!r}, tensor_parallel_size=2)"
    (tmp_path / "script.py").write_text(code)
    monkeypatch.setitem(sys.modules, "__main__", script)
    with pytest.raises(RuntimeError, match="outside of `if __name__ == '__main__':`"):
        make_llm(tensor_parallel_size=2)


# --- An executor without processes


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_dead_rank_is_the_cause(is_dead):
    """Also if ranks that failed because of it are noticed first. Without a dead rank, the first
    failure is the cause. A ValueError stays one.
    """
    executor = make_executor(MagicMock())
    pipes = [Pipe() for _ in range(3 if is_dead else 2)]
    process = SimpleNamespace(name="rank 3 of 4", exitcode=-11, join=print, kill=print)
    executor.processes = {pipe: process for pipe, _ in pipes}
    for moment, (_, other) in enumerate(pipes[:2]):
        other.send(Failure(moment, f"rank {2 - moment} of 4 has failed", ValueError))
    if is_dead:
        pipes[2][1].close()
    expected = "rank 3 of 4 has ended with exit code -11" if is_dead else "rank 2 of 4 has failed"
    for kind in (RuntimeError if is_dead else ValueError, RuntimeError):
        with pytest.raises(kind) as caught:
            executor.raise_if_stopped()
        assert str(caught.value) == expected


def test_cuda_graphs_end_before_their_group():
    """NCCL's abort waits until all graphs with collectives are freed."""
    worker = object.__new__(Worker)
    worker.graphs = threading.Event()  # any object
    graphs = weakref.ref(worker.graphs)
    alive = []
    group = SimpleNamespace(abort=lambda: alive.append(graphs()))
    worker.device = torch.device("cuda")
    worker.tp = TensorParallel(0, 2, group)
    worker.disconnect()
    assert alive == [None]


def test_the_end_does_not_wait_for_a_stuck_abort(monkeypatch):
    """A traceback can keep the graphs alive."""
    monkeypatch.setattr(executor_module, "EXIT_TIMEOUT", 0.3)
    released = threading.Event()
    ended = []

    def disconnect():
        released.wait(20)
        ended.append(True)

    make_executor(MagicMock(disconnect=disconnect)).stop("of the test")
    assert not ended
    released.set()


# --- Scripts

SERVING = """
import os, signal, sys, threading, time
import psutil, torch
for name in ("init", "_lazy_init", "is_available", "device_count", "current_device"):
    setattr(torch.cuda, name, None)  # the fork server imports nanovllm and must not use CUDA
sys.modules.update(dict.fromkeys(["triton", "flash_attn", "ray", "starlette", "uvicorn"]))
from nanovllm import LLM, SamplingParams
if threading.active_count() > 1:
    raise SystemExit("an import has started a thread")
signal.signal(signal.SIGINT, signal.default_int_handler)

def start():
    return LLM(sys.argv[1], device="cpu", tensor_parallel_size=2, num_kvcache_blocks=8)

def serve(llm):
    params = SamplingParams(max_tokens=100)
    print(llm.generate([1, 2, 3], params, use_tqdm=False)[0]["finish_reason"], flush=True)

def fork(llm):
    child = os.fork()
    if not child:
        try:
            llm.add_request([1])
        except RuntimeError as error:
            print(str(error)[:23], flush=True)
        llm.exit()
        sys.exit()
    print("status", os.waitpid(child, 0)[1], flush=True)

try:
    LLM(sys.argv[1], max_num_seqs=0)
except ValueError as error:
    print(str(error)[:12], flush=True)
lost = start()
psutil.Process().children(recursive=True)[-1].kill()
try:
    while True:
        lost.generate([1, 2, 3], use_tqdm=False)
except RuntimeError as error:
    print(error, flush=True)
fork(lost)
llm = start()
fork(llm)
if not os.fork():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    time.sleep(1000)
try:
    while True:
        serve(llm)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    while True:
        serve(llm)
"""


def test_rank_0_is_ended(tiny):
    """By Ctrl-C, which reaches the whole process group and which it survives, and by SIGKILL.

    A forked process cannot use the engine, whether it is lost or not, and exits at once. The script
    is `python -c`, which cannot be imported. It needs neither optional packages nor asserts.
    """
    command = [sys.executable, "-O", "-c", SERVING, tiny[0]]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, start_new_session=True) as process:
        try:
            lines = [process.stdout.readline() for _ in range(7)]
            forked = ["this process was forked\n", "status 0\n"]
            assert lines == ["max_num_seqs\n", f"{DEAD}\n", *forked, *forked, "length\n"]
            (rank,) = find_ranks(psutil.Process(process.pid))
            os.killpg(process.pid, signal.SIGINT)
            while process.stdout.readline() != "interrupted\n":
                pass
            assert process.stdout.readline() == "length\n"
            process.kill()
            assert psutil.wait_procs([rank], 10)[1] == []
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
