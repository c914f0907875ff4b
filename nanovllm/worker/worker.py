"""One rank's model and KV cache: turns batches into logits.

A step needs nothing but a Batch, on the host. With several ranks, each of them has a Worker: rank 0
runs a batch, and the others receive the same batch and compute their share in `serve`.
"""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.batch.batch import Batch
from nanovllm.batch.packing import copy_to, pack, unpack
from nanovllm.checkpoints.tensor_files import TensorFiles, open_weights
from nanovllm.config import MAX_DRAFT_STEP, Config
from nanovllm.layers import attention
from nanovllm.layers.tensor_parallel import ALONE
from nanovllm.models import weights
from nanovllm.models.decoder import CausalLM
from nanovllm.models.mtp import has_head, make_hidden_cache, may_use_head
from nanovllm.models.spec import ModelSpec
from nanovllm.utils.checks import naming
from nanovllm.utils.helpers import cdiv, report
from nanovllm.worker.cache_plan import CachePlan
from nanovllm.worker.device import engine_settings, find_device
from nanovllm.worker.memory import MemoryMeter, check_memory
from nanovllm.worker.process_groups import Place, connect

if TYPE_CHECKING:
    from nanovllm.kernels.cuda.graphs import CudaGraphs

_DEFAULT_MAX_MODEL_LEN = 4096


