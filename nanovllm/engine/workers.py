"""The ranks of a model: starts the processes of ranks 1 and up, or finds them under torchrun, and notices when one is lost.

    rank 0    LLM(...), scheduler, sampler    `run` a batch: send it to the others, compute its own share
    rank 1..  an executor, nothing else       `serve`: receive a batch, compute its own share, receive the next

A step's collective operations need all ranks to the end. So rank 0's share is computed by a thread of its own, which Ctrl-C
does not reach: it only ends the waiting. If a rank is lost, so is the engine.
"""

import ctypes
import json
import math
import multiprocessing
import os
import signal
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess, _children
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nanovllm.config import Config
from nanovllm.engine.executor import Executor, find_device, find_rank_device, join, use_device
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.models.decoder import ModelSpec

Result = TypeVar("Result")
Model = tuple[Config, ModelSpec, Path]  # what an executor is made from
Answers = SimpleQueue[tuple[Any, BaseException | None]]  # a result, or an error
Tasks = SimpleQueue[tuple[Answers, Callable[..., Any], tuple[Any, ...]] | None]

START_TIMEOUT = 60.0  # seconds that another rank may be behind rank 0 when the engine starts
CACHE_TIMEOUT = 600.0  # once rank 0 has its share of the weights: until the last rank has its own, and its KV cache
_GRACE = 0.5  # until the ranks that a lost one takes with it are lost, too
_EXIT_TIMEOUT = 5.0


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
            device = find_device(config.device)
            with use_device(device):  # which `join` does for a thread of its own
                self.executor = Executor(*model, TensorParallel(), device)
            return
        if is_torchrun := int(os.environ.get("WORLD_SIZE", 1)) > 1:
            _check_environment()
            store, rank, world_size = next(dist.rendezvous("env://"))
            if world_size != self.size:
                raise ValueError(f"tensor_parallel_size={self.size}, but torchrun has started {world_size} processes")
            if rank > 0:
                _serve(model, rank, int(os.environ["LOCAL_RANK"]), store)
                raise SystemExit
            if store.add("engines", 1) > 1:
                raise RuntimeError("torchrun's ranks serve one engine, and leave with it: there has been one")
        else:
            find_rank_device(config.device, self.size - 1)  # is there one for every rank?
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.tasks = SimpleQueue()
        self.parts: list[Any] = [store]  # and then rank 0's TensorParallel
        thread = Thread(target=_compute, args=(self.tasks,), daemon=True)
        self._finalizer = weakref.finalize(self, _stop, os.getpid(), self.processes, self.tasks, thread, self.parts)
        thread.start()
        try:
            if not is_torchrun:
                self._start_processes(model)
            self._await_start()
            # A store of its own: whoever waits for a key keeps all others from the same one.
            tp, device = self.call(join, config, spec.dtype, 0, 0, store.clone(), timeout=START_TIMEOUT)
            self.parts.append(tp)
            self.executor = self.call(Executor, *model, tp, device)
        except BaseException:
            self.stop("the engine has not started")
            raise

    def call(self, function: Callable[..., Result], *args: Any, timeout: float = math.inf) -> Result:
        """function(*args) of rank 0's share. If the caller is interrupted, it is computed to its end all the same.

        Raises RuntimeError if a rank is lost, or if it takes more than `timeout` seconds.
        """
        if self.tasks is None:
            return function(*args)
        answers: Answers = SimpleQueue()
        self.tasks.put((answers, function, args))
        deadline = time.monotonic() + timeout
        while True:
            with suppress(Empty):
                result, error = answers.get(timeout=_GRACE)
                break
            self.check()
            if time.monotonic() > deadline:
                self.stop(f"one of the {self.size} ranks has hung: rank 0 has waited for {timeout:.0f} s")
        if error is None:
            return result
        if not isinstance(error, ValueError):  # which is its own, others may come from the end of another rank
            self.check(suspects_loss=True)
        self.stop(f"rank 0 has failed: {error!r}")
        raise error

    def check(self, suspects_loss: bool = False) -> None:
        """Raises RuntimeError if nothing can be computed any more."""
        if self.ended is None and (suspects_loss or (self.processes and self._find_ended())):
            self._raise_loss()
        if self.ended is not None:
            raise RuntimeError(self.ended)

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
            args = model, rank, self.parts[0].port, share, os.getpid()
            process = context.Process(target=_work, args=args, name=f"nanovllm rank {rank}")
            process.start()
            self.processes.append(process)
            _children.discard(process)  # which a forked process would end at its own exit

    def _find_ended(self) -> list[Any]:
        """Sentinels of the processes that have ended. They work in a forked process, and where SIGCHLD is ignored."""
        return wait([process.sentinel for process in self.processes], timeout=0)

    def _await_start(self) -> None:
        """Until all other ranks have started."""
        deadline = time.monotonic() + START_TIMEOUT
        while late := [rank for rank in range(1, self.size) if not self.parts[0].check([f"{rank} has started"])]:
            self.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {late[0]} of {self.size} has not started within {START_TIMEOUT:.0f} s")
            time.sleep(0.02)

    def _raise_loss(self) -> None:
        """Raise the error of the rank that was lost first, if one was. All others end with it."""
        store, is_value_error, reason = self.parts[0], False, None
        time.sleep(_GRACE)
        if store.check(["failure"]):
            is_value_error, reason = json.loads(store.get("failure"))
        for rank, process in enumerate(self.processes, 1):
            if process.sentinel in self._find_ended() and process.exitcode != 0:  # 0: it has failed, and has told so
                is_value_error, reason = False, f"rank {rank} of {self.size} has ended with exit code {process.exitcode}"
                if not store.check([f"{rank} has started"]):
                    reason += (
                        "; does the script make the engine under `if __name__ == '__main__':`, as it must, and is it a file?"
                    )
                break
        if reason is not None:
            self.stop(reason)
            raise ValueError(reason) if is_value_error else RuntimeError(reason)


