"""What is particular to the Triton attention backend: tiles, empty contexts and its limits."""

import pytest
import torch
from conftest import DEVICE
from kernel_helpers import SCALE, make_step

from nanovllm.arithmetic import cdiv
from nanovllm.layers import attention as torch_backend

triton = pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl

from nanovllm.kernels.cuda import attention as triton_backend
from nanovllm.kernels.cuda import attention_kernels


def test_padding_rows_of_a_cuda_graph_are_harmless(monkeypatch):
    """Their contexts are empty, and so are some splits of the others."""
    monkeypatch.setattr(triton_backend, "_count_splits", lambda *_: 5)
    lengths = ([1, 1, 1], [40, 1, 300])
    query, kv_cache, batch = make_step(lengths, (4, 2, 64), 16, torch.float32, DEVICE)
    expected = torch_backend.attend(query, kv_cache, batch, SCALE)
    batch.context_lens[1] = 0
    output = triton_backend.attend(query, kv_cache, batch, SCALE)
    assert output.isfinite().all()
    torch.testing.assert_close(output[[0, 2]], expected[[0, 2]], atol=5e-6, rtol=0)


@triton.jit
def find_tiles_kernel(bounds_ptr, found_ptr, num_seqs):
    kv_head, seq, tile = attention_kernels._find_tile(bounds_ptr, num_seqs, 2, 64)
    tl.store(found_ptr + tl.program_id(0), seq * 1000 + tile * 2 + kv_head)


@pytest.mark.parametrize("query_lens", [[1], [1, 64, 1, 65, 63, 2, 128], [300]], ids=str)
def test_prefill_programs_start_with_the_longest_tiles(query_lens):
    """A late tile attends to more of the context. Last, it would keep other processors waiting."""
    bounds = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
    num_programs = 2 * (sum(query_lens) // 64 + len(query_lens))
    found = torch.full((num_programs,), -1, device=DEVICE)
    find_tiles_kernel[(num_programs,)](bounds, found, len(query_lens))
    tiles = []
    for seq, length in enumerate(query_lens):
        tiles += [seq * 1000 + tile * 2 for tile in range(cdiv(length, 64))]
    both_heads = [tile + kv_head for tile in reversed(tiles) for kv_head in range(2)]
    assert [tile for tile in found.tolist() if tile // 2 * 2 in tiles] == both_heads


@pytest.mark.parametrize("head_dim, is_decode", [(16, False), (20, True), (32, False)])
def test_16_bit_tiles_are_at_least_64_wide(head_dim, is_decode):
    """Some releases of Triton fault on Hopper with tiles of 32."""
    shape = (4, 2, head_dim, 16, True)
    kernels = triton_backend._prepare(is_decode, DEVICE, torch.float16, *shape)
    assert kernels.attend.constants["D"] == 64
    assert kernels.combine.constants["D"] == 64


@pytest.mark.parametrize(
    "head_dim, block_size, option",
    [
        (64, 4, "kvcache_block_size"),
        (64, 48, "kvcache_block_size"),
        (10, 16, "head_dim"),
        (257, 16, "head_dim"),
    ],
)
def test_unsupported_sizes_are_rejected(head_dim, block_size, option):
    reason = triton_backend.reason_unavailable(DEVICE, torch.float16, head_dim, block_size)
    assert option in reason
