"""The backends against the torch backend, and that against plain softmax, on caches whose unwritten slots are NaN.

Without a GPU, Triton's kernels run in its interpreter: in float32 and float16, since its bfloat16 products are wrong.
"""

from collections.abc import Callable

import pytest
import torch

from conftest import Oracle, random_prompt
from nanovllm import LLM, SamplingParams
from nanovllm.engine.batch import Batch
from nanovllm.layers.attention import torch as torch_backend

triton_backend = pytest.importorskip("nanovllm.layers.attention.triton", reason="triton is not installed")
SCALE = 0.1
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU
# Of float32 in another order of summation, and of a rounding to 11 or 8 bits of what is about 1.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def make_batch(
    query_lens: list[int], context_lens: list[int], num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """A query, a KV cache and a batch that reads blocks in random order; what no context covers is NaN."""
    torch.manual_seed(sum(context_lens) + head_dim)
    num_blocks = [-(-length // block_size) for length in context_lens]
    block_ids = torch.randperm(sum(num_blocks) + 3).int().split([*num_blocks, 3])
    tables = torch.zeros(len(context_lens), max(num_blocks), dtype=torch.int32)
    kv_cache = torch.full((2, sum(num_blocks) + 3, block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype)
    for table, ids, length in zip(tables, block_ids, context_lens):
        table[: len(ids)] = ids
        for position in range(length):
            kv_cache[:, ids[position // block_size], position % block_size] = torch.randn(2, num_kv_heads, head_dim).to(dtype)
    query = torch.randn(sum(query_lens), num_heads, head_dim).to(dtype)
    cu_seqlens = torch.tensor([0, *query_lens]).cumsum(0).int()
    unused = torch.zeros(0, dtype=torch.int64)
    batch = Batch(
        unused, unused, unused, cu_seqlens.to(DEVICE), torch.tensor(context_lens, dtype=torch.int32, device=DEVICE),
        tables.to(DEVICE), max(query_lens), max(context_lens), unused,
    )  # fmt: skip
    return query.to(DEVICE), kv_cache.to(DEVICE), batch


def attend_by_definition(query: torch.Tensor, kv_cache: torch.Tensor, batch: Batch, scale: float) -> torch.Tensor:
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
                output[token, head] = (scores.softmax(0) @ values[:seen, head // group_size]).to(DEVICE)
    return output


BATCHES = {
    "decode at block borders": ([1] * 6, [1, 15, 16, 17, 32, 33]),
    "decode, ragged and split": ([1] * 3, [3, 700, 129]),
    "prefill at block borders": ([1, 15, 16, 17], [1, 15, 16, 17]),
    "chunks behind prefixes": ([5, 1, 20, 3], [37, 64, 100, 3]),
    "longer than a tile": ([70, 33], [70, 133]),
}
HEADS = [(4, 4, 64), (4, 2, 80), (6, 2, 96), (8, 1, 16), (14, 2, 128), (2, 2, 256)]


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_torch_is_the_definition(lengths: tuple[list[int], list[int]], heads: tuple[int, int, int]) -> None:
    query, kv_cache, batch = make_batch(*lengths, *heads, 16, torch.float32)
    output = torch_backend.attend(query, kv_cache, batch, SCALE)
    torch.testing.assert_close(output.double(), attend_by_definition(query, kv_cache, batch, SCALE), atol=5e-6, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 256])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_triton_attends(
    lengths: tuple[list[int], list[int]], heads: tuple[int, int, int], block_size: int, dtype: torch.dtype
) -> None:
    if not ON_GPU and block_size != 16 and heads not in HEADS[1:3]:
        pytest.skip("the interpreter takes its time: the whole grid is for a GPU")
    query, kv_cache, batch = make_batch(*lengths, *heads, block_size, dtype)
    expected = torch_backend.attend(query.float(), kv_cache.float(), batch, SCALE)
    output = triton_backend.attend(query, kv_cache, batch, SCALE)
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_empty_contexts_are_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding rows of a CUDA graph: context 0, splits with nothing in them; finite, and the others undisturbed."""
    monkeypatch.setattr(triton_backend, "_count_splits", lambda *_: 5)
    query, kv_cache, batch = make_batch([1, 1, 1], [40, 1, 300], 4, 2, 64, 16, torch.float32)
    expected = torch_backend.attend(query, kv_cache, batch, SCALE)
    batch.context_lens[1] = 0
    output = triton_backend.attend(query, kv_cache, batch, SCALE)
    assert output.isfinite().all()
    torch.testing.assert_close(output[[0, 2]], expected[[0, 2]], atol=5e-6, rtol=0)


@pytest.mark.parametrize("backend", [torch_backend, triton_backend], ids=["torch", "triton"])
@pytest.mark.parametrize("num_kv_heads, head_dim", [(2, 64), (3, 80), (1, 10), (8, 256)])
def test_store_kvcache(backend: object, num_kv_heads: int, head_dim: int) -> None:
    """Every slot that is named gets its token, padding goes nowhere, nothing else is touched."""
    packed = torch.randn(6, 3 * num_kv_heads * head_dim, device=DEVICE)  # as from a fused projection: rows with gaps
    key, value = (part.unflatten(-1, (num_kv_heads, head_dim)) for part in packed.chunk(3, dim=-1)[1:])
    slots = torch.tensor([3, -1, 63, 0, 20, -1], device=DEVICE)
    kv_cache = torch.full((2, 4, 16, num_kv_heads, head_dim), torch.nan, device=DEVICE)
    backend.store_kvcache(key, value, kv_cache, slots)
    flat = kv_cache.flatten(1, 2)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(flat[0, slot], key[token]) and torch.equal(flat[1, slot], value[token])
    assert flat.isnan().all(-1).all(-1).sum() == 2 * (64 - 4)


@pytest.mark.parametrize("chunked", [True, False])
def test_engine_with_triton(tiny: tuple[str, Oracle], make_llm: Callable[..., LLM], chunked: bool) -> None:
    llm = make_llm(
        attention_backend="triton", kvcache_block_size=16, num_kvcache_blocks=8, max_model_len=64, max_num_batched_tokens=40,
        enable_chunked_prefill=chunked,
    )  # fmt: skip
    assert llm.model_runner.backend is triton_backend
    prompts = [random_prompt(i, length) for i, length in enumerate((1, 15, 16, 17, 33))] * 2
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    assert [o["token_ids"] for o in outputs] == [tiny[1](prompt, 8) for prompt in prompts]
    assert llm.stats["num_cached_tokens"] and llm.stats["num_preemptions"]


@pytest.mark.parametrize("options", [{"kvcache_block_size": 4}, {"kvcache_block_size": 48}])
def test_triton_refuses_what_it_cannot_do(make_llm: Callable[..., LLM], options: dict) -> None:
    with pytest.raises(ValueError, match="kvcache_block_size"):
        make_llm(attention_backend="triton", **options)
