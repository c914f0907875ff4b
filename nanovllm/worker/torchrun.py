"""Joins the ranks of a launcher such as torchrun, which runs the same script on all of them.

In such a script, LLM(...) returns on rank 0 only. On the other ranks it serves, and then ends the
process.
"""

import os
import traceback

import torch.distributed as dist

from nanovllm.utils.checks import naming
from nanovllm.worker.process_groups import Place
from nanovllm.worker.rank_process import Serve


def join_torchrun(size: int, serve: Serve) -> dist.Store | None:
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
        try:
            serve(Place(rank, local_rank, store))
        except BaseException:
            traceback.print_exc()
            # Immediately, because NCCL's shutdown would wait for CUDA graphs that the traceback may
            # refer to.
            os._exit(1)
        raise SystemExit
    if store.add("engines", 1) > 1:
        raise RuntimeError(
            "torchrun's processes serve one engine only: run torchrun again for another one"
        )
    return store
