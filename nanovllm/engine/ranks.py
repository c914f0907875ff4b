"""The ranks of a model: starts the processes of ranks 1 and up, or finds them under torchrun, and notices when one is lost.

    rank 0    LLM(...), scheduler, sampler    `run` a batch: send it to the others, compute its own share
    rank 1..  an executor, nothing else       `serve`: receive a batch, compute its own share, receive the next

A pipe connects rank 0 with each process that it has started. A message from there is a failure; the end of the pipe is, on
either side, the death of the other. If a rank is lost, so is the engine.

A step's collective operations need all ranks to the end. So rank 0's share is computed by a thread of its own, which Ctrl-C
does not reach: it only ends the waiting.

Where there is a fork server (multiprocessing's, one for the whole program), the processes come from there: it imports torch
once, and each of them starts in 0.1 s instead of 4. If the program itself has started it before, they import it each.
"""

import ctypes
import os
import signal
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import current_process, get_all_start_methods, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess, _children  # type: ignore[attr-defined]  # typeshed leaves it out
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nanovllm.config import Config
from nanovllm.engine.executor import Executor, Place, find_rank_device
from nanovllm.models.decoder import ModelSpec

Result = TypeVar("Result")
Model = tuple[Config, ModelSpec, Path]  # what an executor is made from
Processes = dict[Connection, BaseProcess]  # by their pipes
Tasks = SimpleQueue[Callable[[], None] | None]

_PRELOAD = ["torch", "transformers.models.auto.tokenization_auto"]  # slow to import; they initialise no CUDA
_GRACE = 0.5  # seconds
_EXIT_TIMEOUT = 5.0


class Ranks:
    """All ranks of a model, seen from rank 0, with its `executor`. Under torchrun, the others serve in here, and exit.

    Raises ValueError as Executor does, and RuntimeError if another rank does not start.
    """

    def __init__(self, config: Config, spec: ModelSpec, directory: Path) -> None:
        model = config, spec, directory
        self.ended: str | None = None  # why nothing can be computed any more
        self.processes: Processes = {}  # of ranks 1 and up; none under torchrun
        self.tasks: Tasks | None = None  # for rank 0's thread
        if config.tensor_parallel_size == 1:
            self.executor = Executor(*model)
            return
        is_torchrun = int(os.environ.get("WORLD_SIZE", 1)) > 1
        store = _join_torchrun(model) if is_torchrun else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.parts: list[Any] = [store]  # and rank 0's executor, once it is made
        self.tasks = SimpleQueue()
        thread = Thread(target=_compute, args=(self.tasks,), daemon=True)
        self._finalizer = weakref.finalize(self, _stop, self.processes, self.tasks, thread, self.parts)
        _engines.add(self)
        thread.start()
        try:
            if not is_torchrun:
                self._start_processes(model, self.parts[0])
            self.executor = self.call(Executor, *model, (0, 0, store))
            self.parts.append(self.executor)
        except BaseException:
            self.stop("the engine has not started")
            raise

    def call(self, function: Callable[..., Result], *args: Any) -> Result:
        """function(*args) of rank 0's share. If the caller is interrupted, it is computed to its end all the same.

        Raises RuntimeError if a rank is lost.
        """
        if self.tasks is None:
            return function(*args)
        answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def compute() -> None:
            try:
                answers.put((function(*args), None))
            except BaseException as error:
                answers.put((None, error))

        self.tasks.put(compute)
        while True:
            with suppress(Empty):
                result, error = answers.get(timeout=_GRACE)
                break
            self.check()
        if error is None:
            return result
        if not isinstance(error, ValueError):  # which is its own; another error may come from the end of another rank
            self.check(_GRACE)
        self.stop(f"rank 0 has failed: {error!r}")
        raise error

    def check(self, timeout: float = 0.0) -> None:
        """Raises RuntimeError if nothing can be computed any more. Gives a lost rank `timeout` seconds to show.

        Of several, the first one is the cause: the others fail after it has sent its message, or died.
        """
        failures: list[tuple[float, bool, str]] = []  # when, whether it is a ValueError, what
        lost: list[Any] = wait(self.processes, timeout) if self.ended is None else []  # pipes: `wait` returns what it was given
        for pipe in lost:
            process = self.processes[pipe]
            try:
                failures.append(pipe.recv())
            except EOFError:
                process.join(_EXIT_TIMEOUT)
                reason = f"{process.name} has ended with exit code {process.exitcode}"
                if process.exitcode == 1:  # an error, but before `_work`, which sends what it meets
                    reason += "; does the script make the engine under `if __name__ == '__main__':`, as it must?"
                failures.append((0.0, False, reason))
        if failures:
            _, is_value_error, reason = min(failures)
            self.stop(reason)
            raise ValueError(reason) if is_value_error else RuntimeError(reason)
        if self.ended is not None:
            raise RuntimeError(self.ended)

    def stop(self, reason: str) -> None:
        """End the other ranks. A second call does nothing."""
        self.ended = self.ended or reason
        if self.tasks is not None:
            self._finalizer()

    def _start_processes(self, model: Model, store: dist.TCPStore) -> None:
        size, num_threads = model[0].tensor_parallel_size, torch.get_num_threads()
        find_rank_device(model[0].device, size - 1)  # is there one for every rank?
        share = max(1, num_threads // size)
        self.call(torch.set_num_threads, share)  # of rank 0's thread
        torch.set_num_threads(num_threads)  # and as it was for all others
        has_fork_server = "forkserver" in get_all_start_methods()
        context: ForkServerContext | SpawnContext = get_context("forkserver") if has_fork_server else get_context("spawn")
        context.set_forkserver_preload(_PRELOAD)
        for rank in range(1, size):
            pipe, rank_0 = context.Pipe()
            args = model, rank, store.port, share, dict(os.environ), rank_0
            process = context.Process(target=_work, args=args, name=f"rank {rank} of {size}")
            process.start()
            rank_0.close()  # the process has it now
            self.processes[pipe] = process
            _children.discard(process)  # or a forked process would try to join it at its own exit
        while not store.check([f"{rank} has started" for rank in range(1, size)]):
            self.check(timeout=0.02)


_engines: weakref.WeakSet[Ranks] = weakref.WeakSet()


def _leave_alone() -> None:
    """In a forked process: nothing here is its own to end, and the threads that an end would wait for do not exist there."""
    for ranks in _engines:
        ranks._finalizer.detach()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(ranks.parts))  # never to be freed
        ranks.processes.clear()  # with the pipes, or their other side would not see the end of rank 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_alone)