def _check_environment() -> None:
    """Raises ValueError if a launcher has left out a variable, on every rank, before any of them waits for another."""
    if missing := [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ValueError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} says that ranks have been started, but {', '.join(missing)} is not set:"
            " use torchrun, or export what your launcher knows (LOCAL_RANK: SLURM_LOCALID, OMPI_COMM_WORLD_LOCAL_RANK)"
        )


def _compute(tasks: Tasks) -> None:
    """Rank 0's thread."""
    while (task := tasks.get()) is not None:
        answers, function, args = task
        try:
            answers.put((function(*args), None))
        except BaseException as error:
            answers.put((None, error))
        del task, answers, function, args  # which may be all that keeps an engine alive


def _stop(pid: int, processes: list[BaseProcess], tasks: Tasks, thread: Thread, parts: list[Any]) -> None:
    if os.getpid() != pid:
        for part in parts:  # let it live: its end would wait for threads that a forked process does not have
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))
        return
    for process in processes:
        process.kill()
    for process in processes:
        process.join(_EXIT_TIMEOUT)
    for tp in parts[1:]:
        if not processes:
            tasks.put((SimpleQueue(), tp.send, (tp.first[:0],)))
        elif tp.first.is_cuda:
            tp.group.abort()  # or what the GPU computes waits for the others for ever
    tasks.put(None)
    if thread is not current_thread():
        thread.join(_EXIT_TIMEOUT)
    if not processes:
        time.sleep(_GRACE)  # gloo's threads still hold the message: if the interpreter ends meanwhile, they abort the process


def _work(model: Model, rank: int, port: int, num_threads: int, parent: int) -> None:
    """The process of rank 1 or up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is sent to all processes, and meant for rank 0
    Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(num_threads)
    store = dist.TCPStore("127.0.0.1", port)
    with suppress(Exception):  # rank 0 shows it
        _serve(model, rank, rank, store)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_GRACE)
    os._exit(1)


def _serve(model: Model, rank: int, local_rank: int, store: dist.Store) -> None:
    """Compute the batches that rank 0 sends, until it sends none."""
    config, spec, _ = model
    try:
        store.set(f"{rank} has started", "")
        executor = Executor(*model, *join(config, spec.dtype, rank, local_rank, store))
        executor.allocate_kv_cache()
        executor.serve()
    except Exception as error:
        reason = f"rank {rank} of {config.tensor_parallel_size} has failed:\n{traceback.format_exc()}"
        store.compare_set("failure", "", json.dumps((isinstance(error, ValueError), reason)))  # if it is the first one
        raise
