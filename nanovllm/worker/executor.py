"""Drives the workers of a model: one in this process, or one per rank.

    rank 0    LLM(...), scheduler, sampler    sends each batch to the others, computes its own share
    rank 1..  a Worker, nothing else          receives a batch, computes its own share

MultiRankExecutor starts the processes of ranks 1 and up (rank_process.py), or finds them under
torchrun, and notices when one is lost. The engine cannot compute any more then.

A rank must finish every step that it begins, because the others wait for it. Rank 0's share is
therefore computed by a thread of its own, and Ctrl-C interrupts only the caller that waits for it.
The caller and the thread exchange messages through SimpleQueues, which are written in C. A lock
that is written in Python, such as that of a Future, can stay held after an interrupt, and the
thread would wait for it forever.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm.batch.batch import Batch
from nanovllm.config import Config
from nanovllm.models.spec import ModelSpec
from nanovllm.worker.process_groups import Place, Serve, join_torchrun
from nanovllm.worker.rank_process import EXIT_TIMEOUT, find_failure, start_rank
from nanovllm.worker.startup import serve_rank, start_worker
from nanovllm.worker.worker import Worker

Result = TypeVar("Result")
HandOut = Callable[[Tensor, int, Callable[[Tensor | None], Tensor]], Tensor]
# Seconds:
_POLL_INTERVAL = 0.5  # between checks for lost ranks, because a call must fail within seconds
_REPORT_TIMEOUT = 0.5  # for a rank to report its failure, which takes milliseconds
_STEP_TIMEOUT = 0.5  # for rank 0's thread to end its step, unless it waits for a lost rank


class Executor:
    """Drives a single worker, in the caller's thread. Raises ValueError as Worker does."""

    stop_reason: str | None = None  # why nothing can be computed any more

    def __init__(self, config: Config, spec: ModelSpec, directory: Path) -> None:
        self.worker = Worker(config, spec, directory)

    def start(self, sample: Callable[[Tensor], object]) -> None:
        """Prepare the workers for the first step, as start_worker does."""
        start_worker(self.worker, sample)

    @torch.inference_mode()
    def execute(self, batch: Batch, hand_out: HandOut) -> Tensor:
        """Compute a batch on all ranks. Return logits [num_sampled, vocab_size].

        hand_out(hidden, start, compute_logits) receives all rows, from row number `start`, and
        returns the logits that are sampled. It is called once for each `max_num_logits` rows, and
        calls compute_logits(indices) once.
        """
        worker = self.worker
        sampled: list[Tensor] = []  # more than one part if the step scores long prompts
        start = 0
        for hidden in worker.execute(batch).split(worker.max_num_logits):
            sampled.append(hand_out(hidden, start, partial(self.compute_logits, hidden)))
            start += len(hidden)
        return sampled[0] if len(sampled) == 1 else torch.cat(sampled)

    def compute_logits(self, hidden: Tensor, indices: Tensor | None) -> Tensor:
        """Compute the logits of some rows of `hidden`, or of all of them."""
        compute = self.worker.model.compute_logits
        if indices is None:
            return compute(hidden)
        if self.worker.tp.size > 1:  # the other ranks compute all rows
            return compute(hidden)[indices]
        return compute(hidden[indices])

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Wait until the device has reached `event`."""
        event.synchronize()

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
        serve = partial(serve_rank, config, spec, directory)
        # The processes of ranks 1 and up by their pipes. There are none under torchrun.
        self.processes: dict[Connection, BaseProcess] = {}
        self.tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None ends the thread
        store = join_torchrun(size, serve)
        self.thread = Thread(target=self._run_tasks, daemon=True)
        self.thread.start()
        # A forked process must not keep the pipes open, or the other ranks would not notice the end
        # of rank 0.
        os.register_at_fork(after_in_child=self.processes.clear)
        try:
            if store is None:
                store = self._start_ranks(size, serve)
            self.worker = self.call(Worker, config, spec, directory, Place(0, 0, store))
        except BaseException:
            self.stop("the engine has not started")
            raise

    def _start_ranks(self, size: int, serve: Serve) -> dist.Store:
        """Start ranks 1 and up on this machine. Return the store in which they meet rank 0."""
        num_threads = torch.get_num_threads()
        share = max(1, num_threads // size)
        self.call(torch.set_num_threads, share)  # in the thread of rank 0
        torch.set_num_threads(num_threads)  # unchanged for all other threads
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(1, size):
            pipe, process = start_rank(serve, rank, size, store.port, share)
            self.processes[pipe] = process
        while not store.check([f"{rank} has started" for rank in range(1, size)]):
            self.raise_if_stopped(timeout=0.02)
        return store

    def start(self, sample: Callable[[Tensor], object]) -> None:
        self.call(super().start, sample)

    def execute(self, batch: Batch, hand_out: HandOut) -> Tensor:
        return self.call(super().execute, batch, hand_out)

    def synchronize(self, event: torch.cuda.Event) -> None:
        self.call(super().synchronize, event)

    def call(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run function(*args) in rank 0's thread, to its end even if the caller is interrupted.

        Raises RuntimeError if a rank is lost.
        """
        if current_thread() is self.thread:
            return function(*args)
        outcomes = SimpleQueue[tuple[Any, BaseException | None]]()

        def run() -> None:
            try:
                outcomes.put((function(*args), None))
            except BaseException as error:
                outcomes.put((None, error))

        self.tasks.put(run)
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
            task()
            del task  # it can hold the last reference to an engine

    def raise_if_stopped(self, timeout: float = 0.0) -> None:
        """Raise RuntimeError if nothing can be computed any more, or the ValueError of a worker.

        Wait up to `timeout` seconds for news of a lost rank.
        """
        if self.stop_reason is None and wait(self.processes, timeout):
            failure = find_failure(self.processes)
            self.stop(failure.reason)
            raise failure.kind(failure.reason)
        super().raise_if_stopped()

    def stop(self, reason: str) -> None:
        """End the other ranks. A second call has no effect, nor has a call in a forked process."""
        if self.stop_reason is not None:
            return
        super().stop(reason)
        if not self.thread.is_alive():  # a forked process has no such thread
            return
        while self.processes:
            _, process = self.processes.popitem()
            process.kill()
            process.join(EXIT_TIMEOUT)
        self.tasks.put(None)
        if self.thread is not current_thread():
            # Wait only briefly. The thread's step may wait for a lost rank, until `disconnect`
            # aborts the collective operation.
            self.thread.join(_STEP_TIMEOUT)
        if hasattr(self, "worker"):  # the start may have failed before
            # In a thread, because NCCL's abort may be stuck, too.
            disconnecting = Thread(target=self.worker.disconnect, daemon=True)
            disconnecting.start()
            disconnecting.join(EXIT_TIMEOUT)