def _join_torchrun(model: Model) -> dist.Store:
    """The store of the ranks that torchrun has started. All but rank 0 serve in here, and exit."""
    if missing := [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ValueError(f"WORLD_SIZE is set, but {', '.join(missing)} is not: use torchrun, or export what your launcher knows")
    store, rank, world_size = next(dist.rendezvous("env://"))
    if world_size != (size := model[0].tensor_parallel_size):
        raise ValueError(f"tensor_parallel_size={size}, but torchrun has started {world_size} processes")
    if rank > 0:
        _serve(model, (rank, int(os.environ["LOCAL_RANK"]), store))
        raise SystemExit
    if store.add("engines", 1) > 1:
        raise RuntimeError("torchrun's ranks serve one engine, and leave with it: there has been one")
    return store


def _compute(tasks: Tasks) -> None:
    """Rank 0's thread."""
    while (task := tasks.get()) is not None:
        task()
        del task  # which may be all that keeps an engine alive


def _stop(processes: Processes, tasks: Tasks, thread: Thread, parts: list[Any]) -> None:
    for process in processes.values():
        process.kill()
    for process in processes.values():
        process.join(_EXIT_TIMEOUT)
    for executor in parts[1:]:
        if not processes:
            tasks.put(partial(executor.tp.send, torch.empty(0)))  # which ends their `serve`
        elif executor.device.type == "cuda":
            executor.graphs = None  # for whose end the abort would wait
            executor.tp.group.abort()  # or what the GPU computes waits for the others for ever
    tasks.put(None)
    if thread is not current_thread():
        thread.join(_EXIT_TIMEOUT)
    if not processes:
        time.sleep(_GRACE)  # gloo's threads still hold the message: if the interpreter ends meanwhile, they abort the process


def _work(model: Model, rank: int, port: int, num_threads: int, environment: dict[str, str], rank_0: Connection) -> None:
    """The process of rank 1 or up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is sent to all processes, and meant for rank 0
    Thread(target=lambda: (wait([rank_0]), os._exit(1)), daemon=True).start()  # it sends nothing: this is its end
    os.environ.clear()
    os.environ.update(environment)  # the fork server's is that of its start
    torch.set_num_threads(num_threads)
    store = dist.TCPStore("127.0.0.1", port)
    store.set(f"{rank} has started", "")
    try:
        _serve(model, (rank, rank, store))
    except Exception as error:
        reason = f"{current_process().name} has failed:\n{traceback.format_exc()}"
        rank_0.send((time.monotonic(), isinstance(error, ValueError), reason))


def _serve(model: Model, place: Place) -> None:
    """Compute the batches that rank 0 sends, until it sends none."""
    executor = Executor(*model, place)
    executor.allocate_kv_cache()
    executor.serve()
