"""The ranks of a model: starts the processes of ranks 1 and up, or finds them under torchrun, and notices when one is lost.

    rank 0    LLM(...), scheduler, sampler    `run` a batch: send it to the others, compute its own share
    rank 1..  an executor, nothing else       `serve`: receive a batch, compute its own share, receive the next

A pipe connects rank 0 with each process that it has started. A message from there is a failure; the end of the pipe is, on
either side, the death of the other. If a rank is lost, so is the engine.

A rank must not leave a step half done, or the others wait for it. So rank 0's share is computed by a thread of its own: Ctrl-C
interrupts only the caller who waits for it.

The processes come from multiprocessing's fork server, one for the whole program: it imports torch once, and each of them
starts in 0.1 s instead of 4. If the program itself has started it before, they import it each.

A process that is forked from this one has no pipes and no such thread, and so ends nothing. The frame of the missing thread
still refers to the executor: it is never freed there, where its process group would wait for threads of its own.
"""

import os
import signal
import traceback
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

from nanovllm.checks import naming
from nanovllm.config import Config
from nanovllm.engine.executor import Executor
from nanovllm.models.decoder import ModelSpec

Result = TypeVar("Result")
Model = tuple[Config, ModelSpec, Path]  # what an executor is made from
Task = tuple[futures.Future[Any], Callable[..., Any], tuple[Any, ...]]  # where the result goes, function, arguments
_GRACE = 0.5  # seconds
_EXIT_TIMEOUT = 5.0


