"""One rank's model and KV cache: turns batches into logits.

A step needs nothing but a Batch, on the host. With several ranks, each of them has a Worker: rank 0
runs a batch, and the others receive the same batch and compute their share in `serve`.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.config import Config
from nanovllm.layers.attention import Backend
from nanovllm.layers.tensor_parallel import TensorParallel
from nanovllm.models.spec import CausalLM, ModelSpec
from nanovllm.utils.arithmetic import cdiv
from nanovllm.utils.packing import copy_to, pack, unpack
from nanovllm.worker.memory import MemoryMeter


@dataclass(eq=False)
class Worker:
    """One rank's model, KV cache and CUDA graphs. startup.py makes it."""

    config: Config
    spec: ModelSpec
    device: torch.device
    tp: TensorParallel  # this rank, and how it reaches the others
    kernels: Any  # nanovllm.kernels, or None to run layers/ and models/ as written
    backend: Backend  # stores K/V and attends to them
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    # Rows of logits that are computed at once. Only a step that scores prompts has more. All ranks
    # then divide its hidden states into the same parts.
    max_num_logits: int
    model: CausalLM  # this rank's share
    meter: MemoryMeter | None  # on a GPU: what this rank has taken of its memory
    # A loaded worker has no KV cache yet, see startup.allocate.
    num_blocks: int = 0
    num_window_blocks: int = 0  # 0: all layers share one pool
    num_lanes: int = 0  # sequences that can run at once
    kv_caches: list[Tensor] = field(default_factory=list)  # each layer's K/V or states
    graphs: Any = None  # CudaGraphs, or None

    def __post_init__(self) -> None:
        # What the newest step has sampled, at a fixed address, which CUDA graphs read. A step has
        # at most max_num_logits rows, and a warm-up step may have two.
        num_rows = max(2, self.max_num_logits)
        self.newest_tokens = torch.zeros(num_rows, dtype=torch.int64, device=self.device)

    def keep_tokens(self, tokens: Tensor) -> None:
        """Keep the tokens of a step [num_rows] for the pending ids of the next one, on rank 0."""
        # -1, of logits that are NaN, is no index of an embedding.
        self.newest_tokens[: len(tokens)].copy_(tokens.clamp(min=0))

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
        has_pending_tokens = bool((np.asarray(batch.input_ids) < 0).any())
        if has_pending_tokens:
            self.tp.broadcast(self.newest_tokens)
        if self.graphs is not None and self.graphs.covers(batch):
            return self.graphs.run(batch)
        batch = copy_to(batch, self.device)
        if has_pending_tokens:
            batch = fill_pending(batch, self.newest_tokens)
        return self.model(batch, self.kv_caches)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [num_rows, vocab_size] for at most `max_num_logits` rows, on rank 0."""
        return self.model.compute_logits(hidden)

    def serve(self) -> None:
        """Compute this rank's share of the batches that rank 0 runs, until rank 0 disconnects."""
        while True:
            try:
                message = self.tp.receive()
            except RuntimeError:  # the connection has ended
                return
            for rows in self.compute(unpack(message)).split(self.max_num_logits):
                self.compute_logits(rows)

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
        num_blocks: int,
        num_window_blocks: int,
        num_state_slots: int,
        device: torch.device,
    ) -> list[Tensor]:
        """Make what each layer keeps between steps: K/V of this rank's heads, or states.

        Layers with a window have num_window_blocks, and others have num_blocks.
        """
        spec = self.spec
        state_size = spec.state_size // self.tp.size
        caches: list[Tensor] = []
        for layer in range(spec.num_layers):
            shape = spec.attention_shape(layer)
            if shape is not None:
                num_kv_heads, _ = self.tp.divide(shape.num_kv_heads)
                count = num_blocks if shape.window is None else num_window_blocks
                sizes = (count, self.block_size, num_kv_heads, shape.head_dim)
                cache = self.backend.make_cache(*sizes, spec.dtype, device)
            else:
                cache = torch.zeros(num_state_slots, state_size, dtype=torch.float32, device=device)
            caches.append(cache)
        return caches

    @property
    def block_table_width(self) -> int:
        """The blocks of the longest sequence."""
        return cdiv(self.max_model_len, self.block_size)


def fill_pending(batch: Batch, newest_tokens: Tensor) -> Batch:
    """Replace each id ~row of a batch on its device by the newest token of this row."""
    ids = batch.input_ids
    pending = newest_tokens[(~ids).clamp(min=0)].int()
    return replace(batch, input_ids=ids.where(ids >= 0, pending))


def run_step(
    model: CausalLM, kv_caches: list[Tensor], newest_tokens: Tensor, batch: Batch
) -> Tensor:
    """Run the model on a batch on its device. A CUDA graph captures this, without the worker."""
    return model(fill_pending(batch, newest_tokens), kv_caches)
