"""The ranks of a model: starts the processes of ranks 1 and up, or finds them under torchrun, and notices when one is lost.

    rank 0    LLM(...), scheduler, sampler    `run` a batch: send it to the others, compute its own share
    rank 1..  an executor, nothing else       `serve`: receive a batch, compute its own share, receive the next

A pipe connects rank 0 with each process that it has started. A message from there is a failure; the end of the pipe is, on
either side, the death of the other. If a rank is lost, so is the engine.

A rank must not leave a step half done, or the others wait for it. So rank 0's share is computed by a thread of its own: Ctrl-C
interrupts only the caller who waits for it.

The processes come from multiprocessing's fork server, one for the whole program: it imports torch once, and each of them
starts in 0.1 s instead of 4. If the program itself has started it before, they import it each.
"""

import ctypes
import os
import signal
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent import futures
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess, _children  # type: ignore[attr-defined]  # typeshed leaves it out
from pathlib import Path
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nanovllm.config import Config
from nanovllm.engine.executor import Executor, Place, find_device
from nanovllm.models.decoder import ModelSpec

Result = TypeVar("Result")
Model = tuple[Config, ModelSpec, Path]  # what an executor is made from
Task = tuple[futures.Future[Any], Callable[..., Any], tuple[Any, ...]]  # where the result goes, function, arguments
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
        self.rank_0: _Rank0 | None = None
        if config.tensor_parallel_size == 1:
            self.executor = Executor(*model)
            return
        store = _join_torchrun(model)
        self.rank_0 = _Rank0(self)
        try:
            store = store or self._start_processes(model, self.rank_0.processes)
            self.executor = self.rank_0.executor = self.call(Executor, *model, Place(0, 0, store))
        except BaseException:
            self.stop("the engine has not started")
            raise

    def call(self, function: Callable[..., Result], *args: Any) -> Result:
        """function(*args) of rank 0's share. If the caller is interrupted, it is computed to its end all the same.

        Raises RuntimeError if a rank is lost.
        """
        if self.rank_0 in (None, current_thread()):
            return function(*args)
        answer: futures.Future[Result] = futures.Future()
        self.rank_0.tasks.put((answer, function, args))
        while not futures.wait([answer], _GRACE).done:
            self.check()
        if (error := answer.exception()) is None:
            return answer.result()
        if not isinstance(error, ValueError):  # which is its own; another error may come from the end of another rank
            self.check(_GRACE)
        self.stop(f"rank 0 has failed: {error!r}")
        raise error

    def check(self, timeout: float = 0.0) -> None:
        """Raises RuntimeError if nothing can be computed any more. Gives a lost rank `timeout` seconds to show.

        Of several, the first one is the cause: the others fail after it has sent its message, or died.
        """
        processes = self.rank_0.processes if self.rank_0 and self.ended is None else {}
        lost: list[Any] = wait(processes, timeout)  # pipes: `wait` returns what it was given
        if lost:
            _, is_value_error, reason = min(_read_failure(pipe, processes[pipe]) for pipe in lost)
            self.stop(reason)
            raise ValueError(reason) if is_value_error else RuntimeError(reason)
        if self.ended is not None:
            raise RuntimeError(self.ended)

    def stop(self, reason: str) -> None:
        """End the other ranks. A second call does nothing."""
        self.ended = self.ended or reason
        if self.rank_0 is not None:
            self.rank_0.stop_once()

    def _start_processes(self, model: Model, processes: dict[Connection, BaseProcess]) -> dist.Store:
        size, num_threads = model[0].tensor_parallel_size, torch.get_num_threads()
        if find_device(model[0].device, 0).type == "cuda":
            find_device(f"cuda:{size - 1}")  # is there one for every rank?
        share = max(1, num_threads // size)
        self.call(torch.set_num_threads, share)  # of rank 0's thread
        torch.set_num_threads(num_threads)  # and as it was for all others
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        for rank in range(1, size):
            pipe, pipe_to_rank_0 = context.Pipe()
            args = model, rank, store.port, share, dict(os.environ), pipe_to_rank_0
            process = context.Process(target=_work, args=args, name=f"rank {rank} of {size}")
            process.start()
            pipe_to_rank_0.close()  # the process has it now
            processes[pipe] = process
            _children.discard(process)  # or a forked process would try to join it at its own exit
        while not store.check([f"{rank} has started" for rank in range(1, size)]):
            self.check(timeout=0.02)
        return store


class _Rank0(Thread):
    """Computes rank 0's share, and ends all ranks: when told so, when `ranks` is garbage, or at the interpreter's end."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(daemon=True)
        self.processes: dict[Connection, BaseProcess] = {}  # of ranks 1 and up, by their pipes; none under torchrun
        self.executor: Executor | None = None
        self.tasks: SimpleQueue[Task | None] = SimpleQueue()
        self.stop_once = weakref.finalize(ranks, self.stop)
        _all.add(self)
        self.start()

    def run(self) -> None:
        while (task := self.tasks.get()) is not None:
            answer, function, args = task
            try:
                answer.set_result(function(*args))
            except BaseException as error:
                answer.set_exception(error)
            del task, answer, function, args  # which may be all that keeps an engine alive

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join(_EXIT_TIMEOUT)
        if self.executor and self.processes:  # not here: NCCL's abort, too, may be stuck
            leaving = Thread(target=self.executor.leave, daemon=True)
            leaving.start()
            leaving.join(_EXIT_TIMEOUT)
        elif self.executor:
            self.tasks.put((futures.Future(), self.executor.tp.send, (torch.empty(0),)))  # which ends their `serve`
            self.tasks.put((futures.Future(), self.executor.leave, ()))
        self.tasks.put(None)
        if self is not current_thread():
            self.join(_EXIT_TIMEOUT)
        if not self.processes:
            time.sleep(_GRACE)  # gloo's threads still hold the message: if the interpreter ends meanwhile, they abort the process


_all: weakref.WeakSet[_Rank0] = weakref.WeakSet()


def _leave_alone() -> None:
    """In a forked process: nothing here is its own to end, and the threads that an end would wait for do not exist there."""
    for rank_0 in _all:
        rank_0.stop_once.detach()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(rank_0))  # its executor must never be freed
        rank_0.processes.clear()  # with the pipes, or their other side would not see the end of rank 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_alone)


def _join_torchrun(model: Model) -> dist.Store | None:
    """The store of the ranks that torchrun has started, if it has. All but rank 0 serve in here, and exit."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return None
    if missing := [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ValueError(f"WORLD_SIZE is set, but {', '.join(missing)} is not: use torchrun, or export what your launcher knows")
    store, rank, world_size = next(dist.rendezvous("env://"))
    if world_size != (size := model[0].tensor_parallel_size):
        raise ValueError(f"tensor_parallel_size={size}, but torchrun has started {world_size} processes")
    if rank > 0:
        _serve(Executor(*model, Place(rank, int(os.environ["LOCAL_RANK"]), store)))
        raise SystemExit
    if store.add("engines", 1) > 1:
        raise RuntimeError("torchrun's ranks serve one engine, and leave with it: there has been one")
    return store


def _serve(executor: Executor) -> None:
    try:
        executor.serve()
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # one of them may hold CUDA graphs, for whose end NCCL's abort waits
        raise
    finally:
        executor.leave()


def _work(model: Model, rank: int, port: int, num_threads: int, environment: dict[str, str], pipe: Connection) -> None:
    """The process of rank 1 or up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is sent to all processes, and meant for rank 0
    Thread(target=lambda: (wait([pipe]), os._exit(1)), daemon=True).start()  # it sends nothing: this is its end
    os.environ.clear()
    os.environ.update(environment)  # the fork server's is that of its start
    torch.set_num_threads(num_threads)
    store = dist.TCPStore("127.0.0.1", port)
    store.set(f"{rank} has started", "")
    try:
        Executor(*model, Place(rank, rank, store)).serve()  # it does not leave: rank 0 ends this process once it knows
    except Exception as error:
        reason = f"{current_process().name} has failed:\n{traceback.format_exc()}"
        pipe.send((time.monotonic(), isinstance(error, ValueError), reason))


def _read_failure(pipe: Connection, process: BaseProcess) -> tuple[float, bool, str]:
    """When, whether it is a ValueError, and what: what the process has sent, or that it is dead."""
    try:
        return pipe.recv()
    except EOFError:
        process.join(_EXIT_TIMEOUT)
        reason = f"{process.name} has ended with exit code {process.exitcode}"
        if process.exitcode == 1:  # an error, but before `_work`, which sends what it meets
            reason += "; does the script make the engine under `if __name__ == '__main__':`, as it must?"
        return 0.0, False, reason
