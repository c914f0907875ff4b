"""Token ids to vectors, and vectors to logits: the two ends of the model, often one matrix."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.linear import Target
from nanovllm.layers.tensor_parallel import ALONE, TensorParallel


class Embedding(nn.Module):
    """A row of `weight` [vocab_size, hidden_size] per token id. As output head, the same shape gives logits.

    The vocabulary is divided among the ranks. Where it does not come out even, the last rows are padding that nobody sees.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, tp: TensorParallel = ALONE
    ) -> None:
        super().__init__()
        self.tp, self.vocab_size = tp, vocab_size
        num_rows = -(-vocab_size // tp.size)
        self.first_id = min(tp.rank * num_rows, vocab_size)
        self.num_ids = min(num_rows, vocab_size - self.first_id)
        self.weight = nn.Parameter(torch.empty(num_rows, hidden_size, dtype=dtype))

    def targets(self, name: str) -> Iterator[tuple[str, Target]]:
        yield (
            f"{name}.weight",
            Target(self.weight[: self.num_ids], 0, self.first_id, self.vocab_size),
        )

    def look_up(self, rows: Tensor) -> Tensor:
        return F.embedding(rows, self.weight)

    def multiply(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[num_tokens, hidden_size]"""
        if self.tp.size == 1:
            return self.look_up(token_ids)
        rows = token_ids - self.first_id
        elsewhere = (rows < 0) | (rows >= self.num_ids)
        found = self.look_up(rows.masked_fill(elsewhere, 0))
        return self.tp.all_reduce(found.masked_fill(elsewhere[:, None], 0))

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, vocab_size] on rank 0; on the others their share."""
        return self.tp.gather(self.multiply(hidden))[:, : self.vocab_size]
