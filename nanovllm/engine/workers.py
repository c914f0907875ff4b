"""The ranks of a model: starts the processes of ranks 1 and up, or finds them under torchrun, and notices when one is lost.

    rank 0    LLM(...), scheduler, sampler    `run` a batch: send it to the others, compute its own share
    rank 1..  an executor, nothing else       `serve`: receive a batch, compute its own share, receive the next

A step's collective operations need all ranks to the end. So rank 0's share is computed by a thread of its own, which Ctrl-C
does not reach: it only ends the waiting. If a rank is lost, so is the engine.
"""

import json
import multiprocessing
import os
import signal
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nanovllm.config import Config
from nanovllm.engine.executor import Executor, find_device
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.models.decoder import ModelSpec

Result = TypeVar("Result")
Model = tuple[Config, ModelSpec, Path]  # what an executor is made from
Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]
Tasks = SimpleQueue["Task | None"]

START_TIMEOUT = 60.0  # seconds that another rank may be behind rank 0 when the engine starts
_GRACE = 0.5  # until the ranks that a lost one takes with it are lost, too
_EXIT_TIMEOUT = 5.0
_FOREVER = timedelta(days=365)  # that an engine may have nothing to do


class Ranks:
    """All ranks of a model, seen from rank 0, with its `executor`. Under torchrun, the others serve in here, and exit.

    Raises ValueError as Executor does, and RuntimeError if another rank does not start.
    """

    def __init__(self, config: Config, spec: ModelSpec, directory: Path) -> None:
        model = config, spec, directory
        self.size = config.tensor_parallel_size
        self.ended: str | None = None  # why nothing can be computed any more
        self.processes: list[BaseProcess] = []  # of ranks 1 and up; none under torchrun
        self.tasks: Tasks | None = None  # for rank 0's thread
        if self.size == 1:
            self.executor = Executor(*model, TensorParallel(), find_device(config.device))
            return
        if is_torchrun := int(os.environ.get("WORLD_SIZE", 1)) > 1:
            self.store, rank, world_size = next(dist.rendezvous("env://"))
            if world_size != self.size:
                raise ValueError(f"tensor_parallel_size={self.size}, but torchrun has started {world_size} processes")
            if rank > 0:
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would wait for the next batch
                _serve(model, rank, int(os.environ["LOCAL_RANK"]), self.store)
                raise SystemExit
        else:
            _find_device(config.device, self.size - 1)  # is there one for every rank?
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.tasks = SimpleQueue()
        thread = Thread(target=_compute, args=(self.tasks,), daemon=True)
        last_tasks: list[Task | None] = [None]
        self._finalizer = weakref.finalize(self, _stop, os.getpid(), self.processes, self.tasks, last_tasks, thread)
        thread.start()
        try:
            if not is_torchrun:
                self._start_processes(model)
            self._await("started")
            tp, device = self.call(_join, config.device, 0, self.size, 0, self.store)
            if is_torchrun:
                last_tasks.insert(0, (Future(), tp.send, (torch.empty(0, dtype=torch.int32, device=device),)))
            self.executor = self.call(Executor, *model, tp, device)
            self._await("loaded its share of the model")
        except BaseException:
            self.stop("the engine has not started")
            raise

    def call(self, function: Callable[..., Result], *args: Any) -> Result:
        """function(*args) of rank 0's share. If the caller is interrupted, it is computed to its end all the same.

        Raises RuntimeError if a rank is lost.
        """
        if self.tasks is None:
            return function(*args)
        future: Future[Result] = Future()
        self.check()
        self.tasks.put((future, function, args))
        while not future.done():
            wait([future], timeout=_GRACE)
            self.check()
        error = future.exception()
        if error is None:
            return future.result()
        if not isinstance(error, ValueError):  # which is its own, others may come from the end of another rank
            time.sleep(_GRACE)
            self._raise_loss()
        self.stop(f"rank 0 has failed: {error!r}")
        raise error

    def check(self) -> None:
        """Raises RuntimeError if nothing can be computed any more."""
        if self.ended is not None:
            raise RuntimeError(self.ended)
        if not all([process.is_alive() for process in self.processes]):
            time.sleep(_GRACE)
            self._raise_loss()

    def stop(self, reason: str) -> None:
        """End the other ranks. A second call does nothing."""
        if self.ended is None:
            self.ended = reason
        if self.tasks is not None:
            self._finalizer()

    def _start_processes(self, model: Model) -> None:
        num_threads = torch.get_num_threads()
        share = max(1, num_threads // self.size)
        self.call(torch.set_num_threads, share)  # of rank 0's thread
        torch.set_num_threads(num_threads)  # and as it was for all others
        context = multiprocessing.get_context("spawn")
        for rank in range(1, self.size):
            args = model, rank, self.store.port, share, os.getpid()
            process = context.Process(target=_work, args=args, name=f"nanovllm rank {rank}", daemon=True)
            self.processes.append(process)
            process.start()

    def _await(self, stage: str) -> None:
        """Until all other ranks have reached `stage`."""
        deadline = time.monotonic() + START_TIMEOUT
        while late := [rank for rank in range(1, self.size) if not self.store.check([f"{rank} has {stage}"])]:
            self.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {late[0]} of {self.size} has not {stage} within {START_TIMEOUT:.0f} s")
            time.sleep(0.02)

    def _raise_loss(self) -> None:
        """Raise the error of the rank that was lost first, if one was. All others end with it."""
        losses: list[tuple[float, bool, str]] = []
        for rank in range(1, self.size):
            if self.store.check([f"{rank} has failed"]):
                losses.append(tuple(json.loads(self.store.get(f"{rank} has failed"))))
            elif self.processes and not self.processes[rank - 1].is_alive():
                reason = f"rank {rank} of {self.size} has ended with exit code {self.processes[rank - 1].exitcode}"
                if not self.store.check([f"{rank} has started"]):
                    reason += "; does the script make the engine under `if __name__ == '__main__':`, as it must?"
                losses.append((0.0, False, reason))
        if losses:
            _, is_value_error, reason = min(losses)
            self.stop(reason)
            raise ValueError(reason) if is_value_error else RuntimeError(reason)


def _compute(tasks: Tasks) -> None:
    """Rank 0's thread."""
    while (task := tasks.get()) is not None:
        future, function, args = task
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)
        del task, future, function, args  # which may be all that keeps an engine alive


