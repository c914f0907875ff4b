"""Drives the workers of a model: one in this process, or one per rank.

    rank 0    LLM(...), scheduler, sampler    sends each batch to the others, computes its own share
    rank 1..  a Worker, nothing else          receives a batch, computes its own share

MultiRankExecutor starts the processes of ranks 1 and up, or finds them under torchrun, and notices
when one is lost. A pipe connects rank 0 with each process that it has started. A process that fails
sends the reason through it. The end of the pipe means, on either side, that the other process has
died. If a rank is lost, the engine cannot compute any more.

A rank must finish every step that it begins, because the others wait for it. Rank 0's share is
therefore computed by a thread of its own, and Ctrl-C interrupts only the caller that waits for it.

The processes come from multiprocessing's fork server. It imports torch once per program, so each of
them starts much faster.
"""

import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import (  # type: ignore[attr-defined]  # not in typeshed
    BaseProcess,
    _children,
)
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from nanovllm.config import Config
from nanovllm.models.spec import ModelSpec
from nanovllm.utils.checks import naming
from nanovllm.worker.process_groups import Place
from nanovllm.worker.worker import Worker

Result = TypeVar("Result")
MakeWorker = Callable[[Place], Worker]
Outcome = tuple[Any, BaseException | None]  # a result, or an error
# A call for the thread of rank 0, and where its outcome goes.
Task = tuple[SimpleQueue[Outcome], Callable[..., Any], tuple[Any, ...]]
# Seconds:
_POLL_INTERVAL = 0.5  # between checks for lost ranks
_REPORT_TIMEOUT = 0.5  # for a rank to report why it has failed
_STEP_TIMEOUT = 0.5  # for rank 0's thread to end its step
_EXIT_TIMEOUT = 5.0  # for a process to end


