"""One rank of a model that several processes compute together (tensor parallelism; Megatron-LM, Shoeybi et al. 2019).

A layer takes its rank as a value: nothing global says which rank a process is, and one process can have a part in several
models. A single rank has no process group, and then nothing happens here.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FIRST_PART = 8192  # numbers of a message that travel with its size: most steps are shorter


@dataclass(frozen=True)
class TensorParallel:
    rank: int = 0
    size: int = 1
    # A ProcessGroupGloo or ProcessGroupNCCL, whose methods torch does not annotate. None: there is only this rank.
    group: Any = None
    # A ProcessGroupGloo for what the hosts tell each other: an idle rank waits there for a message without spinning, and no GPU
    # has to be waited for. On a CPU the same as `group`.
    host_group: Any = None
    # The size and the first part of a message: int32 [FIRST_PART] on the host.
    first: Tensor = field(default_factory=partial(torch.empty, 0))

    def divide(self, num: int) -> tuple[int, int]:
        """How many of `num` heads or columns this rank has, and the first of them.

        Where there are fewer of them than ranks it has one, the same one as its neighbours.
        """
        num_shares = min(num, self.size)
        return num // num_shares, self.rank * num_shares // self.size * (num // num_shares)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in place."""
        if self.group is not None:
            self.group.allreduce(x).wait()
        return x

    def gather(self, x: Tensor) -> Tensor:
        """On rank 0 all ranks' x [num_rows, num_columns] side by side; on the others their own."""
        if self.group is None or not len(x):
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        self.group.gather(parts, x, 0).wait()
        return torch.cat(parts, dim=-1) if parts else x

    def minimum(self, numbers: list[int]) -> list[int]:
        """Of each number the least on any rank. Nobody goes on before all are here."""
        if self.group is None:
            return numbers
        least = torch.tensor(numbers, device="cpu")
        self.host_group.allreduce(least, dist.ReduceOp.MIN).wait()
        return least.tolist()

    def send(self, message: Tensor) -> None:
        """To all ranks that `receive`, from rank 0: int32 [num_numbers] on the host. One broadcast, two if it is long."""
        self.first[0] = len(message)
        self.first[1 : len(message) + 1] = message[: FIRST_PART - 1]
        self.host_group.broadcast(self.first, 0).wait()
        if len(message) >= FIRST_PART:
            self.host_group.broadcast(message[FIRST_PART - 1 :], 0).wait()

    def receive(self) -> Tensor:
        """What rank 0 sends next, on the host. Valid until the message after it."""
        self.host_group.broadcast(self.first, 0).wait()
        num_numbers = int(self.first[0])
        if num_numbers < FIRST_PART:
            return self.first[1 : num_numbers + 1]
        rest = self.first.new_empty(num_numbers + 1 - FIRST_PART)
        self.host_group.broadcast(rest, 0).wait()
        return torch.cat((self.first[1:], rest))


ALONE = TensorParallel()
