"""Every registered attention backend matches the torch backend, which matches plain softmax.

A backend that is registered in kernels/select.py is tested here without a change to this file.
All slots that no context covers hold NaN, so that a read out of bounds shows. Without a GPU,
Triton's kernels run in its interpreter. That cannot multiply bfloat16, which is left out.
"""

from dataclasses import fields
from types import SimpleNamespace
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    DEVICE,
    DRAWN_BATCH,
    cover_pairs,
    find_obstacle,
    generate_ids,
    greedy,
    load_backend,
    make_batch,
    make_shape,
)
from kernel_helpers import (
    BATCHES,
    CPU,
    DTYPES,
    SCALE,
    ShapeWithNewField,
    all_dtypes,
    attend,
    compare_attention,
    make_step,
    needs_compiler,
)

from nanovllm.batch import batch as batches
from nanovllm.config import Config
from nanovllm.kernels.cpu import attention as cpp_backend
from nanovllm.kernels.select import BACKENDS, select_backend
from nanovllm.kernels.self_tests import BatchShape, check_backend, compare_with_torch
from nanovllm.layers import attention as torch_backend
from nanovllm.layers.attention import AttentionShape, find_first_visible, make_cache
from nanovllm.utils.helpers import report_once

# num_heads, num_kv_heads, head_dim
HEADS = [(8, 1, 16), (14, 2, 64), (6, 2, 80), (4, 2, 128), (2, 2, 256), (3, 1, 10)]
BLOCK_SIZES = [2, 16, 48, 256]
WINDOWS = [None, 1, 20, 256]


def find_test_device(name):
    """The GPU if there is one and the backend runs on it, else the CPU, or None."""
    for device in (DEVICE, CPU):
        if any(find_obstacle(name, device, dtype) is None for dtype in DTYPES):
            return device
    return None


TEST_DEVICES = {name: find_test_device(name) for name in BACKENDS}


def list_cases(name):
    """The test cases of a backend: a covering array of what it supports, for each dtype.

    Triton's interpreter is slow, and gets one covering array in which the dtypes alternate.
    """
    device = TEST_DEVICES[name]
    if device is None:
        reason = f"{name}: {find_obstacle(name, DEVICE, torch.float16)}"
        return [pytest.param(name, *[None] * 5, marks=pytest.mark.skip(reason=reason))]

    def allowed(dtype, _, heads, block_size, window):
        return find_obstacle(name, device, dtype, heads[-1], block_size, window) is None

    groups = [[dtype] for dtype in DTYPES]
    if device == CPU and "cpu" not in BACKENDS[name].device_types:  # interpreted
        groups = [[torch.float16, torch.float32]]
    cases = []
    for dtypes in groups:
        covering = cover_pairs(dtypes, BATCHES, HEADS, BLOCK_SIZES, WINDOWS, allowed=allowed)
        cases += [(name, *case) for case in covering]
    return cases


@pytest.mark.parametrize(
    "name, dtype, batch_name, heads, block_size, window",
    [case for name in BACKENDS for case in list_cases(name)],
    ids=str,
)
def test_backend_matches_the_torch_backend(name, dtype, batch_name, heads, block_size, window):
    # flash-attn reads whole tiles, which begin before a window but in the same block.
    fills_blocks = name == "flash_attn"
    step = make_step(
        BATCHES[batch_name], heads, block_size, dtype, TEST_DEVICES[name], window, fills_blocks
    )
    compare_attention(load_backend(name), *step, window)


def test_the_option_has_the_names_of_all_backends():
    names = get_args(get_type_hints(Config)["attention_backend"])
    assert sorted(names) == sorted(["auto", *BACKENDS])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("value", [None, 50.0])
def test_no_backend_ignores_a_new_field(capfd, name, value):
    """With its default the field has no effect. Plain torch specifies what it means otherwise."""
    device = TEST_DEVICES[name]
    if device is None:
        pytest.skip(find_obstacle(name, DEVICE, torch.float16))
    dtype = next(each for each in DTYPES if find_obstacle(name, device, each) is None)
    plain = make_shape(4, 2, 16)
    shape = ShapeWithNewField(*vars(plain).values(), new_field=value)
    engine = (device, dtype, [plain, shape], None)
    problem = f"attention_backend='{name}' cannot run here: it does not support new_field=50.0"
    if value is not None and name != "torch":
        with pytest.raises(ValueError, match=problem):
            select_backend(name, *engine)
        if device.type in BACKENDS[name].device_types:
            report_once.cache_clear()
            assert select_backend("auto", *engine)[0] is torch_backend
            assert problem in capfd.readouterr().err
        return
    backend, block_size = select_backend(name, *engine)
    assert backend is load_backend(name)
    step = make_step(([3, 1], [9, 20]), (4, 2, 16), block_size, dtype, device)
    torch.testing.assert_close(backend.attend(*step, shape), backend.attend(*step, plain))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("field", [{"softcap": 2.0}, {"has_sinks": True}])