class Executor:
    """Drives a single worker, in the caller's thread. Raises ValueError as Worker does."""

    def __init__(self, config: Config, spec: ModelSpec, directory: Path) -> None:
        self.stop_reason: str | None = None  # why nothing can be computed any more
        self.worker = Worker(config, spec, directory)

    def call(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run function(*args), which uses the worker."""
        return function(*args)

    def raise_if_stopped(self) -> None:
        """Raise RuntimeError if nothing can be computed any more."""
        if self.stop_reason is not None:
            raise RuntimeError(self.stop_reason)

    def stop(self, reason: str) -> None:
        """Make every later `raise_if_stopped` raise `reason`. A second call has no effect."""
        if self.stop_reason is None:
            self.stop_reason = reason


class MultiRankExecutor(Executor):
    """Drives the workers of several ranks. Under torchrun, ranks 1 and up do not return from here.

    Raises RuntimeError if another rank does not start.
    """

    def __init__(self, config: Config, spec: ModelSpec, directory: Path) -> None:
        size = config.tensor_parallel_size
        make_worker = partial(Worker, config, spec, directory)
        self.stop_reason = None
        # The processes of ranks 1 and up by their pipes. There are none under torchrun.
        self.processes: dict[Connection, BaseProcess] = {}
        self.tasks: SimpleQueue[Task | None] = SimpleQueue()  # None ends the thread
        store = _join_torchrun(size, make_worker)
        self.thread = Thread(target=self._run_tasks, daemon=True)
        self.thread.start()
        # A forked process must not keep the pipes open, or the other ranks would not notice the end
        # of rank 0.
        os.register_at_fork(after_in_child=self.processes.clear)
        try:
            if store is None:
                store = self._start_processes(size, make_worker)
            self.worker = self.call(make_worker, Place(0, 0, store))
        except BaseException:
            self.stop("the engine has not started")
            raise

    def raise_if_stopped(self, timeout: float = 0.0) -> None:
        """Raise RuntimeError if nothing can be computed any more, or the ValueError of a worker.

        Wait up to `timeout` seconds for news of a lost rank. If several ranks are lost, a dead
        process is reported before a rank that raised an error, whose process stays alive.
        """
        lost: list[Any] = []
        if self.processes and self.stop_reason is None:
            lost = wait(self.processes, timeout)
        if lost:
            cause = min([_read_failure(pipe, self.processes[pipe]) for pipe in lost])
            self.stop(cause.reason)
            if cause.is_value_error:
                raise ValueError(cause.reason)
        super().raise_if_stopped()

    def stop(self, reason: str) -> None:
        """End the other ranks. A second call has no effect, nor has a call in a forked process."""
        is_first = self.stop_reason is None
        super().stop(reason)
        if not is_first or not self.thread.is_alive():  # a forked process has no such thread
            return
        while self.processes:
            _, process = self.processes.popitem()
            process.kill()
            process.join(_EXIT_TIMEOUT)
        self.tasks.put(None)
        if self.thread is not current_thread():
            # Wait only briefly. The thread's step may wait for a lost rank, until `disconnect`
            # aborts the collective operation.
            self.thread.join(_STEP_TIMEOUT)
        if hasattr(self, "worker"):
            # In a thread, because NCCL's abort may be stuck, too.
            disconnecting = Thread(target=self.worker.disconnect, daemon=True)
            disconnecting.start()
            disconnecting.join(_EXIT_TIMEOUT)

    def call(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run function(*args) in rank 0's thread, to its end even if the caller is interrupted.

        Raises RuntimeError if a rank is lost.
        """
        if current_thread() is self.thread:
            return function(*args)
        # Not a Future, whose locks are written in Python. An interrupt can leave such a lock held,
        # for which rank 0's thread would then wait forever.
        outcomes = SimpleQueue[Outcome]()
        self.tasks.put((outcomes, function, args))
        while True:
            with suppress(Empty):
                result, error = outcomes.get(timeout=_POLL_INTERVAL)
                break
            self.raise_if_stopped()
        if error is not None:
            self.raise_if_stopped(_REPORT_TIMEOUT)  # the cause may be the death of another rank
            self.stop(f"rank 0 has failed: {error!r}")
            raise error
        return result

    def _run_tasks(self) -> None:
        for task in iter(self.tasks.get, None):
            outcomes, function, args = task
            try:
                outcomes.put((function(*args), None))
            except BaseException as error:
                outcomes.put((None, error))
            del task, outcomes, function, args  # they can hold the last reference to an engine

    def _start_processes(self, size: int, make_worker: MakeWorker) -> dist.Store:
        num_threads = torch.get_num_threads()
        share = max(1, num_threads // size)
        self.call(torch.set_num_threads, share)  # in the thread of rank 0
        torch.set_num_threads(num_threads)  # unchanged for all other threads
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = get_context("forkserver")
        # Neither module initializes CUDA.
        context.set_forkserver_preload(["torch", "transformers.models.auto.tokenization_auto"])
        for rank in range(1, size):
            pipe, pipe_to_rank_0 = context.Pipe()
            args = (make_worker, rank, store.port, share, dict(os.environ), pipe_to_rank_0)
            process = context.Process(target=_serve, args=args, name=f"rank {rank} of {size}")
            process.start()
            pipe_to_rank_0.close()  # the process has its own copy
            self.processes[pipe] = process
            _children.discard(process)  # a forked process would try to join it at its exit
        while not store.check([f"{rank} has started" for rank in range(1, size)]):
            self.raise_if_stopped(timeout=0.02)
        return store


def _join_torchrun(size: int, make_worker: MakeWorker) -> dist.Store | None:
    """Return the store of torchrun's ranks, or None without torchrun.

    On ranks 1 and up this does not return. They serve and then exit.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return None
    problem = "WORLD_SIZE is set, but another variable of torchrun is missing or invalid"
    with naming(problem, KeyError, ValueError):
        local_rank = int(os.environ["LOCAL_RANK"])
        store, rank, world_size = next(dist.rendezvous("env://"))
    if world_size != size:
        raise ValueError(
            f"tensor_parallel_size={size}, but torchrun has started {world_size} processes:"
            " set both to the same number"
        )
    if rank > 0:
        worker = make_worker(Place(rank, local_rank, store))
        try:
            worker.serve()
        except BaseException:
            traceback.print_exc()
            # Immediately, because NCCL's shutdown would wait for CUDA graphs that the traceback may
            # refer to.
            os._exit(1)
        worker.disconnect()
        raise SystemExit
    if store.add("engines", 1) > 1:
        raise RuntimeError(
            "torchrun's processes serve one engine only: run torchrun again for another one"
        )
    return store


class Failure(NamedTuple):
    """Why a rank is lost. Of several failures the smallest tuple is reported."""

    is_alive: bool  # its process still runs
    time: float  # the first failure closes connections, so that other ranks fail as well
    is_value_error: bool
    reason: str


def _serve(
    make_worker: MakeWorker,
    rank: int,
    port: int,
    num_threads: int,
    environment: dict[str, str],
    pipe: Connection,
) -> None:
    """The main function of rank 1 or up.

    Its watcher thread is non-daemonic, so the process stays alive until rank 0 closes the pipe,
    even after a failure.
    """

    def watch() -> None:
        wait([pipe])  # rank 0 sends nothing, so this is the end of the pipe
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all processes receive Ctrl-C; rank 0 handles it
    Thread(target=watch).start()
    try:
        os.environ.update(environment)  # the fork server has the one of its own start
        torch.set_num_threads(num_threads)
        store = dist.TCPStore("127.0.0.1", port)
        make_worker(Place(rank, rank, store)).serve()
    except BaseException as error:
        is_value_error = isinstance(error, ValueError)
        details = str(error) if is_value_error else f"\n{traceback.format_exc()}"
        reason = f"{current_process().name} has failed: {details}"
        pipe.send(Failure(True, time.monotonic(), is_value_error, reason))


def _read_failure(pipe: Connection, process: BaseProcess) -> Failure:
    """The failure that a process has sent, or its death."""
    try:
        return pipe.recv()
    except EOFError:
        process.join(_EXIT_TIMEOUT)
        reason = f"{process.name} has ended with exit code {process.exitcode}"
        # _serve sends its own errors, so 1 means that the process failed before _serve ran.
        if process.exitcode == 1:
            reason += (
                "; if the script makes the engine outside of `if __name__ == '__main__':`,"
                " move it there"
            )
        return Failure(False, 0.0, False, reason)
