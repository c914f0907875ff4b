"""The flash_attn backend calls the package as documented. A stand-in computes with torch."""

import sys
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from conftest import DEVICE, make_batch, make_shape
from kernel_helpers import BATCHES, CPU, ShapeWithNewField, compare_attention, make_step

from nanovllm.kernels.select import find_unknown_field
from nanovllm.layers import attention as torch_backend

pytest.importorskip("triton", reason="triton is not installed")
FLASH_ATTN = "nanovllm.kernels.cuda.flash_attn"


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
    window_size, block_table,
):  # fmt: skip
    assert causal
    assert k.shape[1] % 256 == 0
    for tensor in (cu_seqlens_q, cu_seqlens_k, block_table):
        assert tensor.dtype == torch.int32
        assert tensor.stride(-1) == 1
    query_lens = cu_seqlens_q.diff().tolist()
    context_lens = cu_seqlens_k.diff().tolist()
    assert max(query_lens) == max_seqlen_q
    assert max(context_lens) == max_seqlen_k
    return attend_with_windows(
        q, k, v, query_lens, context_lens, block_table, softmax_scale, window_size
    )


def flash_attn_with_kvcache(
    q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, causal, window_size
):
    assert causal
    assert cache_seqlens.dtype == block_table.dtype == torch.int32
    return attend_with_windows(
        q.flatten(0, 1), k_cache, v_cache, [q.shape[1]] * len(q), cache_seqlens.tolist(),
        block_table, softmax_scale, window_size,
    ).view_as(q)  # fmt: skip


def attend_with_windows(q, k, v, query_lens, context_lens, block_table, scale, window_size):
    """Attend with torch, which reads no slot before a window.

    flash-attn multiplies values before a window in the same tile by 0. The largest tile is a block.
    """
    before, after = window_size
    assert (before, after) == (-1, -1) or (before >= 0 and after == 0)
    window = None if before == -1 else before + 1
    batch = make_batch(query_lens, context_lens, block_table, q.device)
    output = torch_backend.attend(q, torch.stack((k, v)), batch, make_shape(0, 0, 0, scale, window))
    if window is not None:
        rows = output.split(query_lens)
        for own, query_len, context_len, table in zip(rows, query_lens, context_lens, block_table):
            first_visible = max(0, context_len - query_len - before)
            block = v[table[first_visible // 256]]
            own += 0 * block[: first_visible % 256].sum()
    return output


@pytest.fixture
def backend(monkeypatch):
    """The backend, imported over the stand-in for the package."""
    package = SimpleNamespace(
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=flash_attn_with_kvcache,
    )
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.delitem(sys.modules, FLASH_ATTN, raising=False)
    yield import_module(FLASH_ATTN)
    sys.modules.pop(FLASH_ATTN, None)


@pytest.mark.parametrize("window", [None, 1, 20, 256])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_flash_attn_receives_the_whole_batch(backend, lengths, window):
    step = make_step(lengths, (4, 2, 64), 256, torch.float32, DEVICE, window, fills_blocks=True)
    compare_attention(backend, *step, window)


def test_flash_attn_names_what_it_does_not_support(backend):
    gpu = torch.device("cuda")
    bf16 = torch.bfloat16
    shape = make_shape(head_dim=128)
    assert backend.reason_unavailable(gpu, bf16, shape, backend.PREFERRED_BLOCK_SIZE) is None
    assert backend.reason_unavailable(gpu, bf16, make_shape(head_dim=256, window=4), 256) is None
    assert "CUDA" in backend.reason_unavailable(CPU, bf16, shape, 256)
    assert "256" in backend.reason_unavailable(gpu, bf16, shape, 16)
    assert "dtype" in backend.reason_unavailable(gpu, torch.float32, shape, 256)
    for head_dim in (10, 264):
        other = make_shape(head_dim=head_dim)
        assert "head_dim" in backend.reason_unavailable(gpu, bf16, other, 256)


def test_flash_attn_ignores_no_new_field(backend):
    shape = ShapeWithNewField(*vars(make_shape(window=4)).values())
    assert find_unknown_field(backend, shape) is None
    assert "new_field=50.0" in find_unknown_field(backend, replace(shape, new_field=50.0))


def test_a_missing_package_is_named(make_llm, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.delitem(sys.modules, FLASH_ATTN, raising=False)
    with pytest.raises(ValueError, match="flash_attn"):
        make_llm(attention_backend="flash_attn", kvcache_block_size=256)
