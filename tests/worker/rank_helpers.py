"""Finds what ranks leave behind, and holds what runs in their processes."""

import gc
import os
import sys
from glob import glob
from queue import SimpleQueue
from threading import Thread

import psutil

from nanovllm import LLM
from nanovllm.worker.executor import MultiRankExecutor
from nanovllm.worker.rank_process import run_rank
from nanovllm.worker.worker import Worker


def find_ranks(process=None):
    """The processes of ranks 1 and up, in order. They are children of the fork server."""
    children = (process or psutil.Process()).children()
    servers = [child for child in children if "forkserver" in " ".join(child.cmdline())]
    return [rank for server in servers for rank in server.children()]


def check_nothing_is_left():
    """A fixture: a test leaves neither a process of a rank nor shared memory."""
    before = glob("/dev/shm/*")
    yield
    if find_ranks():
        gc.collect()  # takes 0.3 seconds
    assert find_ranks() == []
    assert set(glob("/dev/shm/*")) - set(glob("/dev/shm/sem.*")) <= set(before)


def make_executor(worker):
    """Make rank 0's part of an executor, without processes."""
    executor = object.__new__(MultiRankExecutor)
    executor.stop_reason = None
    executor.processes = {}
    executor.tasks = SimpleQueue()
    executor.worker = worker
    executor.thread = Thread(target=executor._run_tasks, daemon=True)
    executor.thread.start()
    return executor


def serve_and_fail(*args):
    """Take the place of `run_rank`. On rank 2 of 4, a step of several tokens fails."""
    compute = Worker.compute

    def fail(self, batch):
        if self.tp.rank == 2 and len(batch.input_ids) > 1:
            raise ZeroDivisionError(os.environ["PURPOSE"])
        return compute(self, batch)

    Worker.compute = fail
    run_rank(*args)


def join_as_rank_1(model, environment, log, is_failing):
    """Make the engine of a script that a launcher has started as rank 1."""
    sys.stderr = open(log, "w", buffering=1)
    os.environ.update(environment)
    Worker.disconnect = lambda self: print("disconnected", file=sys.stderr)
    if is_failing:
        Worker.compute = lambda *args: 1 / 0
    try:
        LLM(model, tensor_parallel_size=2, num_kvcache_blocks=64, kvcache_block_size=4)
    finally:
        print("unwound", file=sys.stderr)