def _stop(pid: int, processes: list[BaseProcess], tasks: Tasks, last_tasks: list[Task | None], thread: Thread) -> None:
    if os.getpid() != pid:  # a forked process has its parent's engines, but not their ranks
        return
    for process in processes:
        process.kill()
    for task in last_tasks:
        tasks.put(task)
    if thread is not current_thread():
        thread.join(_EXIT_TIMEOUT)
    for process in processes:
        process.join(_EXIT_TIMEOUT)


def _work(model: Model, rank: int, port: int, num_threads: int, parent: int) -> None:
    """The process of rank 1 or up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is sent to all processes, and meant for rank 0
    Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(num_threads)
    _serve(model, rank, rank, dist.TCPStore("127.0.0.1", port))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_GRACE)
    os._exit(1)


def _serve(model: Model, rank: int, local_rank: int, store: dist.Store) -> None:
    """Compute the batches that rank 0 sends, until it sends none."""
    config = model[0]
    try:
        store.set(f"{rank} has started", "")
        tp, device = _join(config.device, rank, config.tensor_parallel_size, local_rank, store)
        executor = Executor(*model, tp, device)
        store.set(f"{rank} has loaded its share of the model", "")
        executor.allocate_kv_cache()
        executor.serve()
    except Exception as error:
        reason = f"rank {rank} of {config.tensor_parallel_size} has failed:\n{traceback.format_exc()}"
        store.set(f"{rank} has failed", json.dumps((time.time(), isinstance(error, ValueError), reason)))
        raise SystemExit(1) from error


def _join(device_name: str, rank: int, size: int, local_rank: int, store: dist.Store) -> tuple[TensorParallel, torch.device]:
    """Meet the other ranks."""
    device = _find_device(device_name, local_rank)
    if device.type == "cpu":
        return TensorParallel(rank, size, dist.ProcessGroupGloo(store, rank, size, _FOREVER)), device
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _FOREVER
    return TensorParallel(rank, size, dist.ProcessGroupNCCL(store, rank, size, options)), device


def _find_device(name: str, local_rank: int) -> torch.device:
    """The device of a machine's rank. Raises ValueError if there is none for it."""
    device = find_device(name)
    if device.type == "cuda":
        if device.index is not None:
            raise ValueError(f"device={name!r} is one GPU, but every rank needs its own: use 'cuda'")
        device = find_device(f"cuda:{local_rank}")
    return device
