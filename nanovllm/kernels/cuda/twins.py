"""The layers that are faster on a GPU, in Triton: each launches one kernel for several passes of torch over the same numbers.

A kernel takes a token or a row of logits per program, and rounds where the layers round that it stands for. To draw, a row is
too long for one program: of every part of it the kernel keeps the best token, and torch finds the best of those.
"""

from collections.abc import Iterable
from functools import cache, partial
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from triton.language import constexpr

from nanovllm.batch import Batch, SamplingBatch
from nanovllm.kernels import Twin, has_known_code
from nanovllm.kernels.cuda.attention import store_kvcache
from nanovllm.kernels.cuda.launch import Launch, is_aligned, prepare
from nanovllm.kernels.trial import try_out
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.sampler import Sampler, find_best
from nanovllm.models.decoder import MLP, Attention, DecoderLayer, DecoderLayers

_ROTATED_PART = 2048  # numbers of a token's heads
_SAMPLE_PART = 4096  # tokens of the vocabulary


class FastRMSNorm(Twin, RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return add_rms_norm(x.contiguous(), None, self.weight, self.eps)[1]


class FusedLayers(Twin, DecoderLayers):
    """A sum and the norm behind it are one kernel, also where that norm is the next layer's."""

    def take_over(self) -> bool:
        return all([self._can_replace(layer) for layer in self])

    @staticmethod
    def _can_replace(layer: nn.Module) -> bool:
        """The layer and its norms are not called. Attention and MLP are, so they can be anything."""
        if not isinstance(layer, DecoderLayer) or not has_known_code(layer, DecoderLayer):
            return False
        return all(
            [
                has_known_code(norm, RMSNorm)
                for norm in (layer.input_layernorm, layer.post_attention_layernorm)
            ]
        )

    def forward(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor], kv_caches: list[Tensor], batch: Batch
    ) -> Tensor:
        branch: Tensor | None = None  # the newest output, not yet added to x
        for layer, kv_cache in zip(cast(Iterable[DecoderLayer], self), kv_caches):
            first, second = layer.input_layernorm, layer.post_attention_layernorm
            x, normed = add_rms_norm(x, branch, first.weight, first.eps)
            branch = layer.self_attn(normed, cos_sin, kv_cache, batch)
            x, normed = add_rms_norm(x, branch, second.weight, second.eps)
            branch = layer.mlp(normed)
        assert branch is not None
        return x + branch


def add_rms_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x + branch [..., size], and norm.RMSNorm of this sum. A branch of None: x itself, and its norm."""
    assert x.is_contiguous() and (branch is None or branch.is_contiguous())
    size = x.shape[-1]
    total, normed = x if branch is None else torch.empty_like(x), torch.empty_like(x)
    kernel = _prepare_norm(x.device, x.dtype, size, branch is not None, is_aligned(x))
    kernel((x.numel() // size, 1, 1), x, branch, weight, total, normed, size, eps)
    return total, normed


@cache
def _prepare_norm(
    device: torch.device, dtype: torch.dtype, size: int, has_branch: bool, aligned: bool
) -> Launch:
    block = triton.next_power_of_2(size)
    return Launch(
        _add_rms_norm_kernel,
        HAS_BRANCH=has_branch,
        BLOCK=block,
        num_warps=min(max(4, block // 512), 16),
    )


@triton.jit
def _add_rms_norm_kernel(
    x_ptr,
    branch_ptr,
    weight_ptr,
    total_ptr,
    normed_ptr,
    size,
    eps,
    HAS_BRANCH: constexpr,
    BLOCK: constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < size
    x = tl.load(x_ptr + token * size + offsets, mask=mask, other=0.0)
    if HAS_BRANCH:
        branch = tl.load(branch_ptr + token * size + offsets, mask=mask, other=0.0)
        x = (x.to(tl.float32) + branch.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + token * size + offsets, x, mask=mask)
    wide = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide) / size + eps)
    normed = _scale(wide, factor, tl.load(weight_ptr + offsets, mask=mask))
    tl.store(normed_ptr + token * size + offsets, normed, mask=mask)


@triton.jit
def _scale(x, factor, weight):
    """x * factor * weight in the weight's dtype, rounded before the weight is applied, and after."""
    return ((x * factor).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(weight.dtype)


class FusedAttention(Twin, Attention):
    """All between the projections and the attention is one kernel."""

    def take_over(self) -> bool:
        """For Triton's way of storing K/V, with both norms or none; the kernel has one eps for them."""
        norms = [norm for norm in (self.q_norm, self.k_norm) if norm is not None]
        is_known = all([has_known_code(norm, RMSNorm) for norm in norms]) and len(norms) != 1
        return (
            is_known
            and len({norm.eps for norm in norms}) < 2
            and self.backend.store_kvcache is store_kvcache
        )

    def forward(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor], kv_cache: Tensor, batch: Batch
    ) -> Tensor:
        query = rotate_and_store(
            self.qkv_proj(x), self.q_norm, self.k_norm, cos_sin, kv_cache, batch.slot_mapping
        )
        attended = self.backend.attend(query, kv_cache, batch, self.head_dim**-0.5)
        return self.o_proj(attended.flatten(1))


