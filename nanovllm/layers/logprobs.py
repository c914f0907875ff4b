"""Finds the log probabilities that requests ask for, in logits before penalties and temperature."""

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch.packing import to_device


def find_logprobs(logits: Tensor, tokens: Tensor, requested: list[int | None]) -> list[Tensor]:
    """Find the top k tokens and the given token of rows, with their log probabilities.

    `requested` has k for each row of `logits` [num_rows, vocab_size], or None if a row asks for
    nothing. `tokens` [num_rows] has the given tokens, -1 where the logits are NaN.
    Return the rows that ask, as a tensor of their indices, and their token ids and log
    probabilities, both [rows that ask, largest k + 1], with the given token last, without a host
    synchronization. Return an empty list if no row asks.
    """
    asking = [row for row, num in enumerate(requested) if num is not None]
    if not asking:
        return []
    rows = to_device(np.array(asking), logits.device)
    logprobs = logits[rows].float().log_softmax(-1)
    max_num = max(requested[row] or 0 for row in asking)
    top_ids = logprobs.topk(min(max_num, logits.shape[1])).indices
    given_ids = tokens[rows, None].clamp(min=0)  # -1 is no index
    token_ids = torch.cat((top_ids, given_ids), dim=1)
    return [rows, token_ids, logprobs.gather(1, token_ids)]


def read_logprobs(found: list[Tensor], requested: list[int | None]) -> list[dict[int, float]]:
    """Return the results of find_logprobs as a dict for each row, empty if the row did not ask."""
    entries: list[dict[int, float]] = [{} for _ in requested]
    for row, ids, numbers in zip(*[each.tolist() for each in found]):
        num = requested[row]
        entries[row] = dict(zip(ids[:num], numbers[:num]))
        entries[row][ids[-1]] = numbers[-1]
    return entries