class Worker:
    """One rank's model, KV cache and CUDA graphs.

    A new worker has its share of the weights. start_worker gives it the rest. Raises ValueError for
    options that conflict with each other, the model or this machine.
    """

    def __init__(
        self, config: Config, spec: ModelSpec, directory: Path, place: Place | None = None
    ) -> None:
        """`place` is None if there is only one rank."""
        self.config = config
        self.spec = spec
        self.directory = directory
        self.max_model_len = config.max_model_len or min(spec.max_len, _DEFAULT_MAX_MODEL_LEN)
        if self.max_model_len > spec.max_len:
            raise ValueError(
                f"max_model_len={config.max_model_len} exceeds the model's limit:"
                f" lower it to {spec.max_len}"
            )
        self.max_num_batched_tokens = config.max_num_batched_tokens
        # Rows of logits that are computed at once: one per sequence, or more with drafts. Only a
        # step that scores prompts has more. All ranks then divide its hidden states into the same
        # parts.
        num_rows = config.max_num_seqs
        if config.num_speculative_tokens:
            num_rows = max(num_rows, MAX_DRAFT_STEP)
        self.max_num_logits = min(num_rows, config.max_num_batched_tokens)
        self.device = find_device(config.device, place.local_rank if place else None)
        # This rank, and how it reaches the others.
        self.tp = connect(self.device, config.tensor_parallel_size, place) if place else ALONE
        # Without nanovllm.kernels, layers/ and models/ run as written.
        self.kernels: ModuleType | None = None
        self.backend: attention.Backend = attention  # stores K/V and attends to them
        self.block_size = config.kvcache_block_size or attention.PREFERRED_BLOCK_SIZE
        self.has_mtp_head = False
        # Weights must stay ordinary tensors, which can be changed in place.
        with engine_settings(self.device), torch.inference_mode(False):
            if config.enable_kernels:
                self.kernels = import_module("nanovllm.kernels")
                self.backend, self.block_size = self.kernels.select_backend(
                    config.attention_backend,
                    self.device,
                    spec.dtype,
                    spec.attention_shapes,
                    config.kvcache_block_size,
                )
            # Measures what this rank takes of a GPU's memory, from here on.
            self.meter = MemoryMeter(self.device) if self.device.type == "cuda" else None
            files = self.open_weights()
            self.has_mtp_head = has_head(config, spec, files)
            self.model = self.load_model(files)
        self.plan = CachePlan()  # the sizes of the KV cache, which startup.py allocates
        self.kv_caches: list[Tensor] = []  # each layer's K/V or states
        self.graphs: CudaGraphs | None = None
        # What the newest step has sampled, which stands for the pending ids of the next one. It is
        # written on rank 0. CUDA graphs read its fixed address.
        self.newest_tokens = torch.zeros(self.max_num_logits, dtype=torch.int32, device=self.device)

    def open_weights(self) -> TensorFiles | None:
        """Open the checkpoint. None: it has dummy weights."""
        options = (self.config.load_format, may_use_head(self.config))
        return open_weights(self.directory, *options)

    def load_model(self, files: TensorFiles | None) -> CausalLM:
        """Make this rank's share of the model, with its weights. None: dummy weights."""
        with torch.device("cpu"):  # safetensors reads there, whatever the caller's default is
            # torch raises RuntimeError where a tensor's size overflows.
            with naming(self.directory / "config.json", RuntimeError, MemoryError):
                model = weights.make_model(
                    self.spec, self.backend, files, self.tp, self.has_mtp_head
                )
                check_memory(weights.count_bytes(model), self.device)
            weights.allocate(model, self.device)
            if self.kernels is not None:
                self.kernels.speed_up_loading(model, self.device, self.spec.dtype)
            if files is None:
                weights.init_dummy_weights(model, self.config.seed)
            else:
                weights.load_checkpoint(model, files, self.spec.quantization.format)
            model.check_loaded()
        return model

    def execute(self, batch: Batch) -> Tensor:
        """As `compute`, on rank 0. The other ranks compute their shares in `serve`."""
        if self.tp.size > 1:
            self.tp.send(pack(batch))
        return self.compute(batch)

    @torch.inference_mode()
    def compute(self, batch: Batch) -> Tensor:
        """Write the K/V of this rank's share of `batch`, which is on the host.

        Return hidden states [num_logits, hidden_size]. They are valid until the next call, because
        a CUDA graph writes to the same memory each time.
        """
        has_pending_tokens = batch.input_ids.min() < 0
        if has_pending_tokens:
            self.tp.broadcast(self.newest_tokens)
        if self.graphs is not None:
            kind = self.graphs.find_kind(batch)
            if kind is not None:
                return self.graphs.run(batch, kind)
        batch = copy_to(batch, self.device)
        if has_pending_tokens:
            batch = fill_pending(batch, self.newest_tokens)
        return self.model(batch, self.kv_caches)

    @torch.inference_mode()
    def serve(self) -> None:
        """Compute this rank's share of the batches that rank 0 runs, until rank 0 disconnects."""
        while True:
            try:
                message = self.tp.receive()
            except RuntimeError:  # the connection has ended
                return
            for rows in self.compute(unpack(message)).split(self.max_num_logits):
                self.model.compute_logits(rows)

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

    def make_caches(
        self,
        device: torch.device,
        num_blocks: int = 0,
        num_window_blocks: int = 0,
        num_state_slots: int = 0,
    ) -> list[Tensor]:
        """Make what each layer keeps between steps: K/V of this rank's heads, or states.

        Layers with a window have num_window_blocks if that is not 0. Others have num_blocks. An MTP
        head has the last two caches.
        """
        spec = self.spec
        caches: list[Tensor] = []
        shapes = [spec.attention_shape(layer) for layer in range(spec.num_layers)]
        if self.has_mtp_head:
            shapes.append(spec.attention_shapes[-1])
        for shape in shapes:
            if shape is None:
                size = (num_state_slots, spec.state_size // self.tp.size)
                caches.append(torch.zeros(size, dtype=torch.float32, device=device))
                continue
            has_second_pool = shape.window is not None and num_window_blocks > 0
            count = num_window_blocks if has_second_pool else num_blocks
            num_kv_heads, _ = self.tp.divide(shape.num_kv_heads)
            sizes = (count, self.block_size, num_kv_heads, shape.head_dim)
            caches.append(self.backend.make_cache(*sizes, spec.dtype, device))
        if self.has_mtp_head:
            with device:
                caches.append(make_hidden_cache(spec, num_blocks, self.block_size))
        return caches

    def report(self, message: str) -> None:
        """Print a line about the engine, once for all ranks."""
        if self.tp.rank == 0:
            report(message)

    @property
    def block_table_width(self) -> int:
        """The blocks of the longest sequence."""
        return cdiv(self.max_model_len, self.block_size)


def fill_pending(batch: Batch, newest_tokens: Tensor) -> Batch:
    """Replace each id ~row of a batch on its device by the newest token of this row."""
    ids = batch.input_ids
    # -1, of logits that are NaN, is no index of an embedding.
    pending = newest_tokens[(~ids).clamp(min=0)].clamp(min=0)
    return replace(batch, input_ids=ids.where(ids >= 0, pending))