def rotate_and_store(
    qkv: Tensor,
    q_norm: RMSNorm | None,
    k_norm: RMSNorm | None,
    cos_sin: tuple[Tensor, Tensor],
    kv_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """From the projections qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] to attention, in one pass.

    Norms query and key heads, if there are norms, and rotates them as rotary.apply_rotary. Returns the query
    [num_tokens, num_heads, head_dim], and writes key and value to their slots; slot -1 is padding, not written.
    """
    assert all([tensor.is_contiguous() for tensor in (qkv, *cos_sin, kv_cache)])
    num_kv_heads, head_dim = kv_cache.shape[3:]
    num_tokens, num_heads = len(qkv), qkv.shape[1] // head_dim - 2 * num_kv_heads
    query, values_offset = qkv.new_empty(num_tokens, num_heads, head_dim), kv_cache.stride(0)
    weights = (
        (None, None, 0.0)
        if q_norm is None or k_norm is None
        else (q_norm.weight, k_norm.weight, q_norm.eps)
    )
    sizes = num_heads, num_kv_heads, head_dim, values_offset
    kernel, programs = _prepare_rotation(
        qkv.device, qkv.dtype, *sizes, q_norm is not None, is_aligned(qkv)
    )
    kernel(
        (num_tokens, programs, 1), qkv, *weights, *cos_sin, query, kv_cache, slots, values_offset
    )
    return query


@cache
def _prepare_rotation(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, values_offset: int,
    has_norm: bool, aligned: bool,
) -> tuple[Launch, int]:  # fmt: skip
    """The kernel, and how many programs take a token's heads."""
    num_parts, block = num_heads + 2 * num_kv_heads, triton.next_power_of_2(head_dim // 2)
    heads = min(triton.next_power_of_2(num_parts), max(1, _ROTATED_PART // (2 * block)))
    sizes = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HALF": head_dim // 2,
        "HEADS": heads,
        "BLOCK": block,
    }
    return Launch(_rotate_and_store_kernel, **sizes, HAS_NORM=has_norm), triton.cdiv(
        num_parts, heads
    )


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])  # it may lie anywhere in a packed batch
def _rotate_and_store_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, eps, cos_ptr, sin_ptr, query_ptr, cache_ptr, slots_ptr, values_offset,
    NUM_HEADS: constexpr, NUM_KV_HEADS: constexpr, HALF: constexpr, HAS_NORM: constexpr, HEADS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(
        tl.int64
    )  # slot * NUM_KV_HEADS * head_dim overflows 32 bits in large caches
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[
        :, None
    ]  # query heads, then key heads, then value heads
    dims = tl.arange(0, BLOCK)[None, :]
    is_dim = dims < HALF
    num_heads = NUM_HEADS + 2 * NUM_KV_HEADS
    source = qkv_ptr + (token * num_heads + heads) * 2 * HALF + dims
    first = tl.load(source, mask=is_dim & (heads < num_heads), other=0.0)  # [HEADS, BLOCK]
    second = tl.load(source + HALF, mask=is_dim & (heads < num_heads), other=0.0)

    x, y = first.to(tl.float32), second.to(tl.float32)
    if HAS_NORM:
        factor = tl.rsqrt((tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)) / (2 * HALF) + eps)[
            :, None
        ]
        q_weight, k_weight = (
            tl.load(q_weight_ptr + dims, mask=is_dim),
            tl.load(k_weight_ptr + dims, mask=is_dim),
        )
        x = _scale(x, factor, tl.where(heads < NUM_HEADS, q_weight, k_weight)).to(tl.float32)
        q_weight, k_weight = (
            tl.load(q_weight_ptr + HALF + dims, mask=is_dim),
            tl.load(k_weight_ptr + HALF + dims, mask=is_dim),
        )
        y = _scale(y, factor, tl.where(heads < NUM_HEADS, q_weight, k_weight)).to(tl.float32)
    cos, sin = (
        tl.load(cos_ptr + token * HALF + dims, mask=is_dim),
        tl.load(sin_ptr + token * HALF + dims, mask=is_dim),
    )
    x, y = (x * cos - y * sin).to(first.dtype), (y * cos + x * sin).to(first.dtype)

    target = query_ptr + (token * NUM_HEADS + heads) * 2 * HALF + dims
    tl.store(target, x, mask=is_dim & (heads < NUM_HEADS))
    tl.store(target + HALF, y, mask=is_dim & (heads < NUM_HEADS))
    if slot >= 0:
        heads -= NUM_HEADS  # of the cache: its keys, then its values
        kind = heads // NUM_KV_HEADS  # 0: a key, 1: a value
        rows = slot * NUM_KV_HEADS + heads % NUM_KV_HEADS
        target = cache_ptr + kind * values_offset + rows * 2 * HALF + dims
        is_cached = is_dim & (heads >= 0) & (heads < 2 * NUM_KV_HEADS)
        tl.store(target, tl.where(kind == 1, first, x), mask=is_cached)
        tl.store(target + HALF, tl.where(kind == 1, second, y), mask=is_cached)


