"""One rank's model and KV cache: turns batches into logits.

A Batch of plain numbers is all that a step needs. With several ranks, each of them has a Worker:
rank 0 runs a batch, and the others receive the same batch and compute their share in `serve`.

The worker also decides what depends on both the checkpoint and the machine: the attention backend,
the block size, the number of blocks and max_model_len.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm import kernels
from nanovllm.arithmetic import cdiv
from nanovllm.batch import Batch
from nanovllm.checks import naming
from nanovllm.config import MAX_DRAFT_STEP, Config
from nanovllm.engine.memory import ENLARGE, MemoryMeter, count_blocks
from nanovllm.layers import attention
from nanovllm.layers.attention import Backend
from nanovllm.layers.tensor_parallel import FIRST_PART, TensorParallel
from nanovllm.models.decoder import ModelSpec
from nanovllm.models.weights import check_sizes, init_dummy_weights, load_checkpoint
from nanovllm.packing import copy_to, pack, unpack

_DEFAULT_MAX_MODEL_LEN = 4096
# Maps rows of logits, and the index of the first one, to the rows to keep.
Reduction = Callable[[Tensor, int], Tensor]
_FOREVER = timedelta(days=365)  # an idle engine must not run into a timeout


def keep_all(logits: Tensor, start: int) -> Tensor:
    return logits


def keep_none(logits: Tensor, start: int) -> Tensor:
    return logits[:0]


@dataclass(frozen=True)
class Place:
    """Where one of several ranks runs."""

    rank: int
    local_rank: int  # its number on its machine, which selects its GPU
    store: dist.Store  # where all ranks meet


class Worker:
    """Raises ValueError for options that conflict with each other, the model or this machine."""

    def __init__(
        self, config: Config, spec: ModelSpec, directory: Path, place: Place | None = None
    ) -> None:
        """Load this rank's share of the weights. `place` is None if there is only one rank."""
        if config.max_model_len is not None and config.max_model_len > spec.max_len:
            raise ValueError(
                f"max_model_len={config.max_model_len} exceeds the model's limit:"
                f" lower it to {spec.max_len}"
            )
        self.config = config
        self.spec = spec
        self.max_model_len = config.max_model_len or min(spec.max_len, _DEFAULT_MAX_MODEL_LEN)
        # Rows of logits in a step: one per sequence, or more with drafts.
        num_rows = config.max_num_seqs
        if config.num_speculative_tokens:
            num_rows = max(num_rows, MAX_DRAFT_STEP)
        self.max_num_logits = min(num_rows, config.max_num_batched_tokens)
        self.tp = TensorParallel()
        if place is None:
            self.device = find_device(config.device)
        else:
            self.device = find_device(config.device, place.local_rank)
            self.tp = connect(self.device, config.tensor_parallel_size, place)
        # Triton uses the current GPU. On a CPU the index is None, which has no effect.
        with torch.accelerator.device_index(self.device.index):
            self._select_backend()
            self.meter = MemoryMeter(self.device)
            check_sizes(spec, directory, self.device, self.tp.size)
            self._load_model(directory)

    def _select_backend(self) -> None:
        config, spec = self.config, self.spec
        self.backend: Backend = attention
        self.block_size = config.kvcache_block_size or attention.PREFERRED_BLOCK_SIZE
        if config.enable_kernels:
            self.tp = kernels.share_memory(self.tp, self.device, spec.dtype)
            self.backend, self.block_size = kernels.select_backend(
                config.attention_backend,
                self.device,
                spec.dtype,
                spec.head_dim,
                config.kvcache_block_size,
            )

    def _load_model(self, directory: Path) -> None:
        with torch.device(self.device):
            self.model = self.spec.make_model(self.backend, self.tp)
        with torch.device("cpu"):  # safetensors reads there, whatever the caller's default is
            if self.config.load_format == "dummy":
                init_dummy_weights(self.model, self.config.seed)
            else:
                load_checkpoint(self.model, directory)
        if self.config.enable_kernels:
            kernels.kernelize(self.model, self.device, self.spec.dtype)

    def allocate_kv_cache(self, sample: Callable[[Tensor], object] = lambda logits: None) -> None:
        """Choose the size of the KV cache and allocate it.

        On a GPU a profile run measures the free memory, unless an option gives the size.
        `sample` is called with the logits of each profile or warm-up run.
        """

        def profile_run() -> None:
            self._allocate(num_blocks=1, is_profile=True)
            sample(self.compute(self.make_largest_batch()))

        self.num_blocks, arithmetic = count_blocks(
            self.config,
            self.spec,
            self.block_size,
            self.max_model_len,
            self.meter,
            profile_run,
            self.tp,
        )
        capacity = self.num_blocks * self.block_size
        self.max_model_len = min(self.max_model_len, capacity)
        if self.config.max_model_len is not None and self.config.max_model_len > capacity:
            raise ValueError(
                f"max_model_len={self.config.max_model_len} exceeds the capacity of the KV cache:"
                f" lower it to {capacity}, or {ENLARGE}"
            )
        self._allocate(self.num_blocks)
        if self.device.type == "cuda":
            # Warm-up runs of a chunk with a decode and of a decode alone compile their kernels.
            sample(self.compute(self._make_dummy_batch([2, 1])))
            sample(self.compute(self._make_dummy_batch([1])))
        if self.tp.rank == 0:
            backend = f"{self.backend.NAME} attention"
            message = f"nanovllm: {self.device}, {self.spec.dtype}, {backend}; {arithmetic}"
            print(message, file=sys.stderr)

    def _allocate(self, num_blocks: int, is_profile: bool = False) -> None:
        spec, config = self.spec, self.config
        # Of the longest sequence.
        self.block_table_width = cdiv(self.max_model_len, self.block_size)
        num_kv_heads, _ = self.tp.divide(spec.num_kv_heads)
        shape = (2, num_blocks, self.block_size, num_kv_heads, spec.head_dim)
        # Release the old caches before new ones are allocated.
        self.graphs = None
        self.kv_caches: list[Tensor] = []
        torch.cuda.empty_cache()  # no effect without a GPU
        problem = (
            f"no memory for {num_blocks} blocks of {self.block_size} tokens:"
            " lower num_kvcache_blocks, kvcache_block_size or kvcache_memory_bytes"
        )
        with naming(problem, RuntimeError):  # torch's own error on any device
            for _ in range(spec.num_layers):
                self.kv_caches.append(torch.empty(shape, dtype=spec.dtype, device=self.device))
        # Linux allocates pages at the first write, and a request should not wait for that. A
        # profile run must not read NaN.
        num_first_blocks = cdiv(config.max_num_batched_tokens, self.block_size)
        for kv_cache in self.kv_caches:
            kv_cache[:, :num_first_blocks].zero_()
        if config.enable_kernels and not config.enforce_eager:
            self.graphs = kernels.capture_decode_steps(
                self.model,
                self.backend,
                self.kv_caches,
                max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
                block_table_width=self.block_table_width,
                only_largest=is_profile,
            )

    def run(self, batch: Batch, reduce: Reduction = keep_all) -> Tensor:
        """Write the K/V of a batch, and return logits [num_logits, vocab_size]. The batch is on the
        host.

        Called on rank 0. The other ranks compute their shares in `serve`.
        """
        if self.tp.size > 1:
            self.tp.send(pack(batch))
        return self.compute(batch, reduce)

    def serve(self) -> None:
        """Compute this rank's share of the batches that rank 0 runs, until rank 0 disconnects."""
        self.allocate_kv_cache()
        while True:
            try:
                message = self.tp.receive()
            except RuntimeError:  # the connection has ended
                return
            self.compute(unpack(message), keep_none)

    @torch.inference_mode()
    def compute(self, batch: Batch, reduce: Reduction = keep_all) -> Tensor:
        """Compute this rank's share of `batch`, whose tensors are on the host.

        If there are more rows of logits than in the profile run, they are computed in parts, and
        `reduce` decides what is kept of each part. All ranks have the same parts.
        """
        if self.graphs is not None and batch.max_seqlen_q == 1:
            hidden = self.graphs.run(batch)
        else:
            hidden = self.model(copy_to(batch, self.device), self.kv_caches)
        parts: list[Tensor] = []
        start = 0
        for rows in hidden.split(self.max_num_logits):
            parts.append(reduce(self.model.compute_logits(rows), start))
            start += len(rows)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def disconnect(self) -> None:
        """Leave the process groups.

        CUDA graphs go first, because NCCL's abort waits for all graphs with a collective operation.
        This is not left to the garbage collector, which may run late or in a forked process, where
        the destructor of a group would wait for threads that do not exist.
        """
        self.graphs = None
        if self.device.type == "cuda":
            self.tp.group.abort()  # ends a collective operation that waits for a lost rank
        # All layers refer to the same `tp`, so this destroys the groups.
        vars(self.tp).update(group=None, host_group=None)

    def make_largest_batch(self) -> Batch:
        """A dummy batch that needs as much memory as any step can.

        It has max_num_batched_tokens tokens, and max_num_logits rows of logits.
        """
        query_lens: list[int] = []
        num_left = self.config.max_num_batched_tokens
        for num_others in reversed(range(self.max_num_logits)):  # each gets one token at least
            query_len = min(self.max_model_len, num_left - num_others)
            query_lens.append(query_len)
            num_left -= query_len
        return self._make_dummy_batch(query_lens)

    def _make_dummy_batch(self, query_lens: list[int]) -> Batch:
        """A batch of whole prompts in block 0. Kernels are launched for max_model_len."""
        num_tokens, num_seqs = sum(query_lens), len(query_lens)
        with torch.device("cpu"):
            context_lens = torch.tensor(query_lens, dtype=torch.int32)
            cu_seqlens_q = torch.zeros(num_seqs + 1, dtype=torch.int32)
            cu_seqlens_q[1:] = context_lens.cumsum(0)
            zeros = torch.zeros(num_tokens, dtype=torch.int32)
            block_tables = torch.zeros(num_seqs, self.block_table_width, dtype=torch.int32)
        return Batch(
            input_ids=zeros,
            positions=zeros,
            slot_mapping=zeros,
            cu_seqlens_q=cu_seqlens_q,
            context_lens=context_lens,
            block_tables=block_tables,
            logits_indices=cu_seqlens_q[1:] - 1,
            min_seqlen_q=min(query_lens),
            max_seqlen_q=max(query_lens),
            max_seqlen_k=self.max_model_len,
        )


