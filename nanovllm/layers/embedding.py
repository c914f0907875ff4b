"""Token ids to vectors, and vectors to logits: the two ends of the model, often one matrix."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    """A row of `weight` [vocab_size, hidden_size] per token id. As output head, the same shape gives logits."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype))

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)  # [num_tokens, hidden_size]

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)  # [num_rows, vocab_size]
