"""The sampler for GPUs. sampler_kernels.py explains how it samples and filters."""

import torch
import triton
from torch import Tensor

from nanovllm.batch.batch import Filters, Noise
from nanovllm.kernels.cuda.sampler_kernels import filter_kernel, sample_kernel
from nanovllm.kernels.optimized_layer import OptimizedLayer
from nanovllm.kernels.sampler_fields import has_unknown_fields
from nanovllm.layers.sampler import Sampler

# Tokens of the vocabulary in a program: 16 for each thread. To filter, a thread has 8, each with 16
# possible digits in registers.
_BLOCK = 4096
_FILTER_BLOCK = 2048
_NUM_WARPS = 8
# Digits of 4 bits that a logit of these dtypes can have as float32.
_NUM_DIGITS = {torch.bfloat16: 4, torch.float16: 5, torch.float32: 8}


class FastSampler(OptimizedLayer, Sampler):
    """The kernels take contiguous logits, because Triton compiles a variant for other strides.

    The logits of several ranks can have padding between their rows.
    """

    def draw(self, logits: Tensor, noise: Noise | None) -> Tensor:
        if noise is None or has_unknown_fields(noise):
            return super().draw(logits, noise)
        logits = logits.contiguous()
        num_rows, vocab_size = logits.shape
        grid = (num_rows, triton.cdiv(vocab_size, _BLOCK))
        scores = torch.empty(grid, dtype=torch.float32, device=logits.device)
        tokens = torch.empty(grid, dtype=torch.int64, device=logits.device)
        sample_kernel[grid](
            logits,
            self.token_hashes,
            noise.keys,
            noise.temperatures,
            scores,
            tokens,
            vocab_size,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=True,
        )
        best = scores.argmax(-1, keepdim=True)
        return tokens.gather(1, best).squeeze(1)

    def filter(self, logits: Tensor, filters: Filters) -> Tensor:
        """Filter without sorting.

        Probabilities are summed in another order. If a sum equals top_p up to rounding, one token
        more or less can stay. A row with an infinite logit keeps all tokens, which changes nothing.
        """
        if has_unknown_fields(filters):
            return super().filter(logits, filters)
        logits = logits.contiguous()
        output = logits.to(torch.float32, copy=True)
        num_digits = _NUM_DIGITS[logits.dtype]
        num_levels = 2 * num_digits + 1
        num_filtered = len(filters.rows)
        num_parts = triton.cdiv(logits.shape[1], _FILTER_BLOCK)
        sums = output.new_empty(num_levels, num_filtered, num_parts, 2, 16)
        states = output.new_empty(num_levels, num_filtered, 3)
        prefixes = output.new_empty(num_levels, num_filtered, dtype=torch.uint32)
        highest = logits.amax(-1).float()
        for level in range(num_levels):
            filter_kernel[(num_filtered, num_parts)](
                logits,
                output,
                highest,
                filters.rows,
                filters.temperatures,
                filters.top_ks,
                filters.top_ps,
                filters.min_ps,
                prefixes,
                states,
                sums,
                level,
                logits.shape[1],
                NUM_DIGITS=num_digits,
                PARTS=triton.next_power_of_2(num_parts),
                BLOCK=_FILTER_BLOCK,
                num_warps=_NUM_WARPS,
                enable_fp_fusion=True,
            )
        return output
