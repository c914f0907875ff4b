"""What is particular to the Triton attention backend: tiles, empty contexts and its limits."""

from dataclasses import replace

import pytest
import torch
from conftest import DEVICE, cover_pairs, make_batch, make_shape
from kernel_helpers import LaunchRecorder, attend, compare_attention, make_step

from nanovllm.utils.helpers import cdiv

pytest.importorskip("triton", reason="triton is not installed")
from nanovllm.kernels.cuda import attention as triton_backend
from nanovllm.kernels.cuda.attention_kernels import attend_kernel, combine_splits_kernel


@pytest.mark.parametrize(
    "lengths, num_surplus, window",
    cover_pairs(
        [([1, 1], [40, 300]), ([1, 64, 1, 70, 1, 2], [40, 64, 3, 90, 17, 40]), ([129], [150])],
        [1, 5],
        [None, 30],
    ),
    ids=str,
)
def test_padding_of_a_cuda_graph_is_harmless(monkeypatch, lengths, num_surplus, window):
    """Padding sequences have no tokens. Some splits of the others are empty."""
    monkeypatch.setattr(triton_backend, "_count_splits", lambda *_: (5, 16))
    monkeypatch.setattr(triton_backend, "_LEAST_PREFILL_TOKENS", 32)
    step = make_step(lengths, (4, 2, 64), 16, torch.float32, DEVICE, window)
    query, kv_cache, batch = step
    expected = attend(triton_backend, *step, window)
    num_seqs = len(batch.context_lens)
    num_padding = num_surplus + 20
    ends = batch.cu_seqlens_q[-1:].repeat(num_padding)
    surplus = torch.arange(num_seqs, num_seqs + num_surplus, dtype=torch.int32, device=DEVICE)
    zeros = torch.zeros_like(ends)
    padded = replace(
        batch,
        cu_seqlens_q=torch.cat((batch.cu_seqlens_q, ends)),
        context_lens=torch.cat((batch.context_lens, zeros)),
        block_tables=torch.cat((batch.block_tables, batch.block_tables[:1].repeat(num_padding, 1))),
        long_queries=torch.cat((batch.long_queries, surplus)),
    )
    if len(batch.long_queries) == 0:
        padded = replace(padded, long_queries=batch.long_queries)
    query = torch.cat((query, torch.full_like(query[:1], torch.nan)))
    output = attend(triton_backend, query, kv_cache, padded, window)
    assert torch.equal(output[: len(expected)], expected)


def replace_launches(monkeypatch, launch):
    for kernel in (attend_kernel, combine_splits_kernel):
        name = kernel.__name__
        monkeypatch.setattr(triton_backend, name, LaunchRecorder(kernel, launch))


@pytest.fixture
def list_launches(monkeypatch):
    """A function that attends, and returns the constants and the grid of each launch.

    Nothing is computed. Heads are num_heads, num_kv_heads and head_dim.
    """

    def attend_to_nothing(query_lens, context_lens, heads, window=None):
        found = []

        def record(kernel, grid, *args, **constants):
            found.append((constants, grid))

        replace_launches(monkeypatch, record)
        num_heads, num_kv_heads, head_dim = heads
        query = torch.empty(sum(query_lens), num_heads, head_dim, dtype=torch.float16)
        kv_cache = torch.empty(2, 1, 16, num_kv_heads, head_dim, dtype=torch.float16)
        tables = torch.zeros(len(query_lens), 2000, dtype=torch.int32)
        batch = make_batch(query_lens, context_lens, tables)
        attend(triton_backend, query, kv_cache, batch, window)
        return found

    return attend_to_nothing


def test_decodes_beside_a_prompt_add_few_tiles(list_launches):
    """Tiles of 64 tokens for each of 8 KV heads, and an incomplete one for the prompt."""
    launches = list_launches([1] * 200 + [64] + [1] * 55, [64] * 256, (16, 8, 128))
    assert [grid for _, grid in launches] == [(5 * 8, 1, 1), (8, 256, 1)]


@pytest.mark.parametrize("head_dim, tokens", [(128, [128, 64]), (80, [64, 64])])
def test_few_decodes_read_more_tokens_at_once(list_launches, head_dim, tokens):
    """They are one or two sequences of a model with 8 KV heads."""
    launches = [list_launches([1] * n, [64] * n, (16, 8, head_dim)) for n in (1, 32)]
    assert [constants["N"] for [(constants, _)] in launches] == tokens


