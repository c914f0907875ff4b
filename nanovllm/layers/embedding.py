"""Token embedding and output head, which often share one matrix."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.layers.linear import Target
from nanovllm.layers.quantized import QuantizableLayer, multiply
from nanovllm.layers.tensor_parallel import ALONE, TensorParallel
from nanovllm.utils.helpers import cdiv


class Embedding(QuantizableLayer):
    """Looks up rows of `weight` [vocab_size, hidden_size]. As the output head it computes logits.

    The vocabulary is sharded over the ranks. If the ranks do not divide it, the last rows are
    padding, and their logits are cut off.
    """

    weight: Any  # a Parameter, or a QuantizedWeight in its place

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, tp: TensorParallel = ALONE
    ) -> None:
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        num_rows = cdiv(vocab_size, tp.size)
        self.first_id = min(tp.rank * num_rows, vocab_size)
        self.num_ids = min(num_rows, vocab_size - self.first_id)
        self.weight = nn.Parameter(torch.empty(num_rows, hidden_size, dtype=dtype))

    def targets(self, name: str) -> Iterator[tuple[str, Target]]:
        rows = self.weight[: self.num_ids]
        target = Target(rows, dim=0, start=self.first_id, full_size=self.vocab_size)
        yield f"{name}.weight", target

    # Optimized subclasses override these two.

    def look_up(self, rows: Tensor) -> Tensor:
        found = self.weight[rows]
        return found if isinstance(found, Tensor) else found.dequantize()

    def multiply(self, hidden: Tensor) -> Tensor:
        return multiply(hidden, self.weight)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings [num_tokens, hidden_size]."""
        if self.tp.size == 1:
            return self.look_up(token_ids)
        rows = token_ids - self.first_id
        is_elsewhere = (rows < 0) | (rows >= self.num_ids)
        found = self.look_up(rows.masked_fill(is_elsewhere, 0))
        return self.tp.all_reduce(found.masked_fill(is_elsewhere[:, None], 0))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [num_rows, vocab_size] on rank 0, and this rank's shard on others."""
        return self.tp.gather(self.multiply(hidden))[:, : self.vocab_size]
