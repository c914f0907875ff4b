"""What models with one RoPE, one pool of blocks and one rank do not show of a decoder's parts."""

from types import SimpleNamespace

import torch
from conftest import make_shape
from torch import nn

from nanovllm.layers.norm import RMSNorm, ZeroCenteredRMSNorm
from nanovllm.layers.rotary import RopeSpec, RotaryEmbedding, apply_rotary
from nanovllm.layers.tensor_parallel import ALONE
from nanovllm.models.decoder import MLP, Attention, Decoder, DecoderLayers


def make(module_class, **fields):
    """Make a module with these fields only."""
    module = module_class.__new__(module_class)
    nn.Module.__init__(module)
    for name, value in fields.items():
        setattr(module, name, value)
    return module


def rotate_by(angle):
    return torch.full((3, 1, 2), angle).cos(), torch.full((3, 1, 2), angle).sin()


def test_a_layer_has_its_own_rope_and_its_own_pool_of_blocks():
    calls = []
    backend = SimpleNamespace(
        store_kvcache=lambda key, value, cache, slots: calls.append((key, value, slots)),
        attend=lambda query, cache, batch, shape: calls.append((query, batch)),
    )
    for_windows = SimpleNamespace(slot_mapping="slots of windows")
    batch = SimpleNamespace(slot_mapping="slots", for_windows=for_windows)
    query, key, value = torch.randn(3, 3, 2, 4).unbind()
    for window, own_batch in ((None, batch), (4, for_windows)):
        shape = make_shape(2, 2, 4, window=window)
        layer = make(
            Attention, rope_index=1, q_norm=None, k_norm=None, backend=backend, shape=shape
        )
        calls.clear()
        layer.attend(query, key, value, [rotate_by(0.3), rotate_by(0.5)], None, batch)
        (stored_key, stored_value, slots), (rotated_query, read_batch) = calls
        assert torch.equal(stored_key, apply_rotary(key, *rotate_by(0.5)))
        assert torch.equal(rotated_query, apply_rotary(query, *rotate_by(0.5)))
        assert torch.equal(stored_value, value)
        assert slots == own_batch.slot_mapping
        assert read_batch is own_batch


def test_a_rank_has_a_part_of_the_heads():
    """Here one of two, whose K/V it stores."""
    parts = []
    layer = make(
        Attention,
        shape=make_shape(num_heads=4, num_kv_heads=2, head_dim=3),
        num_vectors=[2, 1, 1],
        qkv_proj=nn.Identity(),
        o_proj=nn.Identity(),
    )
    layer.attend = lambda *arguments: parts.append(arguments[:3]) or arguments[0]
    output = layer(torch.arange(24.0).view(2, 12), [], None, None)
    ((query, key, value),) = parts
    assert output.tolist() == [[0, 1, 2, 3, 4, 5], [12, 13, 14, 15, 16, 17]]
    assert (key[0].tolist(), value[0].tolist()) == ([[6, 7, 8]], [[9, 10, 11]])
    assert query.shape == (2, 2, 3)


def test_heads_are_normalized_before_they_are_rotated():
    norm = RMSNorm(4, 1e-6, torch.float32)
    norm.weight.data = torch.arange(1.0, 5.0)
    layer = make(Attention)
    heads = torch.randn(3, 2, 4)
    rotated = layer.norm_and_rotate(heads, norm, rotate_by(0.7))
    assert torch.equal(rotated, apply_rotary(norm(heads), *rotate_by(0.7)))


def test_each_kind_of_norm_is_used_as_a_whole():
    norm = ZeroCenteredRMSNorm(4, 1e-6, torch.float32)
    norm.weight.data.zero_()
    normalized = make(Attention).norm_and_rotate(torch.ones(3, 2, 4), norm, rotate_by(0.0))
    torch.testing.assert_close(normalized, torch.ones(3, 2, 4))


def test_an_mlp_computes_in_the_dtype_of_the_model():
    mlp = MLP(8, 16, False, torch.bfloat16, ALONE)
    for parameter in mlp.parameters():
        parameter.data.fill_(0.1)
    assert mlp(torch.ones(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_all_layers_compute_a_step_without_rows():
    """A chunk has no row of logits, and its K/V are needed."""
    computed = []
    layers = DecoderLayers([nn.Identity(), nn.Identity()])
    for layer in layers:
        layer.forward = lambda x, cos_sins, kv_cache, batch: computed.append(kv_cache) or x
    batch = SimpleNamespace(logits_indices=torch.tensor([], dtype=torch.int32))
    assert layers(torch.zeros(3, 4), [], ["first", "second"], batch).shape == (0, 4)
    assert computed == ["first", "second"]


def test_wanted_rows_need_not_be_the_last_ones():
    """A draft of two tokens has two rows, and a chunk beside it has none."""
    batch = SimpleNamespace(
        logits_indices=torch.tensor([0, 1], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 2, 5], dtype=torch.int32),
        context_lens=torch.tensor([2, 3], dtype=torch.int32),
    )
    x = torch.arange(5.0)[:, None]
    assert DecoderLayers()(x, [], [], batch).tolist() == [[0], [1]]


def test_a_decoder_scales_embeddings_and_computes_each_rope_in_float32():
    seen = []
    ropes = [RopeSpec.from_base(theta, head_dim=4) for theta in (10.0, 1000.0)]
    decoder = make(
        Decoder,
        embed_tokens=nn.Embedding(8, 4, dtype=torch.bfloat16),
        embedding_scale=3.0,
        rotaries=nn.ModuleList(map(RotaryEmbedding, ropes)),
        norm=nn.Identity(),
    )
    decoder.layers = lambda x, cos_sins, kv_caches, batch: seen.append(cos_sins) or x
    batch = SimpleNamespace(input_ids=torch.tensor([5, 2]), positions=torch.tensor([7, 300]))
    with torch.no_grad():
        hidden = decoder(batch, [])
    assert torch.equal(hidden, decoder.embed_tokens(batch.input_ids) * 3)
    (cos_sins,) = seen
    for (cos, sin), rope in zip(cos_sins, ropes, strict=True):
        angles = batch.positions[:, None, None] * torch.tensor(rope.inv_freq)
        torch.testing.assert_close(cos, angles.cos())
        torch.testing.assert_close(sin, angles.sin())