@pytest.mark.parametrize("name", BACKENDS)
def test_soft_caps_and_sinks(name, field, window):
    """Of one decode, whose context is split, of several decodes, and of a chunk."""
    device = TEST_DEVICES[name]
    if device is None:
        pytest.skip(find_obstacle(name, DEVICE, torch.float16))
    backend = load_backend(name)
    known = backend.KNOWN_FIELDS
    if known is not None and not field.keys() <= known:
        pytest.skip(f"{name} does not support {field}")
    shape = AttentionShape(4, 2, 16, scale=0.5, window=window, **field)
    for batch_shape in (
        BatchShape(1, 300, 1, 16),
        BatchShape(3, 60, 1, 16),
        BatchShape(2, 60, 33, 16),
    ):
        compare_with_torch(backend, shape, batch_shape, device, torch.float32, tolerance=1e-4)


def test_backends_know_only_fields_that_layers_have():
    names = {field.name for field in fields(AttentionShape)}
    for name, device in TEST_DEVICES.items():
        if device is not None and name != "torch":
            assert load_backend(name).KNOWN_FIELDS <= names


def attend_by_definition(query, kv_cache, batch, shape, sinks=None):
    """Attention in float64, one sequence at a time. NaN that no query attends to is replaced."""
    block_size, num_kv_heads = kv_cache.shape[2:4]
    group_size = query.shape[1] // num_kv_heads
    outputs = []
    queries = query.double().split(batch.cu_seqlens_q.diff().tolist())
    kv_cache = kv_cache.double().nan_to_num()
    for query, context_len, table in zip(queries, batch.context_lens, batch.block_tables.long()):
        positions = torch.arange(context_len)
        context = kv_cache[:, table[positions // block_size], positions % block_size]
        keys, values = context.repeat_interleave(group_size, dim=2)  # of each query head
        scores = torch.einsum("qhd,khd->hqk", query, keys) * shape.scale
        if shape.softcap is not None:
            scores = torch.tanh(scores / shape.softcap) * shape.softcap
        query_positions = positions[context_len - len(query) :, None]
        distances = query_positions - positions
        is_visible = (distances >= 0) & (distances < (shape.window or context_len))
        weights = scores.masked_fill(~is_visible, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total += sinks.double().exp()[:, None, None]
        outputs.append(torch.einsum("hqk,khd->qhd", weights / total, values))
    return torch.cat(outputs)


def compare_with_definition(lengths, heads, block_size, shape):
    """Compare the torch backend. No entry of a block table past the end of a context is read."""
    arguments = (lengths, heads, block_size, torch.float32)
    query, kv_cache, batch = make_step(*arguments, DEVICE, shape.window)
    starts = torch.arange(batch.block_tables.shape[1], device=DEVICE) * block_size
    batch.block_tables[starts >= batch.context_lens[:, None]] = 10**6
    sinks = torch.linspace(-1, 1, heads[0]) if shape.has_sinks else None
    on_device = None if sinks is None else sinks.to(DEVICE)
    output = torch_backend.attend(query, kv_cache, batch, shape, on_device)
    expected = attend_by_definition(*make_step(*arguments, CPU, shape.window), shape, sinks)
    torch.testing.assert_close(output.double().cpu(), expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("heads, block_size", [((6, 2, 80), 16), ((3, 1, 10), 48)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 2, 20, 256])
def test_torch_backend_matches_softmax(monkeypatch, lengths, heads, block_size, window):
    monkeypatch.setattr(torch_backend, "TILE", 30)  # less than the longest queries
    compare_with_definition(lengths, heads, block_size, make_shape(*heads, SCALE, window))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("field", [{"softcap": 0.5}, {"has_sinks": True}], ids=str)
def test_torch_backend_caps_scores_and_adds_sinks(field, window):
    shape = AttentionShape(4, 2, 16, SCALE, window=window, **field)
    compare_with_definition(([1, 40, 7], [17, 41, 7]), (4, 2, 16), 16, shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("field", [{}, {"softcap": 0.5}], ids=str)
def test_torch_backend_returns_the_dtype_of_the_query(dtype, field):
    query, kv_cache, batch = make_step(([1, 40], [17, 41]), (4, 2, 16), 16, dtype)
    shape = AttentionShape(4, 2, 16, SCALE, **field)
    output = torch_backend.attend(query, kv_cache, batch, shape)
    assert output.dtype == dtype
    expected = attend_by_definition(query, kv_cache, batch, shape)
    torch.testing.assert_close(output.double(), expected, atol=0.02, rtol=0.02)


def test_a_rank_has_some_of_the_heads_of_a_shape():
    query, kv_cache, batch = make_step(([1, 3], [17, 9]), (2, 1, 16), 16, torch.float32)
    expected = torch_backend.attend(query, kv_cache, batch, make_shape(2, 1, 16))
    assert torch.equal(torch_backend.attend(query, kv_cache, batch, make_shape(4, 2, 16)), expected)


@pytest.mark.parametrize("tables", [[[5, 2], [5, 3]], [[5, 2], [6, 2]], [[5, 2], [5, 2]]], ids=str)
def test_sequences_can_share_some_of_their_blocks(tables):
    torch.manual_seed(0)
    kv_cache = torch.randn(2, 8, 4, 2, 16)
    query = torch.randn(2, 4, 16)
    batch = make_batch([1, 1], [6, 6], torch.tensor(tables, dtype=torch.int32))
    shape = make_shape(4, 2, 16)
    expected = attend_by_definition(query, kv_cache, batch, shape)
    output = torch_backend.attend(query, kv_cache, batch, shape)
    torch.testing.assert_close(output.double(), expected, atol=5e-6, rtol=0)


def test_torch_backend_holds_one_tile_of_the_mask(monkeypatch):
    sizes = []
    compute = F.scaled_dot_product_attention

    def record(*args, attn_mask, **options):
        sizes.append(attn_mask.numel())
        return compute(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    monkeypatch.setattr(torch_backend, "TILE", 40)
    attend(torch_backend, *make_step(([500], [500]), (4, 2, 16), 16, torch.float32))
    assert max(sizes) <= 40 * 500


@pytest.mark.parametrize("name", [name for name, device in TEST_DEVICES.items() if device])
@pytest.mark.parametrize(
    "dtype, num_kv_heads, head_dim",
    [(torch.float32, 3, 80), (torch.bfloat16, 1, 10), (torch.float16, 8, 256)],
    ids=str,
)
def test_store_kvcache_writes_its_slots_and_no_others(name, dtype, num_kv_heads, head_dim):
    device = TEST_DEVICES[name]
    obstacle = find_obstacle(name, device, dtype)
    if obstacle is not None:
        pytest.skip(obstacle)
    # Rows with gaps, as in the output of a merged projection.
    merged = torch.randn(6, 3, num_kv_heads, head_dim, device=device).to(dtype)
    _, key, value = merged.unbind(1)
    slots = torch.tensor([3, -1, 63, 0, 20, -1], dtype=torch.int32, device=device)
    # The keys and values of 64 slots, behind memory that a write to slot -1 would hit.
    buffer_shape = (3, 4, 16, num_kv_heads, head_dim)
    buffer = torch.full(buffer_shape, torch.nan, dtype=dtype, device=device)
    expected = buffer.clone().flatten(1, 2)
    written = slots >= 0
    expected[1, slots[written].long()] = key[written]
    expected[2, slots[written].long()] = value[written]
    load_backend(name).store_kvcache(key, value, buffer[1:], slots)
    exact = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(buffer.flatten(1, 2), expected, **exact)


@needs_compiler
@pytest.mark.parametrize(
    "dtype, heads, window",
    cover_pairs(DTYPES, [(4, 2, 64), (4, 1, 256), (3, 1, 10)], [None, 1, 20, 190, 256, 260]),
    ids=str,
)
def test_short_queries_are_bitwise_identical_to_decodes(dtype, heads, window):
    lengths = ([8, 3, 5], [530, 1025, 257])
    query, kv_cache, batch = make_step(lengths, heads, 16, dtype, window=window)
    output = attend(cpp_backend, query, kv_cache, batch, window)
    rows = torch.arange(3).repeat_interleave(torch.tensor(lengths[0]))
    context_lens = [*range(523, 531), *range(1023, 1026), *range(253, 258)]
    decodes = make_batch([1] * len(rows), context_lens, batch.block_tables[rows])
    assert torch.equal(attend(cpp_backend, query, kv_cache, decodes, window), output)


@needs_compiler
@all_dtypes
@pytest.mark.parametrize(
    "lengths", [([1, 1, 1], [700, 3, 300]), ([9, 40], [700, 40])], ids=["decode", "prefill"]
)
def test_cpp_backend_survives_extreme_scores(lengths, dtype):
    tolerance = {torch.float32: 2e-3, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    query, kv_cache, batch = make_step(lengths, (4, 2, 64), 16, dtype)
    large = query * 1e4
    output = compare_attention(cpp_backend, large, kv_cache, batch, tolerance=tolerance)

    large[0] = torch.nan
    with_nan = attend(cpp_backend, large, kv_cache, batch)
    assert with_nan[0].isnan().all()
    assert torch.equal(with_nan[1:], output[1:])

    two_splits = batch.block_tables[0, : 512 // 16].long()
    kv_cache[0, two_splits] = torch.finfo(dtype).min / 4
    query = query.abs() * 1e4
    output = compare_attention(cpp_backend, query, kv_cache, batch, tolerance=tolerance)
    assert output.isfinite().all()


def test_only_a_backend_knows_the_layout_of_its_cache(tiny, make_llm, monkeypatch):
    """The engine and the self-test work with caches in which each token has its key and value."""

    def make_cache(*args):
        return torch_backend.make_cache(*args).movedim(0, 2).contiguous()

    def store_kvcache(key, value, kv_cache, slot_mapping):
        torch_backend.store_kvcache(key, value, kv_cache.movedim(2, 0), slot_mapping)

    def attend(query, kv_cache, batch, shape):
        return torch_backend.attend(query, kv_cache.movedim(2, 0), batch, shape)

    own = {"make_cache": make_cache, "store_kvcache": store_kvcache, "attend": attend}
    backend = SimpleNamespace(**{**vars(torch_backend), **own})
    check_backend(backend, CPU, torch.float32, make_shape(head_dim=16), 8)
    monkeypatch.setattr("nanovllm.worker.worker.attention", backend)
    llm = make_llm(device="cpu", enable_kernels=False)
    assert llm.executor.worker.kv_caches[0].shape[2] == 2
    assert generate_ids(llm, [[1, 2, 3]], greedy(9)) == [tiny[1]([1, 2, 3], 9)]


def test_a_window_begins_where_its_first_token_is():
    assert [find_first_visible(position, 3) for position in range(5)] == [0, 0, 0, 1, 2]
    assert find_first_visible(4, None) == 0


def test_block_0_of_a_new_cache_is_zeros(monkeypatch):
    def fill(*shape, **options):
        return torch.full(shape if isinstance(shape[0], int) else shape[0], 7, **options)

    monkeypatch.setattr(torch, "empty", fill)
    for block_size in (16, 2 * torch_backend.ZEROED_TOKENS):
        cache = make_cache(2, block_size, 1, 4, torch.float32, CPU)
        assert not cache[:, 0].any()


def test_a_batch_without_sequences_is_as_drawn():
    tables = torch.tensor([[5, 0], [2, 6], [1, 9]], dtype=torch.int32)
    batch = batches.make_batch([3, 1, 2], [3, 8, 6], tables.numpy(), 4)
    expected = dict(
        DRAWN_BATCH,
        input_ids=[0] * 6,
        block_tables=tables.tolist(),
        read_slots=[0, 0, 0],
        write_slots=[0, 0, 0],
    )
    for name, value in vars(batch).items():
        assert torch.as_tensor(value).tolist() == expected[name], name
        assert isinstance(value, int) or value.dtype == "int32", name


def test_a_table_can_be_wider_than_the_longest_context():
    batch = batches.make_batch([1, 1], [2, 2], np.array([[5, 7], [3, 9]], np.int32), 4)
    assert batch.slot_mapping.tolist() == [21, 13]


@pytest.mark.parametrize(
    "num_logits, expected",
    [([3, 1, 0], [0, 1, 2, 3]), ([0, 1, 2], [3, 4, 5]), ([2, 0, 1], [1, 2, 5])],
)
def test_the_last_tokens_of_each_sequence_have_logits(num_logits, expected):
    """All tokens of a decode with a draft have them, and none of a chunk."""
    tables = np.array([[5, 0], [2, 6], [1, 9]], np.int32)
    ids = [~0, 5, 6, ~1, 7, 8]  # pending tokens are stored, too
    batch = batches.make_batch([3, 1, 2], [8, 8, 6], tables, 4, ids, num_logits)
    assert batch.input_ids.tolist() == ids
    assert batch.logits_indices.tolist() == expected
    assert batch.long_queries.tolist() == [0, 2]
    assert batch.slot_mapping.tolist() == [1, 2, 3, 27, 36, 37]
