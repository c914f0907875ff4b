"""One rank of a model under tensor parallelism (Megatron-LM, Shoeybi et al. 2019).

A layer receives its rank as an argument. There is no global rank, so one process can take part in
several models. A single rank has no process group, and its collectives have no effect.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FIRST_PART = 8192  # elements of the first broadcast, the length included; most steps need no other


@dataclass(eq=False)
class TensorParallel:
    """One rank, its collectives, and messages from rank 0. The default is a single rank.

    Messages are in host memory. A rank that waits for one does not spin, and no GPU is involved.
    """

    rank: int = 0
    size: int = 1
    # A ProcessGroupGloo or ProcessGroupNCCL, whose methods torch does not annotate.
    group: Any = None
    host_group: Any = None  # a ProcessGroupGloo, on a CPU that of `group`
    # The length and the first part of a message: int32 [FIRST_PART] on the host.
    first_part: Tensor = field(
        default_factory=lambda: torch.empty(FIRST_PART, dtype=torch.int32, device="cpu"),
        repr=False,
    )

    def divide(self, size: int, unit: int = 1) -> tuple[int, int]:
        """Return how many of `size` features this rank has, and the index of its first one.

        A rank has whole units, such as heads. If there are fewer units than ranks, each rank has
        one, and neighboring ranks have the same.
        """
        num_shards = min(size // unit, self.size)
        shard_size = size // num_shards
        shard = self.rank * num_shards // self.size
        return shard_size, shard * shard_size

    def leave(self) -> None:
        """Drop the groups, which ends them, because all layers of a rank share this object."""
        self.group = None
        self.host_group = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over all ranks, in place."""
        if self.group is not None:
            self.group.allreduce(x).wait()
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Return all ranks' x [num_rows, num_columns] side by side on rank 0, and x on others."""
        if self.group is None or len(x) == 0:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        self.group.gather(parts, x, 0).wait()
        return torch.cat(parts, dim=-1) if parts else x

    def broadcast(self, x: Tensor) -> None:
        """Copy rank 0's x to the x of all other ranks."""
        if self.group is not None:
            self.group.broadcast(x, 0).wait()

    def minimum(self, numbers: list[int]) -> list[int]:
        """Return the minimum of each number over all ranks. Every rank waits for all others."""
        if self.group is None:
            return numbers
        smallest = torch.tensor(numbers, device="cpu")
        self.host_group.allreduce(smallest, dist.ReduceOp.MIN).wait()
        return smallest.tolist()

    def send(self, message: Tensor) -> None:
        """Send int32 [num_numbers] on the host from rank 0 to all ranks that call `receive`.

        This is one broadcast, or two if the message is long.
        """
        self.first_part[0] = len(message)
        self.first_part[1 : len(message) + 1] = message[: FIRST_PART - 1]
        self.host_group.broadcast(self.first_part, 0).wait()
        if len(message) >= FIRST_PART:
            self.host_group.broadcast(message[FIRST_PART - 1 :], 0).wait()

    def receive(self) -> Tensor:
        """Wait for the next message of rank 0. It is valid until the message after it."""
        self.host_group.broadcast(self.first_part, 0).wait()
        num_numbers = int(self.first_part[0])
        if num_numbers < FIRST_PART:
            return self.first_part[1 : num_numbers + 1]
        rest = self.first_part.new_empty(num_numbers + 1 - FIRST_PART)
        self.host_group.broadcast(rest, 0).wait()
        return torch.cat((self.first_part[1:], rest))


ALONE = TensorParallel()
