"""The gated delta rule in C++ computes the same as the plain layer, alone or beside others."""

import pytest
import torch
from kernel_helpers import (
    all_dtypes,
    make_delta_rule,
    make_delta_step,
    make_spec,
    needs_compiler,
    optimize,
    quantize,
    randomize,
)

from nanovllm.kernels.cpu.gated_delta import FastDeltaLayer
from nanovllm.kernels.cpu.linear import FastRowParallelLinear
from nanovllm.layers.gated_delta import DeltaInputs
from nanovllm.layers.quantized import INT8
from nanovllm.layers.tensor_parallel import ALONE, TensorParallel
from nanovllm.models.qwen3_5 import DeltaLayer, Qwen35Spec

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def inference_mode():
    with torch.inference_mode():
        yield


@pytest.fixture
def fast():
    return optimize(make_delta_rule((2, 4, 16, 24)), "cpp")


def test_slots_that_are_not_written_stay_and_several_sequences_can_read_one(fast):
    """Slot 1 stands for the state of zeros, in which three sequences begin."""
    lengths = [1, 3, 70, 1]
    slots = dict(read_slots=[1, 1, 1, 5], write_slots=[2, 7, 4, 5])
    inputs, states, batch = make_delta_step(fast, lengths, **slots)
    states[1] = 0
    before = states.clone()
    output = fast(inputs, states, batch)
    untouched = [0, 1, 3, 6]
    assert torch.equal(states[untouched], before[untouched])
    expected = before.clone()
    plain = make_delta_rule((2, 4, 16, 24))
    torch.testing.assert_close(output, plain(inputs, expected, batch), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-5)


@all_dtypes
def test_a_sequence_does_not_depend_on_others_nor_on_its_chunks(dtype):
    """Bitwise, so that neither batching nor drafts nor preemptions change a token."""
    fast = optimize(make_delta_rule((2, 4, 16, 24), dtype), "cpp", dtype)
    lengths = [1, 200, 2, 65]
    inputs, states, batch = make_delta_step(fast, lengths)
    start = states.clone()
    output = fast(inputs, states, batch)
    bounds = batch.cu_seqlens_q.tolist()
    for seq, chunks in enumerate([[1], [1, 2, 3, 65, 64, 65], [1, 1], [65]]):
        state = start[seq : seq + 1].clone()
        first = bounds[seq]
        for size in chunks:
            _, _, alone = make_delta_step(fast, [size], [0], [0])
            tokens = slice(first, first + size)
            part = fast(DeltaInputs(*[each[tokens] for each in inputs]), state, alone)
            assert torch.equal(part, output[tokens])
            first += size
        assert torch.equal(state[0], states[batch.write_slots[seq]])


def test_nan_stays_in_its_sequence(fast):
    """NaN of a token, of a state, and of a window."""
    lengths = [1, 70, 1, 3, 1]
    inputs, states, batch = make_delta_step(fast, lengths)
    expected = fast(inputs, states.clone(), batch)
    inputs[0][5] = torch.nan
    states[2, 0] = torch.nan
    states[4, -1] = torch.nan
    output = fast(inputs, states, batch)
    of_clean = [0, 72, 73, 74]
    assert torch.equal(output[of_clean], expected[of_clean])
    assert output[5:71].isnan().any(-1).all()
    assert output[[71, 75]].isnan().any(-1).all()
    clean = batch.write_slots[[0, 3]].tolist()
    assert not states[clean].isnan().any()


def test_extreme_gates_and_decays_match_the_plain_layer(fast):
    """A decay of 0 forgets everything, and one of 1 nothing."""
    inputs, states, batch = make_delta_step(fast, [6, 1])
    extremes = torch.tensor([-1e30, -100.0, 0.0, 19.9, 20.1, 1e30, 88.0])[:, None]
    inputs.beta[:] = extremes.flip(0)
    inputs.decay[:] = extremes
    inputs.gate[:] = extremes.clamp(-100, 100)
    expected = states.clone()
    plain = make_delta_rule((2, 4, 16, 24))
    output = plain(inputs, expected, batch)
    torch.testing.assert_close(fast(inputs, states, batch), output)
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-5)


def make_delta_layer(dtype=torch.float32, tp=ALONE, key_dim=16):
    """Make a plain layer, always with the same weights."""
    sizes = dict(num_key_heads=2, num_value_heads=4, key_dim=key_dim, value_dim=24, conv_size=4)
    spec = Qwen35Spec(**vars(make_spec(dtype)), layer_types=["linear_attention"], **sizes)
    return randomize(DeltaLayer(spec, 0, tp))


@all_dtypes
@pytest.mark.parametrize("scheme", [None, INT8], ids=str)
@pytest.mark.parametrize("lengths", [[1], [1, 200, 2, 65]], ids=str)
def test_a_layer_in_one_call_matches_the_plain_layer(lengths, scheme, dtype):
    layers = [make_delta_layer(dtype), make_delta_layer(dtype)]
    if scheme is not None:
        layers = [quantize(layer, scheme) for layer in layers]
    plain, fast = layers[0], optimize(layers[1], "cpp", dtype)
    assert type(fast) is FastDeltaLayer
    _, states, batch = make_delta_step(plain.linear_attn.delta_rule, lengths)
    x = torch.randn(sum(lengths), 32).to(dtype)
    expected_states = states.clone()
    expected = plain(x, None, expected_states, batch)
    before = torch.get_num_threads()
    for num_threads in (1, 2):
        new_states = states.clone()
        torch.set_num_threads(num_threads)
        output = fast(x.clone(), None, new_states, batch)
        torch.set_num_threads(before)
        limit = 1e-5 if dtype == torch.float32 and scheme is None else 0.02
        for each, wanted in ((output, expected), (new_states, expected_states)):
            assert (each - wanted).float().norm() < limit * wanted.float().norm()


@pytest.mark.parametrize("changes", [dict(tp=TensorParallel(0, 2)), dict(key_dim=15)], ids=str)
def test_other_layers_are_left_to_the_plain_layer(changes):
    """Ranks reduce the outputs of projections, and the kernel needs an even key_dim."""
    layer = optimize(make_delta_layer(**changes), "cpp")
    assert type(layer) is DeltaLayer
    assert type(layer.mlp.down_proj) is FastRowParallelLinear
