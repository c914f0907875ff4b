"""Runs batches: the half of the engine that has the model and the KV cache. Knows neither sequences nor queues nor text.

All that it needs for a step is a Batch of plain numbers. So with several ranks, each has an Executor: rank 0 `run`s a batch,
which the others receive and compute in `serve`. It settles what depends on checkpoint and machine: attention backend, block
size, number of blocks, max_model_len.
"""

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm import kernels
from nanovllm.batch import Batch
from nanovllm.checks import naming
from nanovllm.config import MAX_DRAFT_STEP, Config
from nanovllm.engine.memory import ENLARGE, MemoryMeter, count_blocks
from nanovllm.layers import attention
from nanovllm.layers.attention import Backend
from nanovllm.layers.tensor_parallel import FIRST_PART, TensorParallel
from nanovllm.models.decoder import ModelSpec
from nanovllm.models.weights import check_sizes, init_dummy_weights, load_checkpoint

Place = tuple[int, int, dist.Store]  # the rank, which one it is on its machine, and where all ranks meet
_DEFAULT_MAX_MODEL_LEN = 4096
_FOREVER = timedelta(days=365)  # that an engine may have nothing to do


class Executor:
    """Raises ValueError for options and checkpoints that do not go together or not with this machine."""

    def __init__(self, config: Config, spec: ModelSpec, directory: Path, place: Place | None = None) -> None:
        """`place`: this rank's, if there are several."""
        if (config.max_model_len or 0) > spec.max_len:
            raise ValueError(f"max_model_len={config.max_model_len} is above the model's own limit: lower it to {spec.max_len}")
        self.config, self.spec = config, spec
        self.max_model_len = config.max_model_len or min(spec.max_len, _DEFAULT_MAX_MODEL_LEN)
        self.device = find_device(config.device, place and place[1])
        self.tp = join(self.device, config.tensor_parallel_size, place) if place else TensorParallel()
        self.backend: Backend = attention
        self.block_size = config.kvcache_block_size or attention.PREFERRED_BLOCK_SIZE
        wishes = config.attention_backend, self.device, spec.dtype, spec.head_dim, config.kvcache_block_size
        with torch.accelerator.device_index(self.device.index):  # the current GPU is that of Triton; a CPU's index is None
            if config.enable_kernels:
                self.tp = kernels.share_memory(self.tp, self.device, spec.dtype)
                self.backend, self.block_size = kernels.select_backend(*wishes)
            self.meter = MemoryMeter(self.device)
            check_sizes(spec, directory, self.device, self.tp.size, has_weights=config.load_format != "dummy")
            with torch.device(self.device):
                self.model = spec.make_model(self.backend, self.tp)
            with torch.device("cpu"):  # where safetensors reads, whatever the caller's default device is
                if config.load_format == "dummy":
                    init_dummy_weights(self.model, config.seed)
                else:
                    load_checkpoint(self.model, directory)
            if config.enable_kernels:
                kernels.kernelize(self.model, self.device, spec.dtype)

    def allocate_kv_cache(self, sample: Callable[[Tensor], object] = lambda logits: None) -> None:
        """Size the KV cache, on a GPU by a profile run, and allocate it. `sample` takes the logits of each trial step."""

        def profile_run() -> None:
            self._allocate(num_blocks=1, is_profile=True)
            sample(self.compute(self.largest_batch()))

        sizes = self.block_size, self.max_model_len
        self.num_blocks, arithmetic = count_blocks(self.config, self.spec, *sizes, self.meter, profile_run, self.tp)
        self.max_model_len = min(self.max_model_len, capacity := self.num_blocks * self.block_size)
        if (limit := self.config.max_model_len or 0) > capacity:
            raise ValueError(f"max_model_len={limit} is more than the KV cache holds: lower it to {capacity}, or {ENLARGE}")
        self._allocate(self.num_blocks)
        if self.device.type == "cuda":
            for bounds in ([0, 2, 3], [0, 1]):  # steps of each kind: what they compile is compiled before the first request
                sample(self.compute(self._make_batch(bounds)))
        if self.tp.rank == 0:
            print(f"nanovllm: {self.device}, {self.spec.dtype}, {self.backend.NAME} attention; {arithmetic}", file=sys.stderr)

    def _allocate(self, num_blocks: int, is_profile: bool = False) -> None:
        spec = self.spec
        self.block_table_width = -(-self.max_model_len // self.block_size)  # blocks of the longest sequence
        shape = (2, num_blocks, self.block_size, self.tp.divide(spec.num_kv_heads)[0], spec.head_dim)
        self.graphs, self.kv_caches = None, list[Tensor]()  # first of all let go of the old ones
        torch.cuda.empty_cache()  # does nothing where there is no GPU
        what = f"no memory for {num_blocks} blocks of {self.block_size} tokens: lower num_kvcache_blocks or kvcache_block_size"
        with naming(what, RuntimeError):  # torch's own for any device that is out of memory
            self.kv_caches = [torch.empty(shape, dtype=spec.dtype, device=self.device) for _ in range(spec.num_layers)]
        # Linux allocates pages on first write: touch the first blocks now. And a profile run must not read NaN.
        for kv_cache in self.kv_caches:
            kv_cache[:, : -(-self.config.max_num_batched_tokens // self.block_size)].zero_()
        max_num_decodes = min(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        steps = self.model, self.backend, self.kv_caches, max_num_decodes, self.block_table_width, is_profile
        if self.config.enable_kernels and not self.config.enforce_eager:
            self.graphs = kernels.capture_decode_steps(*steps)

    def run(self, batch: Batch) -> Tensor:
        """Write the K/V of the tokens of a batch on the host, and compute logits [num_logits, vocab_size], all ranks together."""
        if self.tp.size > 1:
            self.tp.send(batch.pack())
        return self.compute(batch)

    def serve(self) -> None:
        """Compute this rank's share of the batches that rank 0 runs, until it is gone."""
        self.allocate_kv_cache()
        while True:
            try:
                message = self.tp.receive()
            except RuntimeError:  # the connection has ended, and so has rank 0's part in it
                return
            self.compute(Batch.unpack(message))

    def leave(self) -> None:
        """Part from the other ranks. CUDA graphs first: NCCL's abort waits until none is left that has a collective operation.

        Not left to the garbage collector: it may come late, and in a forked process, where a group's end waits for its threads.
        """
        self.graphs = None
        if self.device.type == "cuda":
            self.tp.group.abort()  # or what the GPU computes waits for the others for ever
        vars(self.tp).update(group=None, host_group=None)  # all layers' too, since `tp` is the same object: it ends the groups

    @torch.inference_mode()
    def compute(self, batch: Batch) -> Tensor:
        """This rank's share."""
        if self.graphs is not None and batch.max_seqlen_q == 1:
            hidden = self.graphs.run(batch)
        else:
            hidden = self.model(batch.to(self.device), self.kv_caches)
        return self.model.compute_logits(hidden)

    def largest_batch(self) -> Batch:
        """One of max_num_batched_tokens and as many rows of logits as a step can have, all of it on block 0."""
        num_drafted = MAX_DRAFT_STEP if self.config.num_speculative_tokens else 0
        num_seqs = min(max(self.config.max_num_seqs, num_drafted), self.config.max_num_batched_tokens)
        i = np.arange(num_seqs + 1)
        surplus = self.config.max_num_batched_tokens - num_seqs  # over a token each: the first ones are as long as can be
        return self._make_batch(np.minimum(i * self.max_model_len, i + surplus))

    def _make_batch(self, bounds: Sequence[int] | np.ndarray) -> Batch:
        """A dummy batch with these bounds of queries and no context, in block 0, launched for a context of max_model_len."""
        ends = torch.from_numpy(np.array(bounds, np.int32))
        lens = ends.diff()
        tables = torch.from_numpy(np.zeros((len(lens), self.block_table_width), np.int32))
        zeros = torch.from_numpy(np.zeros(bounds[-1], np.int32))
        return Batch(zeros, zeros, zeros, ends, lens, tables, int(lens.max()), self.max_model_len, ends[1:] - 1)


def join(device: torch.device, size: int, place: Place) -> TensorParallel:
    """Meet the other ranks."""
    rank, _, store = place
    store.set(f"{rank} has started", "")
    store.set_timeout(_FOREVER)  # NCCL waits there for rank 0, which may still load its weights
    host_group = dist.ProcessGroupGloo(dist.PrefixStore("host", store), rank, size, _FOREVER)
    group: Any = host_group  # see TensorParallel
    if device.type == "cuda":
        torch.cuda.set_device(device)
        group = dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
    return TensorParallel(rank, size, group, host_group, torch.empty(FIRST_PART, dtype=torch.int32, device="cpu"))


def find_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device of that name: without a number the current GPU. The ranks of a machine have one GPU each, from that of their
    device's name (or 0) on, unless each sees only its own.

    Raises ValueError if it is not known or not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or not (number or "0").isdecimal():
        raise ValueError(f"device {name!r} is not known: use 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if kind == "cpu":
        return torch.device("cpu")
    if local_rank is not None:
        number = str(int(number or 0) + local_rank if torch.cuda.device_count() > 1 else 0)  # Slurm may show each its own
    if int(number or 0) >= torch.cuda.device_count():
        raise ValueError(f"device 'cuda:{number or 0}' is not there: this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", int(number) if number else torch.cuda.current_device())
