"""Collective operations of the ranks of one machine, in C++ (collectives.h): through memory that they share."""

import ctypes
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.kernels.cpu.library import call, load, reason_unavailable
from nanovllm.layers.tensor_parallel import TensorParallel

_RANK_BYTES, _MAX_RANKS, _PART_BYTES = 64, 64, 1 << 20  # as in collectives.h


class Member(ctypes.Structure):
    """Member of collectives.h."""

    _fields_ = [
        ("shared", ctypes.c_void_p),
        *[(name, ctypes.c_int64) for name in ("rank", "size", "round", "is_lost")],
    ]


@dataclass(frozen=True, kw_only=True)
class SharedMemoryRank(TensorParallel):
    """A rank whose layers meet the others' in shared memory."""

    member: Member

    def check(self) -> None:
        """Raises RuntimeError if another rank has ended, and with it what was to be computed together."""
        if self.member.is_lost:
            raise RuntimeError("another rank has ended")

    def all_reduce(self, x: Tensor) -> Tensor:
        call(load(x.dtype).all_reduce, ctypes.byref(self.member), x, x.numel())
        self.check()
        return x

    def gather(self, x: Tensor) -> Tensor:
        output = x.new_empty(x.shape[0], self.size * x.shape[1]) if self.rank == 0 else x
        call(load(x.dtype).gather, ctypes.byref(self.member), x, output, *x.shape)
        self.check()
        return output


def share_memory(tp: TensorParallel, device: torch.device, dtype: torch.dtype) -> TensorParallel:
    """The rank with shared memory, if there are several, all ranks are on one machine, and have these kernels.

    The memory has no name, so that nothing is left of it when the ranks have ended.
    """
    if tp.size == 1 or device.type != "cpu":
        return tp
    num_bytes = _MAX_RANKS * _RANK_BYTES + 2 * tp.size * _PART_BYTES
    file = -1
    if tp.rank == 0:
        name = os.urandom(16).hex()  # by which the others know that what they find is it
        if hasattr(os, "memfd_create"):
            file = os.memfd_create(name)
            os.truncate(file, num_bytes)
        message = f"/proc/{os.getpid()}/fd/{file} {name}"
        tp.send(torch.tensor(list(message.encode()), dtype=torch.int32))
    else:
        path, name = bytes(tp.receive().tolist()).decode().split()
        with suppress(OSError):
            file = os.open(path, os.O_RDWR) if name in os.readlink(path) else -1
    can_share = file >= 0 and tp.size <= _MAX_RANKS and reason_unavailable(dtype) is None
    all_can_share = tp.minimum([int(can_share)]) == [1]
    memory = mmap.mmap(file, num_bytes) if all_can_share else None
    if file >= 0:
        os.close(file)
    if memory is None:
        return tp
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.c_int64.from_address(address + tp.rank * _RANK_BYTES + 8).value = os.getpid()
    tp.minimum([0])  # here all ranks' process ids are there
    member = Member(address, tp.rank, tp.size)
    member.memory = memory  # which lives as long
    return SharedMemoryRank(**vars(tp), member=member)
