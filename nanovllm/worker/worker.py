"""One rank's model and KV cache: turns batches into logits.

A Batch of tensors on the host is all that a step needs. With several ranks, each of them has a
Worker: rank 0 runs a batch, and the others receive the same batch and compute their share in
`serve`.

The worker also decides what depends on both the checkpoint and the machine: the attention backend,
the block size, the number of blocks and max_model_len.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.checkpoints.tensor_files import open_weights
from nanovllm.config import MAX_DRAFT_STEP, Config
from nanovllm.layers import attention
from nanovllm.layers.attention import Backend
from nanovllm.layers.tensor_parallel import ALONE
from nanovllm.models.spec import ModelSpec
from nanovllm.models.weights import (
    allocate_model,
    count_bytes,
    init_dummy_weights,
    load_checkpoint,
)
from nanovllm.utils.arithmetic import cdiv
from nanovllm.utils.checks import naming
from nanovllm.utils.packing import copy_to, pack, unpack
from nanovllm.utils.terminal import report
from nanovllm.worker.dummy_steps import find_largest_step, make_dummy_batch, make_test_batches
from nanovllm.worker.memory import ENLARGE_ADVICE, MemoryMeter, count_blocks, show_bytes
from nanovllm.worker.placement import Place, connect, engine_settings, find_device
from nanovllm.worker.state_slots import FIRST_LANE, count_slots

_DEFAULT_MAX_MODEL_LEN = 4096


class Worker:
    """One rank's model, KV cache and CUDA graphs.

    Raises ValueError for options that conflict with each other, the model or this machine.
    """

    # Set by `start`.
    num_blocks: int
    num_lanes: int  # sequences that can run at once
    kv_caches: list[Tensor]  # each layer's K/V or states
    graphs: Any  # CudaGraphs, or None

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
        # Without them, the worker runs layers/ and models/ as written.
        self.kernels = import_module("nanovllm.kernels") if config.enable_kernels else None
        self.max_model_len = config.max_model_len or min(spec.max_len, _DEFAULT_MAX_MODEL_LEN)
        # Rows of logits in a step: one per sequence, or more with drafts.
        num_rows = config.max_num_seqs
        if config.num_speculative_tokens:
            num_rows = max(num_rows, MAX_DRAFT_STEP)
        self.max_num_logits = min(num_rows, config.max_num_batched_tokens)
        self.device = find_device(config.device, place.local_rank if place else None)
        self.tp = connect(self.device, config.tensor_parallel_size, place) if place else ALONE
        # Triton uses the current GPU. On a CPU the index is None, which has no effect.
        no_autocast = torch.autocast(self.device.type, enabled=False)
        with torch.accelerator.device_index(self.device.index), no_autocast:
            self._select_backend()
            self.meter = MemoryMeter(self.device)
            self._load_model(directory)

    def execute(self, batch: Batch) -> Tensor:
        """As `compute`, on rank 0. The other ranks compute their shares in `serve`."""
        if self.tp.size > 1:
            self.tp.mailbox.send(pack(batch))
        return self.compute(batch)

    @torch.inference_mode()
    def compute(self, batch: Batch) -> Tensor:
        """Write the K/V of this rank's share of `batch`, whose tensors are on the host.

        Return hidden states [num_logits, hidden_size], which are valid until the next call.
        """
        if self.graphs is not None and batch.max_seqlen_q == 1:
            return self.graphs.run(batch)
        return self.model(copy_to(batch, self.device), self.kv_caches)

    def split_hidden(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Divide hidden states into parts of as many rows as the profile run had.

        There is one part, unless a step scores prompts. All ranks have the same parts.
        """
        return hidden.split(self.max_num_logits)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [num_rows, vocab_size] for the rows of one part, on rank 0."""
        return self.model.compute_logits(hidden)

    def serve(self) -> None:
        """Compute this rank's share of the batches that rank 0 runs, until rank 0 disconnects."""
        with engine_settings(self.device):  # under torchrun, the caller's thread serves
            self.start(sample=lambda logits: None)
            while True:
                try:
                    message = self.tp.mailbox.receive()
                except RuntimeError:  # the connection has ended
                    return
                for rows in self.split_hidden(self.compute(unpack(message))):
                    self.compute_logits(rows)

    def _select_backend(self) -> None:
        config, spec = self.config, self.spec
        self.backend: Backend = attention
        self.block_size = config.kvcache_block_size or attention.PREFERRED_BLOCK_SIZE
        if self.kernels is not None:
            self.backend, self.block_size = self.kernels.select_backend(
                config.attention_backend,
                self.device,
                spec.dtype,
                spec.head_dim,
                config.kvcache_block_size,
            )

    def _load_model(self, directory: Path) -> None:
        config, spec = self.config, self.spec
        with torch.device("cpu"):  # safetensors reads there, whatever the caller's default is
            files = open_weights(directory, config.load_format)
            self.model = allocate_model(spec, self.backend, self.device, files, self.tp)
            if files is None:
                init_dummy_weights(self.model, config.seed)
            else:
                load_checkpoint(self.model, files, spec.quantization.format)
        if self.tp.rank == 0:
            report(f"weights: {show_bytes(count_bytes(self.model))}")
        if self.kernels is not None:
            run = self._run_test_steps if self.device.type == "cuda" else None
            names = self.kernels.kernelize(self.model, self.device, spec.dtype, run)
            if names and self.tp.rank == 0:
                advice = "enable_kernels=False runs layers/ and models/ as written"
                report(f"optimized layers: {', '.join(names)}; {advice}")

    def _run_test_steps(self) -> None:
        """Compute steps with random K/V and states, in caches of their own, for self-tests."""
        batches = list(make_test_batches(self.block_size, self.spec.vocab_size, self.max_model_len))
        num_blocks = batches[0].block_tables.numel()
        num_slots = batches[0].read_slots.numel()
        caches = self.spec.make_caches(
            self.backend, num_blocks, self.block_size, num_slots, self.device, self.tp
        )
        random = torch.Generator(self.device).manual_seed(0)
        for cache in caches:
            cache.normal_(generator=random)
        for batch in batches:
            self.model(copy_to(batch, self.device), caches)

    @property
    def block_table_width(self) -> int:
        """The blocks of the longest sequence."""
        return cdiv(self.max_model_len, self.block_size)

    def start(self, sample: Callable[[Tensor], object]) -> None:
        """Allocate the KV cache, and compile the kernels of a GPU.

        If the size of the cache depends on how much of a GPU's memory a step takes, a profile run
        comes first. `sample` receives the logits of each dummy step. On ranks 1 and up it does
        nothing. All ranks make the same steps, because these have collective operations.
        """
        config = self.config
        on_gpu = self.device.type == "cuda"
        is_given = config.num_kvcache_blocks is not None or config.kvcache_memory_bytes is not None
        if on_gpu and not is_given:
            sample(self._profile())
        self._allocate_kv_cache()
        if on_gpu:
            sample(self._run_dummy_step([2, 1]))  # a chunk beside a decode
            sample(self._run_dummy_step([1]))

    def _profile(self) -> Tensor:
        """Run the largest step, with a KV cache of one block. Return its logits."""
        config = self.config
        self._allocate(1, FIRST_LANE, config.max_num_seqs, is_profile=True)
        max_num_tokens = config.max_num_batched_tokens
        return self._run_dummy_step(
            find_largest_step(self.max_num_logits, max_num_tokens, self.max_model_len)
        )

    def _run_dummy_step(self, query_lens: list[int]) -> Tensor:
        return self.compute_logits(self.compute(self._make_dummy_batch(query_lens)))

    def _make_dummy_batch(self, query_lens: list[int]) -> Batch:
        return make_dummy_batch(query_lens, self.block_table_width, self.max_model_len)

    def _allocate_kv_cache(self) -> None:
        """Choose the size of the KV cache and allocate it."""
        self.num_blocks, self.num_lanes, arithmetic = count_blocks(
            self.config,
            self.meter,
            self.tp,
            block_bytes=self.spec.count_block_bytes(self.block_size, self.tp),
            slot_bytes=self.spec.count_slot_bytes(self.tp),
            block_size=self.block_size,
            max_model_len=self.max_model_len,
        )
        capacity = self.num_blocks * self.block_size
        self.max_model_len = min(self.max_model_len, capacity)
        if self.config.max_model_len is not None and self.config.max_model_len > capacity:
            raise ValueError(
                f"max_model_len={self.config.max_model_len} exceeds the capacity of the KV cache:"
                f" lower it to {capacity}, or {ENLARGE_ADVICE}"
            )
        num_slots = count_slots(self.config, self.num_lanes)
        self._allocate(self.num_blocks, num_slots, self.num_lanes)
        if self.tp.rank == 0:
            backend = f"{self.backend.NAME} attention"
            report(f"{self.device}, {self.spec.dtype}, {backend}; {arithmetic}")

    def _allocate(
        self, num_blocks: int, num_slots: int, num_lanes: int, is_profile: bool = False
    ) -> None:
        config = self.config
        # Release the old caches before new ones are allocated.
        self.graphs = None
        self.kv_caches = []
        torch.cuda.empty_cache()  # no effect without a GPU
        problem = (
            f"no memory for {num_blocks} blocks of {self.block_size} tokens:"
            " lower num_kvcache_blocks, kvcache_block_size or kvcache_memory_bytes"
        )
        if self.spec.count_slot_bytes(self.tp) > 0:
            problem += f", or lower max_num_seqs, because there are {num_slots} recurrent states"
        with naming(problem, RuntimeError):  # torch's own error on any device
            self.kv_caches = self.spec.make_caches(
                self.backend, num_blocks, self.block_size, num_slots, self.device, self.tp
            )
        if self.kernels is not None and not config.enforce_eager:
            self.graphs = self.kernels.capture_decode_steps(
                self.model,
                self.backend,
                self.kv_caches,
                self._make_dummy_batch([1]),
                max_num_seqs=min(num_lanes, config.max_num_batched_tokens),
                block_table_width=self.block_table_width,
                max_seqlen_k=self.max_model_len,
                only_largest=is_profile,
            )

    def disconnect(self) -> None:
        """Leave the process groups.

        CUDA graphs go first, because NCCL's abort waits for all graphs with a collective operation.
        This is not left to the garbage collector, which may run late or in a forked process, where
        the destructor of a group would wait for threads that do not exist.
        """
        self.graphs = None
        if self.device.type == "cuda":
            self.tp.group.abort()  # ends a collective operation that waits for a lost rank
        self.tp.leave()
