"""Draws the next token of every row: greedy and random rows, with and without top-k, top-p, min-p, in one batch.

Gumbel-max: argmax(logits + temperature * gumbel) is a draw from softmax(logits / temperature), and at temperature 0 it
is the greedy choice, so a mixed batch needs no cases. Unlike multinomial it needs no normalisation and no look at the
numbers by the host.

The noise has no generator behind it that could be in another state: it is a hash of (seed, position, token). So a
sample does not depend on the batch, on chunks, on preemption or on ranks.
"""

import numpy as np
import torch
from torch import Tensor, nn

from nanovllm.batch import SamplingBatch


class Sampler(nn.Module):
    """Holds what the noise of every step has in common: one mixed 32-bit number per token of the vocabulary."""

    token_hashes: Tensor  # int32 [vocab_size]

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        hashes = torch.from_numpy(_mix32(np.arange(vocab_size, dtype=np.uint32)).view(np.int32))
        self.register_buffer("token_hashes", hashes, persistent=False)

    def forward(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """One token id per row of `logits` [num_rows, vocab_size], int64 [num_rows]; -1 for a row in which there is a NaN.

        A logit of inf is the most probable token, the first of several; where all are -inf it is token 0.
        """
        return self.draw(logits if batch.filtered_rows is None else self.filter(logits, batch), batch)

    def filter(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """All rows in float32, the filtered ones as filter_logits leaves them."""
        logits, rows = logits.float(), batch.filtered_rows
        assert rows is not None
        return logits.index_copy(0, rows, filter_logits(logits[rows], batch))

    def draw(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """As forward, of all the tokens that `logits` leaves."""
        if batch.temperatures is None or batch.noise_keys is None:
            return find_best(logits)
        noise = gumbel_noise(self.token_hashes, batch.noise_keys)
        return find_best(torch.addcmul(logits.float(), noise, batch.temperatures[:, None]))


def find_best(scores: Tensor) -> Tensor:
    """The index of each row's highest score, the first of equals; -1 where one is NaN. The host does not look at them."""
    best, indices = scores.max(-1)  # NaN if one is
    return indices.masked_fill_(best.isnan(), -1)


def filter_logits(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """-inf for all tokens but those that top-k, then top-p, then min-p leave. The most probable one always stays, and NaN.

    Equal logits stay or go together, so that a choice among them cannot depend on the batch.
    """
    top_ks, top_ps, min_ps, temperatures = batch.top_ks, batch.top_ps, batch.min_ps, batch.filtered_temperatures
    assert top_ks is not None and top_ps is not None and min_ps is not None and temperatures is not None
    kept = logits.topk(batch.max_top_k).values  # in descending order, NaN first
    beyond = torch.arange(batch.max_top_k, device=logits.device) >= top_ks[:, None]
    probs = torch.softmax(kept.masked_fill(beyond, -torch.inf) / temperatures[:, None], dim=-1)
    before = probs.cumsum(-1) - probs  # what the more probable tokens have together: the one that crosses top_p stays
    too_low = beyond | (before >= top_ps[:, None]) | (probs < min_ps[:, None] * probs[:, :1])
    too_low[:, 0] = False  # even if top_p is too small for a float32
    lowest = kept.masked_fill(too_low, torch.inf).amin(-1, keepdim=True)
    return logits.masked_fill(logits < lowest, -torch.inf)


def gumbel_noise(token_hashes: Tensor, keys: Tensor) -> Tensor:
    """Standard Gumbel noise, float32 [num_rows, vocab_size]: a function of `keys` [num_rows, 2] and the token alone.

    Two rounds of multiply-xorshift under a 64-bit key, in 32-bit integers that wrap around on every device.
    """
    x = token_hashes ^ keys[:, :1]
    x ^= (x >> 16) & 0xFFFF  # >> copies the sign: mask it away
    x *= keys[:, 1:] | 1
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x2C1B3C6D
    x = (x >> 1) & 0x7FFFFFFF
    # Uniform in (0, 1), finest near 0: those draws become the large noise that decides, and must not tie.
    minus_uniform = (x * -(2.0**-31 * (1 - 2.0**-23))).sub_(2.0**-33)
    return minus_uniform.log1p_().neg_().log_().neg_()


def make_noise_keys(seeds: list[int], positions: list[int]) -> np.ndarray:
    """int32 [num_rows, 2]: 64 bits that no other (seed, position) is likely to have."""
    seeds64 = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    mixed = _mix64(_mix64(seeds64) + np.array(positions, dtype=np.uint64))
    return mixed.view(np.int32).reshape(-1, 2)


def _mix32(x: np.ndarray) -> np.ndarray:
    """MurmurHash3's finalizer: uint32 to uint32, one to one, so that no two tokens share their noise."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _mix64(x: np.ndarray) -> np.ndarray:
    """SplitMix64 (Steele et al. 2014): uint64 to uint64, one to one, every input bit reaching every output bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
