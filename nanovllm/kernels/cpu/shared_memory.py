"""All-reduce and gather through shared memory, for ranks on one machine (collectives.h)."""

import ctypes
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.kernels.cpu.library import call, load, reason_unavailable
from nanovllm.layers.tensor_parallel import TensorParallel

# As in collectives.h.
_RANK_BYTES = 64
_PID_OFFSET = 8
_MAX_RANKS = 64
_PART_BYTES = 1 << 20


class Member(ctypes.Structure):
    """Mirrors struct Member of collectives.h."""

    _fields_ = [
        ("shared", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("round", ctypes.c_int64),
        ("is_lost", ctypes.c_int64),
    ]


@dataclass(frozen=True, kw_only=True)
class SharedMemoryRank(TensorParallel):
    """A rank whose collectives use shared memory."""

    member: Member

    def check(self) -> None:
        """Raise RuntimeError if another rank has exited, because the result is then invalid."""
        if self.member.is_lost:
            raise RuntimeError("another rank exited")

    def all_reduce(self, x: Tensor) -> Tensor:
        call(load(x.dtype).all_reduce, ctypes.byref(self.member), x, x.numel())
        self.check()
        return x

    def gather(self, x: Tensor) -> Tensor:
        num_rows, num_columns = x.shape
        output = x.new_empty(num_rows, self.size * num_columns) if self.rank == 0 else x
        call(load(x.dtype).gather, ctypes.byref(self.member), x, output, num_rows, num_columns)
        self.check()
        return output


def share_memory(tp: TensorParallel, device: torch.device, dtype: torch.dtype) -> TensorParallel:
    """Return a SharedMemoryRank if all ranks are on one machine and have the kernels, else `tp`.

    The memory has no name in the file system, so nothing is left of it when the ranks have exited.
    """
    if tp.size == 1 or device.type != "cpu":
        return tp
    num_bytes = _MAX_RANKS * _RANK_BYTES + 2 * tp.size * _PART_BYTES
    file = _open_shared_file(tp, num_bytes)
    can_share = file >= 0 and tp.size <= _MAX_RANKS and reason_unavailable(dtype) is None
    all_can_share = tp.minimum([int(can_share)]) == [1]
    memory = mmap.mmap(file, num_bytes) if all_can_share else None
    if file >= 0:
        os.close(file)
    if memory is None:
        return tp
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    pid_address = address + tp.rank * _RANK_BYTES + _PID_OFFSET
    ctypes.c_int64.from_address(pid_address).value = os.getpid()
    tp.minimum([0])  # wait until all ranks have written their process ids
    member = Member(address, tp.rank, tp.size)
    member.memory = memory  # kept open as long as the member
    return SharedMemoryRank(**vars(tp), member=member)


def _open_shared_file(tp: TensorParallel, num_bytes: int) -> int:
    """Return a descriptor of rank 0's file in memory, or -1 where it is not available."""
    if tp.rank == 0:
        file = -1
        name = os.urandom(16).hex()  # lets other ranks verify that they opened the right file
        if hasattr(os, "memfd_create"):
            file = os.memfd_create(name)
            os.truncate(file, num_bytes)
        message = f"/proc/{os.getpid()}/fd/{file} {name}"
        tp.send(torch.tensor(list(message.encode()), dtype=torch.int32))
        return file
    path, name = bytes(tp.receive().tolist()).decode().split()
    with suppress(OSError):
        if name in os.readlink(path):
            return os.open(path, os.O_RDWR)
    return -1
