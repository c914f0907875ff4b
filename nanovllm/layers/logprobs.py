"""Finds the log probabilities that requests ask for, in logits before penalties and temperature."""

import numpy as np
import torch
from torch import Tensor

from nanovllm.packing import to_device


def find_logprobs(
    logits: Tensor, tokens: Tensor, requested: list[int | None]
) -> list[dict[int, float]]:
    """For each row a dict: the top k tokens and the given token with their log probabilities.

    `requested` has k for each row of `logits` [num_rows, vocab_size], or None, which leaves the
    dict empty. `tokens` [num_rows] has the given tokens, -1 where the logits are NaN.
    """
    found: list[dict[int, float]] = [{} for _ in requested]
    wanted = [row for row, num in enumerate(requested) if num is not None]
    if not wanted:
        return found
    indices = to_device(np.array(wanted), logits.device)
    logprobs = logits[indices].float().log_softmax(-1)
    max_num = max(requested[row] or 0 for row in wanted)
    top_ids = logprobs.topk(min(max_num, logits.shape[1])).indices
    given_ids = tokens[indices, None].clamp(min=0)  # -1 is no index
    token_ids = torch.cat((top_ids, given_ids), dim=1)
    values = logprobs.gather(1, token_ids)
    for row, ids, numbers in zip(wanted, token_ids.tolist(), values.tolist()):
        num = requested[row]
        found[row] = dict(zip(ids[:num], numbers[:num]))
        found[row][ids[-1]] = numbers[-1]
    return found