class FastMLP(Twin, MLP):
    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up_proj(x)
        assert gate_up.is_contiguous()
        num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        output = gate_up.new_empty(num_tokens, size)
        kernel = prepare(
            _silu_and_mul_kernel,
            gate_up.device,
            gate_up.dtype,
            size,
            is_aligned(gate_up),
            BLOCK=1024,
        )
        kernel((num_tokens, triton.cdiv(size, 1024), 1), gate_up, output, size)
        return self.down_proj(output)


@triton.jit
def _silu_and_mul_kernel(gate_up_ptr, output_ptr, size, BLOCK: constexpr):
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    gate = tl.load(gate_up_ptr + token * 2 * size + offsets, mask=mask).to(tl.float32)
    up = tl.load(gate_up_ptr + token * 2 * size + size + offsets, mask=mask).to(tl.float32)
    output = gate * tl.sigmoid(gate) * up
    tl.store(output_ptr + token * size + offsets, output.to(output_ptr.dtype.element_ty), mask=mask)


class FastSampler(Twin, Sampler):
    token_hashes: Tensor

    def draw(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        if batch.temperatures is None:
            return find_best(logits)
        num_rows, vocab_size = logits.shape
        grid = num_rows, triton.cdiv(vocab_size, _SAMPLE_PART)
        scores = torch.empty(grid, dtype=torch.float32, device=logits.device)
        tokens = torch.empty(grid, dtype=torch.int64, device=logits.device)
        noise, sizes = (
            (self.token_hashes, batch.noise_keys, batch.temperatures),
            (logits.stride(0), vocab_size),
        )
        _sample_kernel[grid](
            logits, *noise, scores, tokens, *sizes, BLOCK=_SAMPLE_PART, enable_fp_fusion=True
        )
        return tokens.gather(1, scores.argmax(-1, keepdim=True)).squeeze(1)

    def filter(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """Without sorting.

        It adds up probabilities in another order: where a sum equals top_p up to rounding, the next token may stay or go. A row
        with an inf keeps more than it must, since its draw is decided.
        """
        output, rows = logits.to(torch.float32, copy=True), batch.filtered_rows
        assert rows is not None
        filters = rows, batch.filtered_temperatures, batch.top_ks, batch.top_ps, batch.min_ps
        options = {"BLOCK": 4096, "num_warps": 32, "enable_fp_fusion": True}
        _filter_kernel[(len(rows),)](
            logits, output, *filters, logits.stride(0), logits.shape[1], **options
        )
        return output


@triton.jit(do_not_specialize_on_alignment=["keys_ptr", "temperatures_ptr"])
def _sample_kernel(
    logits_ptr,
    hashes_ptr,
    keys_ptr,
    temperatures_ptr,
    scores_ptr,
    tokens_ptr,
    stride,
    vocab_size,
    BLOCK: constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = part * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < vocab_size
    scores = tl.load(logits_ptr + row * stride + tokens, mask=mask, other=float("-inf")).to(
        tl.float32
    )
    temperature = tl.load(temperatures_ptr + row)
    if temperature > 0:
        x = tl.load(hashes_ptr + tokens, mask=mask, other=0).to(tl.uint32, bitcast=True)
        x = x ^ tl.load(keys_ptr + 2 * row).to(tl.uint32, bitcast=True)
        x = (x ^ (x >> 16)) * (tl.load(keys_ptr + 2 * row + 1).to(tl.uint32, bitcast=True) | 1)
        x = ((x ^ (x >> 15)) * 0x2C1B3C6D) >> 1
        uniform = (
            x.to(tl.int32, bitcast=True).to(tl.float32) * (2.0**-31 * (1 - 2.0**-23)) + 2.0**-33
        )
        # -log(1 - uniform): near 0, where 1 - uniform would round the digits away, by its power series.
        series = uniform * (1 + uniform * (1 / 2 + uniform * (1 / 3 + uniform * (1 / 4))))
        scores -= temperature * tl.log(tl.where(uniform < 0.01, series, -tl.log(1 - uniform)))
    # A part with a NaN has the score NaN, which torch's argmax over the parts finds, and the token -1.
    is_nan = scores != scores
    has_nan, scores = (
        tl.max(is_nan.to(tl.int32), axis=0) > 0,
        tl.where(is_nan, float("-inf"), scores),
    )
    best = part * BLOCK + tl.argmax(scores, axis=0)
    num_parts = tl.num_programs(1)
    tl.store(
        scores_ptr + row * num_parts + part, tl.where(has_nan, float("nan"), tl.max(scores, axis=0))
    )
    tl.store(tokens_ptr + row * num_parts + part, tl.where(has_nan, -1, best).to(tl.int64))


@triton.jit(
    do_not_specialize_on_alignment=[
        "rows_ptr",
        "temperatures_ptr",
        "top_ks_ptr",
        "top_ps_ptr",
        "min_ps_ptr",
    ]
)
def _filter_kernel(
    logits_ptr,
    output_ptr,
    rows_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    stride,
    vocab_size,
    BLOCK: constexpr,
):
    i = tl.program_id(0)
    row = tl.load(rows_ptr + i).to(tl.int64)
    logits_ptr += row * stride
    top_k, top_p, min_p = (
        tl.load(top_ks_ptr + i).to(tl.int32),
        tl.load(top_ps_ptr + i),
        tl.load(min_ps_ptr + i),
    )
    scale = 1 / tl.load(temperatures_ptr + i)

    highest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK):
        highest = tl.maximum(
            highest, _load_logits(logits_ptr, start + tl.arange(0, BLOCK), vocab_size)
        )
    highest = tl.max(highest)
    masses = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK):
        masses += tl.exp(
            (_load_logits(logits_ptr, start + tl.arange(0, BLOCK), vocab_size) - highest) * scale
        )

    cut, count, mass, kept_mass = float("-inf"), vocab_size, tl.sum(masses), tl.sum(masses)
    if (top_k < vocab_size) & (highest < float("inf")):
        cut, count, mass, kept_mass = _find_cut(
            logits_ptr, vocab_size, highest, scale, cut, count, mass, top_k, float("inf"), BLOCK
        )
    if (top_p < 1) & (highest < float("inf")):
        cut, count, mass, kept_mass = _find_cut(
            logits_ptr,
            vocab_size,
            highest,
            scale,
            cut,
            count,
            mass,
            top_k,
            top_p * kept_mass,
            BLOCK,
        )
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        logits = _load_logits(logits_ptr, tokens, vocab_size)
        goes = (logits < cut) | (tl.exp((logits - highest) * scale) < min_p)  # NaN does not
        tl.store(
            output_ptr + row * vocab_size + tokens, float("-inf"), mask=goes & (tokens < vocab_size)
        )


@triton.jit
def _find_cut(
    logits_ptr,
    vocab_size,
    highest,
    scale,
    low,
    count_low,
    mass_low,
    max_count,
    max_mass,
    BLOCK: constexpr,
):
    """The lowest logit that stays: above it are fewer than max_count tokens, of less mass than max_mass.

    Bisection between `low` and the highest; the tokens from `low` on are count_low, of mass_low. Returns these three for
    the cut, and the mass of the first max_count tokens, where these are the only bound.
    """
    high, count_high, mass_high = highest, 0, 0.0  # of the tokens above
    while low < high:
        pivot = tl.maximum(low * 0.5 + high * 0.5, low)
        pivot = tl.where(pivot < high, pivot, low)  # it may have been rounded up
        counts, masses = tl.zeros([BLOCK], dtype=tl.int32), tl.zeros([BLOCK], dtype=tl.float32)
        below, above = (
            tl.full([BLOCK], float("-inf"), dtype=tl.float32),
            tl.full([BLOCK], float("inf"), dtype=tl.float32),
        )
        for start in range(0, vocab_size, BLOCK):
            logits = _load_logits(logits_ptr, start + tl.arange(0, BLOCK), vocab_size)
            is_above = logits > pivot
            counts += is_above.to(tl.int32)
            masses += tl.where(is_above, tl.exp((logits - highest) * scale), 0.0)
            above = tl.minimum(above, tl.where(is_above, logits, float("inf")))
            below = tl.maximum(below, tl.where(is_above, float("-inf"), logits))
        count, mass = tl.sum(counts), tl.sum(masses)
        # The end that moves takes the logit of the next token: so the ends meet, also where many are equal.
        if (count < max_count) & (mass < max_mass):
            high, count_high, mass_high = tl.max(below), count, mass
        else:
            low, count_low, mass_low = tl.min(above), count, mass
    kept_mass = mass_high + (max_count - count_high) * (mass_low - mass_high) / (
        count_low - count_high
    )
    return low, count_low, mass_low, kept_mass


@triton.jit
def _load_logits(logits_ptr, tokens, vocab_size):
    return tl.load(logits_ptr + tokens, mask=tokens < vocab_size, other=float("-inf")).to(
        tl.float32
    )


TWINS: list[type[Twin]] = [FusedLayers, FusedAttention, FastRMSNorm, FastMLP, FastSampler]


def find_twins(dtype: torch.dtype) -> list[type[Twin]]:
    """Raises RuntimeError if Triton does not work here."""
    ones = partial(torch.ones, dtype=dtype, device="cuda")
    if reason := try_out(
        lambda: add_rms_norm(ones(2, 64), None, ones(64), eps=1e-6)[1].tolist()
    ):  # waits for its end
        raise RuntimeError(reason)
    return TWINS