def connect(device: torch.device, size: int, place: Place) -> TensorParallel:
    """Join the process groups of all ranks."""
    place.store.set(f"{place.rank} has started", "")
    place.store.set_timeout(_FOREVER)  # NCCL waits there for rank 0, which may still load weights
    host_store = dist.PrefixStore("host", place.store)
    host_group = dist.ProcessGroupGloo(host_store, place.rank, size, _FOREVER)
    group: Any = host_group  # see TensorParallel
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        group = dist.ProcessGroupNCCL(place.store, place.rank, size, options)
    first = torch.empty(FIRST_PART, dtype=torch.int32, device="cpu")
    return TensorParallel(place.rank, size, group, host_group, first)


def find_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device of that name; "auto" is the GPU if there is one, and else the CPU.

    "cuda" without a number is the current GPU. With several ranks, the rank with local rank i uses
    GPU N + i, where N is the number in `name` or 0. A rank that sees only one GPU uses that one.
    Raises ValueError for an unknown or missing device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    is_known = kind in ("cpu", "cuda") and (number == "" or number.isdecimal())
    if not is_known:
        raise ValueError(f"device={name!r} is unknown: use 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if kind == "cpu":
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    index = int(number or 0)
    if local_rank is not None:
        # Under Slurm, a rank may see only its own GPU.
        index = index + local_rank if num_gpus > 1 else 0
    if index >= num_gpus:
        raise ValueError(
            f"device='cuda:{index}' is missing: use one of this machine's {num_gpus} GPUs"
        )
    if number == "" and local_rank is None:
        index = torch.cuda.current_device()
    return torch.device("cuda", index)
