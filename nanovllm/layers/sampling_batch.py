"""Collects how each row of logits is sampled, as the tensors of a SamplingBatch."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from nanovllm.batch import Filters, Noise, SamplingBatch
from nanovllm.layers.noise import make_noise_keys
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.packing import to_device


class Row(Protocol):
    """What the sampling of a row depends on."""

    params: SamplingParams
    seed: int
    needs_filtering: bool


def make_sampling_batch(
    rows: Sequence[Row], positions: list[int], vocab_size: int, device: torch.device
) -> SamplingBatch:
    """Collect the parameters of all rows. `positions` are those of the sampled tokens."""
    temperatures = [row.params.temperature for row in rows]
    if not any(temperatures):
        return SamplingBatch()
    noise = Noise(
        temperatures=to_device(np.array(temperatures, np.float32), device),
        keys=to_device(make_noise_keys([row.seed for row in rows], positions), device),
    )
    filtered = [index for index, row in enumerate(rows) if row.needs_filtering]
    if not filtered:
        return SamplingBatch(noise)
    top_ks: list[int] = []
    settings: list[tuple[float, float, float]] = []  # temperature, top_p, min_p
    for index in filtered:
        params = rows[index].params
        is_limited = 0 < params.top_k < vocab_size
        top_ks.append(params.top_k if is_limited else vocab_size)
        # The sum of all probabilities can round to 1 too early, so "off" is above 1.
        top_p = params.top_p if params.top_p < 1.0 else 2.0
        settings.append((params.temperature, top_p, params.min_p))
    # One copy for each dtype, because each copy to a GPU has its own cost.
    integers = to_device(np.array([filtered, top_ks]), device)
    numbers = to_device(np.array(settings, np.float32).T.copy(), device)
    filters = Filters(
        rows=integers[0],
        temperatures=numbers[0],
        top_ks=integers[1],
        top_ps=numbers[1],
        min_ps=numbers[2],
        max_top_k=max(top_ks),
    )
    return SamplingBatch(noise, filters)
