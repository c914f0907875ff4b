"""Finds the log probabilities that requests ask for, in logits before penalties and temperature."""

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch.packing import to_device


def find_logprobs(logits: Tensor, tokens: Tensor, requested: list[int | None]) -> list[Tensor]:
    """Find the top k tokens and the given token of rows, with their log probabilities.

    `requested` has k for each row of `logits` [num_rows, vocab_size], or None if a row asks for
    nothing. `tokens` [num_rows] has the given tokens, -1 where the logits are NaN.
    Return token ids and log probabilities, both [rows that ask, largest k + 1], with the given
    token last, without a host synchronization. Return an empty list if no row asks.
    """
    wanted = [row for row, num in enumerate(requested) if num is not None]
    if not wanted:
        return []
    indices = to_device(np.array(wanted), logits.device)
    logprobs = logits[indices].float().log_softmax(-1)
    max_num = max(requested[row] or 0 for row in wanted)
    top_ids = logprobs.topk(min(max_num, logits.shape[1])).indices
    given_ids = tokens[indices, None].clamp(min=0)  # -1 is no index
    token_ids = torch.cat((top_ids, given_ids), dim=1)
    return [token_ids, logprobs.gather(1, token_ids)]


def read_logprobs(found: list[Tensor], requested: list[int | None]) -> list[dict[int, float]]:
    """Return the results of find_logprobs as a dict for each row, empty if the row did not ask."""
    entries: list[dict[int, float]] = [{} for _ in requested]
    token_ids, values = [each.tolist() for each in found]
    wanted = [row for row, num in enumerate(requested) if num is not None]
    for row, ids, numbers in zip(wanted, token_ids, values):
        num = requested[row]
        entries[row] = dict(zip(ids[:num], numbers[:num]))
        entries[row][ids[-1]] = numbers[-1]
    return entries
