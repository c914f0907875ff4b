"""The processes of ranks 1 and up, which rank 0 starts on its machine.

A pipe connects rank 0 with each process that it has started. A process that fails sends the reason
through it. The end of the pipe means, on either side, that the other process has died.

The processes come from multiprocessing's fork server. It imports torch once per program, so each of
them starts much faster.
"""

import math
import os
import signal
import time
import traceback
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import (  # type: ignore[attr-defined]  # not in typeshed
    BaseProcess,
    _children,
)
from threading import Thread
from typing import NamedTuple

import torch
import torch.distributed as dist

from nanovllm.worker.process_groups import Place, Serve

# Seconds for a process to end. A killed process takes longer the more memory it has to free.
EXIT_TIMEOUT = 5.0


class Failure(NamedTuple):
    """Why a rank is lost. The smallest of several is the cause."""

    time: float  # when the error was raised; -inf for a death, because a death causes errors
    reason: str
    kind: type[Exception] = RuntimeError


def start_rank(
    serve: Serve, rank: int, size: int, port: int, num_threads: int
) -> tuple[Connection, BaseProcess]:
    """Start the process of a rank. Return rank 0's end of the pipe, and the process."""
    context = get_context("forkserver")
    # Neither module initializes CUDA.
    context.set_forkserver_preload(["torch", "transformers.models.auto.tokenization_auto"])
    pipe, pipe_to_rank_0 = context.Pipe()
    args = (serve, rank, port, num_threads, dict(os.environ), pipe_to_rank_0)
    process = context.Process(target=run_rank, args=args, name=f"rank {rank} of {size}")
    process.start()
    pipe_to_rank_0.close()  # the process has its own copy
    # At its exit, a process joins its children, and a fork of rank 0 would try to join this one.
    # No public call prevents that: close() needs a process that has ended, and daemonic processes
    # are terminated where others are joined.
    _children.discard(process)
    return pipe, process


def run_rank(
    serve: Serve,
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
        serve(Place(rank, rank, store))
    except BaseException as error:
        is_option = isinstance(error, ValueError)  # or a checkpoint
        text = str(error) if is_option else f"\n{traceback.format_exc()}"
        reason = f"{current_process().name} has failed: {text}"
        pipe.send(Failure(time.monotonic(), reason, ValueError if is_option else RuntimeError))


def find_failure(processes: dict[Connection, BaseProcess]) -> Failure:
    """Return why ranks are lost, after a pipe has news.

    A death is reported before an error, because it causes errors. Of several errors the first one
    is the cause, because its rank closes connections, and others fail for that reason.
    """
    failures: list[Failure] = []
    for pipe, process in list(processes.items()):
        if not pipe.poll():
            continue
        try:
            failures.append(pipe.recv())
        except EOFError:
            process.join(EXIT_TIMEOUT)
            reason = f"{process.name} has ended with exit code {process.exitcode}"
            # run_rank sends its own errors, so 1 means that the process failed before it ran.
            if process.exitcode == 1:
                reason += (
                    "; if the script makes the engine outside of `if __name__ == '__main__':`,"
                    " move it there"
                )
            failures.append(Failure(-math.inf, reason))
    return min(failures)
