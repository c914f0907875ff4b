"""Every registered backend against the torch backend, and that one against plain softmax.

A backend that is registered in nanovllm/backends.py is tested here without a change to this file. The
KV caches hold NaN in all slots that are not written, so that reading too much shows. Without a GPU,
Triton's kernels run in its interpreter, but not in bfloat16, because its bfloat16 products are wrong.
"""

import heapq
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import (
    DEVICE,
    ON_GPU,
    Oracle,
    cover_pairs,
    find_obstacle,
    load_backend,
    make_batch,
    random_prompt,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanovllm import LLM, SamplingParams
from nanovllm.backends import BACKENDS
from nanovllm.batch import Batch
from nanovllm.kernels.cpu import attention as cpp_backend
from nanovllm.layers import attention as torch_backend

triton = pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl

triton_backend = pytest.importorskip(
    "nanovllm.kernels.cuda.attention", reason="triton is not installed"
)
attention_kernels = pytest.importorskip(
    "nanovllm.kernels.cuda.attention_kernels", exc_type=ImportError
)
SCALE = 0.1
CPU = torch.device("cpu")
needs_cpp = pytest.mark.skipif(
    cpp_backend.reason_unavailable(CPU, torch.float32, 64, 16) is not None, reason="no C++ compiler"
)
# Of float32 in another order of summation, and of a rounding to 11 or 8 bits of what is about 1.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def is_interpreted(name: str, device: torch.device) -> bool:
    return device == CPU and "cpu" not in BACKENDS[name].device_types


def can_test(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int = 64,
    block_size: int | None = None,
) -> bool:
    if is_interpreted(name, device) and dtype == torch.bfloat16:
        return False
    return find_obstacle(name, device, dtype, head_dim, block_size) is None


def find_test_device(name: str) -> torch.device | None:
    """The GPU if there is one and the backend runs on it, else the CPU; None: it runs on neither."""
    for device in (DEVICE, CPU):
        if any(can_test(name, device, dtype) for dtype in TOLERANCE):
            return device
    return None


TEST_DEVICES = {name: find_test_device(name) for name in BACKENDS}
RUNNABLE = [name for name, device in TEST_DEVICES.items() if device is not None]


def make_step(
    query_lens: list[int], context_lens: list[int], num_heads: int, num_kv_heads: int, head_dim: int, block_size: int,
    dtype: torch.dtype, device: torch.device = DEVICE,
) -> tuple[torch.Tensor, torch.Tensor, Batch]:  # fmt: skip
    """A query, a KV cache and a batch that reads blocks in random order; what no context covers is NaN."""
    torch.manual_seed(sum(context_lens) + head_dim)
    num_blocks = [-(-length // block_size) for length in context_lens]
    block_ids = torch.randperm(sum(num_blocks) + 3).int().split([*num_blocks, 3])
    tables = torch.zeros(len(context_lens), max(num_blocks), dtype=torch.int32)
    kv_cache = torch.full(
        (2, sum(num_blocks) + 3, block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype
    )
    for table, ids, length in zip(tables, block_ids, context_lens):
        table[: len(ids)] = ids
        for position in range(length):
            kv_cache[:, ids[position // block_size], position % block_size] = torch.randn(
                2, num_kv_heads, head_dim
            ).to(dtype)
    query = torch.randn(sum(query_lens), num_heads, head_dim).to(dtype)
    return (
        query.to(device),
        kv_cache.to(device),
        make_batch(query_lens, context_lens, tables, device),
    )


def attend_by_definition(
    query: torch.Tensor, kv_cache: torch.Tensor, batch: Batch, scale: float
) -> torch.Tensor:
    """In float64, one query token and one head at a time."""
    block_size, num_kv_heads = kv_cache.shape[2:4]
    group_size = query.shape[1] // num_kv_heads
    output = torch.empty_like(query, dtype=torch.float64)
    bounds = batch.cu_seqlens_q.tolist()
    for i, context_len in enumerate(batch.context_lens.tolist()):
        positions = torch.arange(context_len)
        blocks = batch.block_tables[i].cpu().long()[positions // block_size]
        keys, values = kv_cache.cpu().double()[:, blocks, positions % block_size]
        for token in range(bounds[i], bounds[i + 1]):
            seen = context_len - (bounds[i + 1] - 1 - token)
            for head in range(query.shape[1]):
                scores = keys[:seen, head // group_size] @ query[token, head].cpu().double() * scale
                output[token, head] = (scores.softmax(0) @ values[:seen, head // group_size]).to(
                    DEVICE
                )
    return output


BATCHES = {
    "decode at block borders": ([1] * 6, [1, 15, 16, 17, 32, 33]),
    "decode, ragged and split": ([1] * 3, [3, 700, 129]),
    "prefill at block borders": ([1, 15, 16, 17], [1, 15, 16, 17]),
    "chunks behind prefixes": ([5, 1, 20, 3], [37, 64, 100, 3]),
    "longer than a tile": ([70, 33], [70, 133]),
    "decodes beside chunks": ([1, 40, 1, 2, 1], [700, 41, 1, 300, 16]),
}
HEADS = [(4, 4, 64), (4, 2, 80), (6, 2, 96), (8, 1, 16), (14, 2, 128), (2, 2, 256)]


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_torch_is_the_definition(
    lengths: tuple[list[int], list[int]], heads: tuple[int, int, int]
) -> None:
    query, kv_cache, batch = make_step(*lengths, *heads, 16, torch.float32)
    output = torch_backend.attend(query, kv_cache, batch, SCALE)
    torch.testing.assert_close(
        output.double(), attend_by_definition(query, kv_cache, batch, SCALE), atol=5e-6, rtol=0
    )


def check_attends(
    backend: ModuleType,
    lengths: tuple[list[int], list[int]],
    heads: tuple[int, int, int],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device = CPU,
) -> None:
    query, kv_cache, batch = make_step(*lengths, *heads, block_size, dtype, device)
    expected = torch_backend.attend(query.float(), kv_cache.float(), batch, SCALE)
    output = backend.attend(query, kv_cache, batch, SCALE)
    assert output.dtype == dtype
    torch.testing.assert_close(
        output.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


BLOCK_SIZES = (2, 16, 32, 48, 256)


def list_cases(name: str) -> list[Any]:
    """The test cases of a registered backend: in each dtype, a covering array of what it supports.

    Triton's interpreter is slow, and gets one covering array in which the dtypes alternate.
    """
    device = TEST_DEVICES[name]
    if device is None:
        reason = find_obstacle(name, DEVICE, torch.float16)
        return [pytest.param(name, *[None] * 4, marks=pytest.mark.skip(reason=f"{name}: {reason}"))]

    def allowed(dtype: torch.dtype, _: str, heads: tuple[int, int, int], block_size: int) -> bool:
        return can_test(name, device, dtype, heads[-1], block_size)

    groups = [[dtype] for dtype in TOLERANCE]
    if is_interpreted(name, device):
        groups = [list(TOLERANCE)]
    cases: list[Any] = []
    for dtypes in groups:
        covering = cover_pairs(dtypes, BATCHES, [*HEADS, (3, 1, 10)], BLOCK_SIZES, allowed=allowed)
        cases += [(name, *case) for case in covering]
    return cases


@pytest.mark.parametrize(
    "name, dtype, lengths, heads, block_size",
    [case for name in BACKENDS for case in list_cases(name)],
    ids=str,
)
def test_backend_attends(
    name: str, dtype: torch.dtype, lengths: str, heads: tuple[int, int, int], block_size: int
) -> None:
    check_attends(
        load_backend(name), BATCHES[lengths], heads, block_size, dtype, TEST_DEVICES[name]
    )


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "lengths", [([1, 1, 1], [700, 3, 300]), ([9, 40], [700, 40])], ids=["decode", "prefill"]
)
def test_cpp_attends_to_extreme_scores(
    lengths: tuple[list[int], list[int]], dtype: torch.dtype
) -> None:
    """Scores of thousands, and of -inf in all of a split; a sequence's NaN stays its own."""
    query, kv_cache, batch = make_step(*lengths, 4, 2, 64, 16, dtype, CPU)
    query *= 1e4
    expected = torch_backend.attend(query.float(), kv_cache.float(), batch, SCALE)
    output = cpp_backend.attend(query, kv_cache, batch, SCALE)
    tolerance = {torch.float32: 2e-3, torch.bfloat16: 3e-2, torch.float16: 4e-3}[
        dtype
    ]  # of scores of 1e4
    torch.testing.assert_close(output.float(), expected, atol=tolerance, rtol=tolerance)

    query[0].fill_(torch.nan)
    with_nan = cpp_backend.attend(query, kv_cache, batch, SCALE)
    assert with_nan[0].isnan().all() and torch.equal(with_nan[1:], output[1:])

    query, kv_cache, batch = make_step(*lengths, 4, 2, 64, 16, dtype, CPU)
    query = query.abs() * 1e4
    low = batch.block_tables[0, : 512 // 16].long()  # two splits
    kv_cache[0, low] = torch.finfo(dtype).min / 4
    output = cpp_backend.attend(query, kv_cache, batch, SCALE)
    expected = torch_backend.attend(query.float(), kv_cache.float(), batch, SCALE)
    assert expected.isfinite().all()
    torch.testing.assert_close(output.float(), expected, atol=tolerance, rtol=tolerance)


class LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        self.num_bytes = max(
            [self.num_bytes, *[tensor.untyped_storage().nbytes() for tensor in tensors]]
        )
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "query_len, context_len", [(200, 6000), (6000, 6000)], ids=["chunk", "whole"]
)
def test_torch_needs_little_memory(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, query_len: int, context_len: int
) -> None:
    """Only a tile of the mask, and no scores, are in memory. The results are those of the whole mask."""
    monkeypatch.setattr(torch_backend, "TILE", 40)
    torch.manual_seed(0)
    query = torch.randn(query_len, 14, 15).to(dtype)
    kv_cache = torch.randn(2, context_len // 16, 16, 2, 15).to(dtype)
    tables = torch.randperm(context_len // 16).int()[None]
    batch = make_batch([query_len], [context_len], tables)
    with LargestTensor() as largest:
        output = torch_backend.attend(query, kv_cache, batch, SCALE)
    assert largest.num_bytes <= max(4 << 18, 2 * query.nbytes, kv_cache.nbytes)
    for token in (0, 1, query_len // 2, query_len - 1):
        seen = context_len - query_len + token + 1
        keys, values = (
            kv_cache[:, tables[0]].flatten(1, 2)[:, :seen].float().repeat_interleave(7, dim=2)
        )
        weights = (torch.einsum("hd,nhd->hn", query[token].float(), keys) * SCALE).softmax(-1)
        expected = torch.einsum("hn,nhd->hd", weights, values)
        torch.testing.assert_close(
            output[token].float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize(
    "name", [name for name in RUNNABLE if "cpu" in BACKENDS[name].device_types]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_surroundings_change_nothing(
    name: str, dtype: torch.dtype, lengths: tuple[list[int], list[int]]
) -> None:
    """Neither torch's default device and dtype nor its deterministic algorithms."""
    backend = load_backend(name)
    query, kv_cache, batch = make_step(*lengths, 4, 2, 80, 16, dtype, TEST_DEVICES[name])
    expected = backend.attend(query, kv_cache, batch, SCALE)
    try:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(
            query.is_cpu
        )  # on a GPU, cuBLAS refuses unless configured
        output = backend.attend(query, kv_cache, batch, SCALE)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    assert output.device == expected.device and torch.equal(output, expected)


def test_empty_contexts_are_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding rows of a CUDA graph: context 0, splits with nothing in them; finite, and the others undisturbed."""
    monkeypatch.setattr(triton_backend, "_count_splits", lambda *_: 5)
    query, kv_cache, batch = make_step([1, 1, 1], [40, 1, 300], 4, 2, 64, 16, torch.float32)
    expected = torch_backend.attend(query, kv_cache, batch, SCALE)
    batch.context_lens[1] = 0
    output = triton_backend.attend(query, kv_cache, batch, SCALE)
    assert output.isfinite().all()
    torch.testing.assert_close(output[[0, 2]], expected[[0, 2]], atol=5e-6, rtol=0)


@triton.jit
def find_tiles_kernel(
    cu_seqlens_ptr, found_ptr, num_seqs, NUM_KV_HEADS: tl.constexpr, TOKENS: tl.constexpr
):
    kv_head, seq, tile = attention_kernels._find_tile(
        cu_seqlens_ptr, num_seqs, NUM_KV_HEADS, TOKENS
    )
    tl.store(found_ptr + 3 * tl.program_id(0), kv_head)
    tl.store(found_ptr + 3 * tl.program_id(0) + 1, seq)
    tl.store(found_ptr + 3 * tl.program_id(0) + 2, tile)


def find_tiles(query_lens: list[int], num_kv_heads: int) -> list[tuple[int, int, int]]:
    """What each program of a prefill takes, in the order of their start, those without a token left out."""
    bounds = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
    num_programs = (sum(query_lens) // 64 + len(query_lens)) * num_kv_heads
    found = torch.full((num_programs, 3), -1, device=DEVICE)
    find_tiles_kernel[(num_programs,)](
        bounds, found, len(query_lens), NUM_KV_HEADS=num_kv_heads, TOKENS=64
    )
    return [
        (kv_head, seq, tile) for kv_head, seq, tile in found.tolist() if tile * 64 < query_lens[seq]
    ]


@pytest.mark.parametrize("query_lens", [[1], [64], [1, 64, 1, 65, 63, 2, 128], [300], [1] * 9])
def test_tiles_cover_the_batch(query_lens: list[int]) -> None:
    tiles = [
        (seq, tile) for seq, length in enumerate(query_lens) for tile in range(-(-length // 64))
    ]
    assert find_tiles(query_lens, 2) == [
        (kv_head, *tile) for tile in reversed(tiles) for kv_head in range(2)
    ]


def test_tail_of_a_long_prompt() -> None:
    """A prompt of 8,192 tokens, simulated on 132 multiprocessors: none has long to wait for the last program."""
    costs = [tile + 1 for _, _, tile in find_tiles([8192], 8)]  # in pieces of the context
    ends = [0] * 132
    for cost in costs:
        heapq.heapreplace(ends, ends[0] + cost)
    assert sum(costs) / (132 * max(ends)) > 0.95


@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_kv_heads, head_dim", [(2, 64), (3, 80), (1, 10), (8, 256)])
def test_store_kvcache(name: str, dtype: torch.dtype, num_kv_heads: int, head_dim: int) -> None:
    """Every slot that is named gets its token, padding goes nowhere, nothing else is touched."""
    device = TEST_DEVICES[name]
    if obstacle := find_obstacle(name, device, dtype):
        pytest.skip(obstacle)
    backend = load_backend(name)
    # Rows with gaps, as they come from a fused projection.
    packed = torch.randn(6, 3 * num_kv_heads * head_dim, device=device).to(dtype)
    key, value = (
        part.unflatten(-1, (num_kv_heads, head_dim)) for part in packed.chunk(3, dim=-1)[1:]
    )
    slots = torch.tensor([3, -1, 63, 0, 20, -1], dtype=torch.int32, device=device)
    kv_cache = torch.full((2, 4, 16, num_kv_heads, head_dim), torch.nan, dtype=dtype, device=device)
    backend.store_kvcache(key, value, kv_cache, slots)
    flat = kv_cache.flatten(1, 2)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(flat[0, slot], key[token]) and torch.equal(
                flat[1, slot], value[token]
            )
    assert flat.isnan().all(-1).all(-1).sum() == 2 * (64 - 4)


@pytest.mark.parametrize("chunked", [True, False])
def test_engine_with_triton(
    tiny: tuple[str, Oracle], make_llm: Callable[..., LLM], chunked: bool
) -> None:
    llm = make_llm(
        attention_backend="triton", kvcache_block_size=16, num_kvcache_blocks=6, max_model_len=64, max_num_batched_tokens=40,
        enable_chunked_prefill=chunked, device=DEVICE.type,
    )  # fmt: skip
    assert llm.model_runner.executor.worker.backend is triton_backend
    prompts = [random_prompt(i, length) for i, length in enumerate((1, 15, 16, 33))] * 2
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
    assert [o["token_ids"] for o in outputs] == [tiny[1](prompt, 4) for prompt in prompts]
    assert llm.stats["num_cached_tokens"] and llm.stats["num_preemptions"]


def test_tiles_are_wide_enough_for_hopper() -> None:
    """Of 16-bit numbers, whatever the head's size: some releases of Triton fault with tiles of 32."""
    for head_dim, is_decode in ((16, False), (20, True), (32, False), (128, True)):
        kernels = triton_backend._prepare(
            is_decode, DEVICE, torch.float16, 4, 2, head_dim, 16, True
        )
        assert kernels.attend.constants["D"] >= 64 and kernels.combine.constants["D"] >= 64


@pytest.mark.parametrize("options", [{"kvcache_block_size": 4}, {"kvcache_block_size": 48}])
def test_triton_refuses_what_it_cannot_do(make_llm: Callable[..., LLM], options: dict) -> None:
    with pytest.raises(ValueError, match="kvcache_block_size"):
        make_llm(attention_backend="triton", device=DEVICE.type, **options)


# --- flash-attn's interface, played by torch


FLASH_ATTN = "nanovllm.kernels.cuda.flash_attn"


@pytest.fixture
def flash_attn_backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Our backend over a stand-in for the package: the documented meaning of its two functions, and its demands."""

    def check(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *int32s: torch.Tensor
    ) -> None:
        assert k_cache.shape == v_cache.shape and k_cache.shape[1] % 256 == 0 and q.stride(-1) == 1
        assert all(tensor.dtype == torch.int32 and tensor.stride(-1) == 1 for tensor in int32s)

    def flash_attn_varlen_func(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float, causal: bool, block_table: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        check(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table)
        assert (
            causal
            and cu_seqlens_q.diff().max() == max_seqlen_q
            and cu_seqlens_k.diff().max() == max_seqlen_k
        )
        batch = make_batch(
            cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist(), block_table, q.device
        )
        return torch_backend.attend(q, torch.stack((k, v)), batch, softmax_scale)

    def flash_attn_with_kvcache(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cache_seqlens: torch.Tensor, block_table: torch.Tensor,
        softmax_scale: float, causal: bool,
    ) -> torch.Tensor:  # fmt: skip
        num_seqs, query_len = q.shape[:2]
        bounds = torch.arange(num_seqs + 1, dtype=torch.int32, device=q.device) * query_len
        contexts = torch.nn.functional.pad(cache_seqlens.cumsum(0, dtype=torch.int32), (1, 0))
        longest = int(cache_seqlens.max())
        return flash_attn_varlen_func(
            q.flatten(0, 1),
            k_cache,
            v_cache,
            bounds,
            contexts,
            query_len,
            longest,
            softmax_scale,
            causal,
            block_table,
        ).view_as(q)

    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func, package.flash_attn_with_kvcache = (
        flash_attn_varlen_func,
        flash_attn_with_kvcache,
    )
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.delitem(sys.modules, FLASH_ATTN, raising=False)
    backend = importlib.import_module(FLASH_ATTN)
    yield backend
    sys.modules.pop(FLASH_ATTN, None)


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_flash_attn_is_asked_the_right_question(
    flash_attn_backend: ModuleType, lengths: tuple[list[int], list[int]]
) -> None:
    query, kv_cache, batch = make_step(*lengths, 4, 2, 64, 256, torch.float32)
    expected = torch_backend.attend(query, kv_cache, batch, SCALE)
    torch.testing.assert_close(
        flash_attn_backend.attend(query, kv_cache, batch, SCALE), expected, atol=5e-6, rtol=0
    )


def test_engine_with_flash_attn(
    tiny: tuple[str, Oracle],
    make_llm: Callable[..., LLM],
    flash_attn_backend: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not ON_GPU:
        with pytest.raises(ValueError, match="CUDA"):
            make_llm(attention_backend="flash_attn", kvcache_block_size=256, num_kvcache_blocks=4)
    monkeypatch.setattr(flash_attn_backend, "reason_unavailable", lambda *_: None)
    llm = make_llm(
        attention_backend="flash_attn", kvcache_block_size=None, num_kvcache_blocks=4, max_num_batched_tokens=40,
        device=DEVICE.type, enforce_eager=True,  # the stand-in reads lengths on the host, which a CUDA graph cannot record
    )  # fmt: skip
    assert llm.model_runner.block_size == 256
    prompts = [random_prompt(i, length) for i, length in enumerate((1, 60, 17))]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    assert [o["token_ids"] for o in outputs] == [tiny[1](prompt, 8) for prompt in prompts]


def test_flash_attn_rules(flash_attn_backend: ModuleType) -> None:
    gpu, bf16 = torch.device("cuda"), torch.bfloat16
    assert flash_attn_backend.reason_unavailable(gpu, bf16, 128, 256) is None
    assert "256" in flash_attn_backend.reason_unavailable(gpu, bf16, 128, 16)
    assert "dtype" in flash_attn_backend.reason_unavailable(gpu, torch.float32, 128, 256)
    for head_dim in (10, 264):
        assert "head_dim" in flash_attn_backend.reason_unavailable(gpu, bf16, head_dim, 256)


def test_a_missing_package_is_named(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.delitem(sys.modules, FLASH_ATTN, raising=False)
    with pytest.raises(ValueError, match="flash_attn"):
        make_llm(attention_backend="flash_attn", kvcache_block_size=256)