class Ranks:
    """All ranks of a model, seen from rank 0, with its `executor`. Under torchrun, the others serve in here, and exit.

    Who makes them calls `stop` at the end. Raises ValueError as Executor does, and RuntimeError if another rank does not start.
    """

    def __init__(self, config: Config, spec: ModelSpec, directory: Path) -> None:
        model = config, spec, directory
        self.ended: str | None = None  # why nothing can be computed any more
        self.processes: dict[Connection, BaseProcess] = {}  # of ranks 1 and up, by their pipes; none under torchrun
        self.tasks: SimpleQueue[Task | None] = SimpleQueue()  # of `thread`; None is its end
        self.thread: Thread | None = None  # which computes rank 0's share, if there are several ranks
        if config.tensor_parallel_size == 1:
            self.executor = Executor(*model)
            return
        store = _join_torchrun(model)
        self.thread = Thread(target=self._compute, daemon=True)
        self.thread.start()
        os.register_at_fork(after_in_child=self.processes.clear)  # or the other sides would not see the end of rank 0
        try:
            self.executor = self.call(Executor, *model, (0, 0, store or self._start_processes(model)))
        except BaseException:
            self.stop("the engine has not started")
            raise

    def call(self, function: Callable[..., Result], *args: Any) -> Result:
        """function(*args) of rank 0's share. If the caller is interrupted, it is computed to its end all the same.

        Raises RuntimeError if a rank is lost.
        """
        if self.thread in (None, current_thread()):
            return function(*args)
        answer: futures.Future[Result] = futures.Future()
        self.tasks.put((answer, function, args))
        while not futures.wait([answer], _GRACE).done:
            self.check()
        if answer.exception() is not None:
            self.check(_GRACE)  # the cause may be the death of another rank
            self.stop(f"rank 0 has failed: {answer.exception()!r}")
        return answer.result()

    def check(self, timeout: float = 0.0) -> None:
        """Raises RuntimeError if nothing can be computed any more. Gives a lost rank `timeout` seconds to show.

        Of several, a dead one is the cause: one that has failed lives on, and the others wait for it instead of failing with it.
        """
        if self.ended is None and self.processes and (lost := wait(self.processes, timeout)):
            failures = [_read_failure(pipe, process) for pipe, process in self.processes.items() if pipe in lost]
            _, is_value_error, reason = min(failures)
            self.stop(reason)
            if is_value_error:
                raise ValueError(reason)
        if self.ended is not None:
            raise RuntimeError(self.ended)

    def stop(self, reason: str) -> None:
        """End the other ranks. A second call does nothing, nor does one in a forked process."""
        is_first, self.ended = self.ended is None, self.ended or reason
        if is_first and self.thread is not None and self.thread.is_alive():
            while self.processes:
                _, process = self.processes.popitem()
                process.kill()
                process.join(_EXIT_TIMEOUT)
            self.tasks.put(None)
            if self.thread is not current_thread():
                self.thread.join(_GRACE)  # not for long: its step may wait for a lost rank, until `leave` aborts that
            if hasattr(self, "executor"):
                leaving = Thread(target=self.executor.leave, daemon=True)  # not here: NCCL's abort, too, may be stuck
                leaving.start()
                leaving.join(_EXIT_TIMEOUT)

    def _compute(self) -> None:
        for answer, function, args in iter(self.tasks.get, None):
            try:
                answer.set_result(function(*args))
            except BaseException as error:
                answer.set_exception(error)
            del answer, function, args  # which may be all that keeps an engine alive

    def _start_processes(self, model: Model) -> dist.Store:
        size, num_threads = model[0].tensor_parallel_size, torch.get_num_threads()
        share = max(1, num_threads // size)
        self.call(torch.set_num_threads, share)  # of rank 0's thread
        torch.set_num_threads(num_threads)  # and as it was for all others
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = get_context("forkserver")
        context.set_forkserver_preload(["torch", "transformers.models.auto.tokenization_auto"])  # they initialise no CUDA
        for rank in range(1, size):
            pipe, pipe_to_rank_0 = context.Pipe()
            args = model, rank, store.port, share, dict(os.environ), pipe_to_rank_0
            process = context.Process(target=_work, args=args, name=f"rank {rank} of {size}")
            process.start()
            pipe_to_rank_0.close()  # the process has it now
            self.processes[pipe] = process
            _children.discard(process)  # or a forked process would try to join it at its own exit
        while not store.check([f"{rank} has started" for rank in range(1, size)]):
            self.check(timeout=0.02)
        return store


def _join_torchrun(model: Model) -> dist.Store | None:
    """The store of the ranks that torchrun has started, if it has. All but rank 0 serve in here, and exit."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return None
    with naming("WORLD_SIZE is set, so what else torchrun sets must be, too", KeyError, ValueError):
        local_rank = int(os.environ["LOCAL_RANK"])
        store, rank, world_size = next(dist.rendezvous("env://"))
    if world_size != (size := model[0].tensor_parallel_size):
        raise ValueError(f"tensor_parallel_size={size}, but torchrun has started {world_size} processes")
    if rank > 0:
        executor = Executor(*model, (rank, local_rank, store))
        try:
            executor.serve()
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # at once: NCCL's end would wait for CUDA graphs that the traceback may hold
        executor.leave()
        raise SystemExit
    if store.add("engines", 1) > 1:
        raise RuntimeError("torchrun's ranks serve one engine, and leave with it: there has been one")
    return store


def _work(model: Model, rank: int, port: int, num_threads: int, environment: dict[str, str], pipe: Connection) -> None:
    """The process of rank 1 or up. Its second thread is no daemon: it keeps it until the end of the pipe, also if it fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is sent to all processes, and meant for rank 0
    Thread(target=lambda: (wait([pipe]), os._exit(1))).start()  # rank 0 sends nothing: this is its end
    try:
        os.environ.update(environment)  # the fork server's is that of its start
        torch.set_num_threads(num_threads)
        Executor(*model, (rank, rank, dist.TCPStore("127.0.0.1", port))).serve()
    except BaseException as error:
        pipe.send((True, isinstance(error, ValueError), f"{current_process().name} has failed:\n{traceback.format_exc()}"))


def _read_failure(pipe: Connection, process: BaseProcess) -> tuple[bool, bool, str]:
    """Whether the process lives, whether it is a ValueError, and what: the failure that it has sent, or its death."""
    try:
        return pipe.recv()
    except EOFError:
        process.join(_EXIT_TIMEOUT)
        # With 1 it ends by an error before `_work`, which sends what it meets.
        hint = "; does the script make the engine under `if __name__ == '__main__':`, as it must?" * (process.exitcode == 1)
        return False, False, f"{process.name} has ended with exit code {process.exitcode}{hint}"
