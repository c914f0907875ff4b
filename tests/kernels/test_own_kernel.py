"""The backend of evening 8, in Triton's interpreter, against layers/attention.py."""

from functools import partial

import pytest
import torch
from conftest import generate_ids, greedy, make_batch, random_prompt

pytest.importorskip("triton", reason="triton is not installed")

from nanovllm import DEMO_MODEL, LLM
from nanovllm.course import own_kernel
from nanovllm.kernels import select
from nanovllm.layers import attention
from nanovllm.layers.attention import AttentionShape

ATTENDS = {
    "whole": own_kernel.attend_whole,
    "online": partial(own_kernel.attend_split, num_splits=1),
    "split": own_kernel.attend_split,
}
EACH_ATTEND = pytest.mark.parametrize("attend", ATTENDS.values(), ids=ATTENDS)


def make_inputs(num_heads, num_kv_heads, head_dim, context_lens, block_size=4, scale=1.0):
    """Random K/V, NaN where no token is, and block tables in a random order."""
    torch.manual_seed(0)
    width = -(-max(context_lens) // block_size)
    tables = torch.randperm(len(context_lens) * width).int().view(-1, width) + 3
    batch = make_batch([1] * len(context_lens), context_lens, tables)
    num_blocks = int(tables.max()) + 1
    kv_cache = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), torch.nan)
    for table, context_len in zip(tables.tolist(), context_lens):
        for position in range(context_len):
            block, offset = table[position // block_size], position % block_size
            kv_cache[:, block, offset] = torch.randn(2, num_kv_heads, head_dim)
    query = scale * torch.randn(len(context_lens), num_heads, head_dim)
    return query, kv_cache, batch


SIZES = [(4, 2, 16), (6, 6, 8), (8, 1, 12), (3, 1, 64)]


@EACH_ATTEND
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("context_lens", [[1], [4, 5, 1], [63, 17, 64, 2]], ids=str)
def test_decodes_match_plain_torch(attend, sizes, context_lens):
    query, kv_cache, batch = make_inputs(*sizes, context_lens)
    expected = attention.attend(query, kv_cache, batch, AttentionShape(*sizes, 0.3))
    assert torch.allclose(attend(query, kv_cache, batch, 0.3), expected, atol=1e-5)


@EACH_ATTEND
def test_large_scores_do_not_overflow(attend):
    """exp(100) is infinite in float32, so the largest score is subtracted first."""
    sizes = (4, 2, 16)
    query, kv_cache, batch = make_inputs(*sizes, [30, 9], scale=200.0)
    expected = attention.attend(query, kv_cache, batch, AttentionShape(*sizes, 1.0))
    assert torch.allclose(attend(query, kv_cache, batch, 1.0), expected, atol=1e-4)


@EACH_ATTEND
def test_scores_far_below_0_do_not_vanish(attend):
    """exp(-200) is 0 in float32, so a sum of them would be."""
    query, kv_cache, batch = make_inputs(1, 1, 8, [9])
    query.fill_(5.0)
    kv_cache[0] -= 5.0
    expected = attention.attend(query, kv_cache, batch, AttentionShape(1, 1, 8, 1.0))
    assert torch.allclose(attend(query, kv_cache, batch, 1.0), expected, atol=1e-4)


@EACH_ATTEND
def test_products_and_sums_of_16_bits_are_in_float32(attend):
    """In float16, a product of 90,000 is infinite, and so is a sum of 300 values of 300."""
    query, kv_cache, batch = make_inputs(1, 1, 16, [300])
    kv_cache = (300 + kv_cache).half()
    query = torch.full_like(query, 300).half()
    shape = AttentionShape(1, 1, 16, 1e-6)
    expected = attention.attend(query.float(), kv_cache.float(), batch, shape)
    attended = attend(query, kv_cache, batch, 1e-6)
    assert torch.allclose(attended.float(), expected, atol=0.3)


@pytest.mark.parametrize("context_len", [12, 20])
def test_splits_have_whole_blocks(context_len):
    """Of three blocks, the fourth split has none. Of five, the third has one."""
    query, kv_cache, batch = make_inputs(1, 1, 8, [context_len])
    query.zero_()
    largest, totals = torch.zeros(2, 1, 1, 4)
    outputs = torch.zeros(1, 1, 4, 8)
    arguments, sizes = own_kernel.list_arguments(query, kv_cache, batch)
    own_kernel.attend_split_kernel[(1, 1, 4)](*arguments, largest, totals, outputs, 1.0, *sizes, 4)
    expected = {12: [4, 4, 4, 0], 20: [8, 8, 4, 0]}[context_len]
    assert totals[0, 0].tolist() == expected, "exp(0) for each token"
    assert largest[0, 0].isfinite().tolist() == [True, True, True, False]


def test_scores_that_grow_and_fall():
    """The largest score comes in the first block, in a middle one, or in the last."""
    query, kv_cache, batch = make_inputs(1, 1, 8, [40] * 3)
    for row, position in enumerate((0, 21, 39)):
        block = batch.block_tables[row, position // 4]
        kv_cache[0, block, position % 4, 0] = 9 * query[row, 0]
    shape = AttentionShape(1, 1, 8, 1.0)
    expected = attention.attend(query, kv_cache, batch, shape)
    for attend in ATTENDS.values():
        assert torch.allclose(attend(query, kv_cache, batch, 1.0), expected, atol=1e-5)


@pytest.mark.parametrize("num_kv_heads, head_dim", [(2, 16), (3, 12)])
def test_store_kvcache_writes_its_slots_and_no_others(num_kv_heads, head_dim):
    heads = torch.randn(5, 2 * num_kv_heads, head_dim)
    key, value = heads.split(num_kv_heads, dim=1)  # parts of one tensor
    slots = torch.tensor([6, -1, 0, 11, 2], dtype=torch.int32)
    kv_cache = torch.zeros(2, 3, 4, num_kv_heads, head_dim)
    expected = kv_cache.clone()
    own_kernel.store_kvcache(key, value, kv_cache, slots)
    attention.store_kvcache(key, value, expected, slots)
    assert torch.equal(kv_cache, expected)


def test_a_query_can_be_a_part_of_a_larger_tensor():
    sizes = (4, 2, 16)
    query, kv_cache, batch = make_inputs(*sizes, [9, 2])
    shape = AttentionShape(*sizes, 0.3)
    strided = torch.stack([query, query], dim=1).flatten(1, 2)[:, :4]
    expected = own_kernel.attend(query, kv_cache, batch, shape)
    assert torch.allclose(expected, attention.attend(query, kv_cache, batch, shape), atol=1e-5)
    assert not strided.is_contiguous()
    assert torch.equal(own_kernel.attend(strided, kv_cache, batch, shape), expected)


def test_the_demo_model_runs_with_the_own_backend(monkeypatch):
    """A row of BACKENDS is all that it takes."""
    prompts = [random_prompt(seed, 3 + 7 * seed) for seed in range(3)]
    options = {"dtype": "float32", "attention_backend": "torch", "max_model_len": 64}
    with LLM(DEMO_MODEL, **options) as llm:
        expected = generate_ids(llm, prompts, greedy(5))
    registration = select.Registration("nanovllm.course.own_kernel", ("cpu", "cuda"))
    monkeypatch.setitem(select.BACKENDS, "torch", registration)
    with LLM(DEMO_MODEL, **options) as llm:
        assert llm.executor.worker.backend is own_kernel
        assert generate_ids(llm, prompts, greedy(5)) == expected