@pytest.mark.parametrize("context_len", [1000, 32_000])
def test_decodes_split_only_the_window(list_launches, context_len):
    """Also in a CUDA graph, which is captured for the longest contexts."""
    launches = list_launches([1, 1], [context_len, 40], (4, 1, 256), window=512)
    # Four splits, which are then combined.
    assert [grid for _, grid in launches] == [(1, 2, 4), (2, 4)]


@pytest.mark.parametrize("head_dim, width", [(16, 64), (20, 64), (128, 128), (130, 256)])
def test_16_bit_tiles_are_not_of_32(list_launches, head_dim, width):
    """Some releases of Triton fault with them on Hopper."""
    for query_lens in ([1], [1] * 40, [30]):
        launches = list_launches(query_lens, [300] * len(query_lens), (4, 2, head_dim))
        assert {constants["D"] for constants, _ in launches} == {width}
        assert launches[0][0]["N"] != 32


@pytest.fixture
def log_sums(monkeypatch):
    """A list of what combine_splits_kernel receives of each split."""
    found = []

    def record(kernel, grid, *args, **constants):
        if kernel is combine_splits_kernel:
            found.append(args[1].clone())
        kernel[grid](*args, **constants)

    replace_launches(monkeypatch, record)
    return found


def test_every_split_of_a_long_context_has_a_part_of_the_window(log_sums):
    """The sum of exponentials of an empty split is 0, and its logarithm -inf."""
    step = make_step(([1], [2048]), (4, 2, 64), 16, torch.float32, DEVICE, window=512)
    attend(triton_backend, *step, window=512)
    assert log_sums[0].shape == (1, 4, 4)
    assert log_sums[0].isfinite().all()


def test_only_long_contexts_are_split(monkeypatch, log_sums):
    """By each sequence's own length. The others write their output at once."""
    monkeypatch.setattr(triton_backend, "describe_gpu", lambda device: (9, 1))
    monkeypatch.setattr(triton_backend, "_PROGRAMS_PER_PROCESSOR", 1)
    monkeypatch.setattr(triton_backend, "_LONG_CONTEXT", 64)
    step = make_step(([1] * 3, [40, 500, 64]), (4, 2, 64), 16, torch.float32, DEVICE)
    compare_attention(triton_backend, *step)
    is_whole = log_sums[0][:, :, 0].isinf()
    assert is_whole.tolist() == [[True] * 4, [False] * 4, [True] * 4]


@pytest.mark.parametrize(
    "lengths, window",
    [
        (([5, 2, 3], [200, 40, 7]), None),
        (([1, 5, 1], [100, 180, 9]), None),
        (([24, 1], [230, 30]), 37),
        (([20, 9], [20, 9]), None),
        (([5, 1], [220, 100]), 70),
    ],
    ids=str,
)
def test_contexts_of_longer_queries_are_split(monkeypatch, lengths, window):
    """Beside decodes, whose rows are computed afterwards."""
    monkeypatch.setattr(triton_backend, "_LEAST_PREFILL_TOKENS", 32)
    splits = []

    def record(kernel, grid, *args, **constants):
        if kernel is attend_kernel and not constants["IS_DECODE"]:
            splits.append(grid[2])
        kernel[grid](*args, **constants)

    replace_launches(monkeypatch, record)
    step = make_step(lengths, (4, 2, 64), 16, torch.float32, DEVICE, window)
    compare_attention(triton_backend, *step, window)
    assert splits == [1 if lengths[1] == [20, 9] else min(8, cdiv(window or max(lengths[1]), 32))]


@pytest.mark.parametrize("window", [190, 260, 511])
def test_windows_begin_within_blocks_and_are_split(window):
    lengths = ([1] * 6, [189, 190, 261, 530, 777, 2048])
    step = make_step(lengths, (4, 2, 64), 16, torch.float32, DEVICE, window)
    compare_attention(triton_backend, *step, window)


@pytest.mark.parametrize("window", [1, 20, 100, 300])
def test_windows_of_some_rows_begin_after_a_tile(window):
    """A tile of 16-bit numbers has 128 queries and 64 tokens of the context."""
    lengths = ([130, 1, 300], [1000, 1, 300])
    step = make_step(lengths, (2, 2, 64), 16, torch.float16, DEVICE, window)
    compare_attention(triton_backend, *step, window)


@pytest.mark.parametrize("head_dim, block_size", [(64, 4), (64, 48), (10, 16), (257, 16)])
def test_unsupported_sizes_are_rejected(head_dim, block_size):
    shape = make_shape(head_dim=head_dim)
    reason = triton_backend.reason_unavailable(DEVICE, torch.float16, shape, block_size)
    assert ("kvcache_block_size" if block_size != 16 else "head_dim") in reason
