"""Penalties for repeated tokens, biases, and the ban of stop tokens before min_tokens.

A penalty changes only the logits of a sequence's own tokens, a small part of the vocabulary. They
are gathered, changed and written back. The counts are recomputed in each step, as in vLLM, so there
is no state that a preemption or an interrupt could make invalid.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch.packing import to_device
from nanovllm.layers.sampler import Row


def apply_penalties(logits: Tensor, seqs: Sequence[Row]) -> Tensor:
    """Return `logits` [num_rows, vocab_size] with penalties, biases and bans, in this order.

    Each row has a sequence. What no row needs takes no time on the device.
    """
    penalized = [row for row, seq in enumerate(seqs) if seq.params.penalizes]
    if penalized:
        logits = penalize(logits.float(), penalized, [seqs[row] for row in penalized])
    biased: list[tuple[int, int, float]] = []  # row, token id, bias
    banned: list[tuple[int, int]] = []  # row, token id
    for row, seq in enumerate(seqs):
        biases = seq.params.logit_bias or {}
        biased += [(row, *item) for item in biases.items()]
        if len(seq.token_ids) < seq.min_num_tokens:
            banned += [(row, token_id) for token_id in seq.stop_token_ids]
    if biased:
        rows, token_ids, numbers = to_device(np.array(biased), logits.device).T
        indices = (rows.long(), token_ids.long())  # float64 represents both exactly
        logits = logits.float().index_put(indices, numbers.float(), accumulate=True)
    if banned:  # not a bias, because inf - inf would be NaN
        rows, token_ids = to_device(np.array(banned), logits.device).T
        logits = logits.index_put((rows, token_ids), logits.new_full((), -torch.inf))
    return logits


def penalize(logits: Tensor, rows: list[int], seqs: Sequence[Row]) -> Tensor:
    """Penalize `rows` of `logits` [num_rows, vocab_size] for the tokens of `seqs`.

    The repetition penalty acts first. Then the frequency and the presence penalty are subtracted.
    A token that occurs several times is written as many times, always with the same value.
    """
    longest = max(len(seq.token_ids) for seq in seqs)
    token_ids = np.zeros((len(seqs), longest), np.int64)
    is_generated = np.zeros((len(seqs), longest), np.float32)
    penalties = np.zeros((3, len(seqs), 1), np.float32)
    for index, seq in enumerate(seqs):
        num_tokens = len(seq.token_ids)
        token_ids[index, :num_tokens] = seq.token_ids
        token_ids[index, num_tokens:] = seq.token_ids[0]  # padding, which does not count
        is_generated[index, seq.num_prompt_tokens : num_tokens] = 1.0
        params = seq.params
        penalties[:, index, 0] = (
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        )
    device = logits.device
    ids = to_device(token_ids, device)  # [num_seqs, longest]
    row_indices = to_device(np.array(rows), device)[:, None]
    presence, frequency, repetition = to_device(penalties, device)  # each [num_seqs, 1]

    counts = logits.new_zeros(len(seqs), logits.shape[1])
    counts = counts.scatter_add_(1, ids, to_device(is_generated, device)).gather(1, ids)
    repeated = logits[row_indices, ids]  # [num_seqs, longest]
    scaled = torch.where(repeated > 0, repeated / repetition, repeated * repetition)
    result = scaled - counts * frequency - (counts > 0) * presence
    return logits.index_put((row_indices, ids), result)
