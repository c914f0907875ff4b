"""The gated delta rule in Triton computes the same as the plain layer it replaces."""

from dataclasses import replace

import pytest
import torch
from conftest import DEVICE, ON_GPU
from kernel_helpers import make_delta_rule, make_delta_step, needs_triton, optimize

from nanovllm.layers.gated_delta import DeltaInputs

pytestmark = needs_triton
TOLERANCE = {torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SHAPES = {  # key heads, value heads, key_dim, value_dim, taps
    "powers of two": ((2, 2, 16, 32), 4),
    "two value heads per key head": ((2, 4, 20, 24), 4),
    "three, small": ((1, 3, 5, 7), 2),
}
# Dtype, query lengths, slots that are read, slots that are written. float32 has no chunks.
STEPS = {
    "decodes": (torch.float32, [1, 1, 1], [2, 1, 4], [3, 5, 4]),
    "decodes, bfloat16": (torch.bfloat16, [1, 1], [2, 4], [3, 4]),
    "mixed": (torch.float32, [3, 1, 2], [2, 1, 1], [2, 5, 6]),
    "chunks of one sequence": (torch.float16, [65], [1], [3]),
    "chunks beside decodes": (torch.float16, [33, 1, 2, 1, 3], [1, 1, 2, 4, 5], [6, 7, 2, 4, 5]),
}


@pytest.mark.parametrize("dtype, query_lens, read_slots, write_slots", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("shape, conv_size", SHAPES.values(), ids=SHAPES)
def test_steps_match_the_plain_layer(shape, conv_size, dtype, query_lens, read_slots, write_slots):
    layer = make_delta_rule(shape, dtype, conv_size).to(DEVICE)
    inputs, states, batch = make_delta_step(layer, query_lens, read_slots, write_slots)
    expected_states = states.clone()
    expected = layer(inputs, expected_states, batch)
    optimize(layer, "triton", dtype)
    output = layer(inputs, states, batch)
    limit = TOLERANCE[dtype]
    state_limit = 5e-5
    if ON_GPU and dtype == torch.float16:  # chunks are computed in tf32, which has 11 bits
        limit *= 10
        state_limit = 5e-3
    assert output.dtype == dtype
    torch.testing.assert_close(output, expected, atol=limit, rtol=limit)
    torch.testing.assert_close(states, expected_states, atol=state_limit, rtol=state_limit)


@pytest.mark.parametrize("query_lens", [[1, 1], [33, 1, 40], [65]], ids=str)
def test_padding_of_a_cuda_graph_is_harmless(query_lens):
    """Padding sequences have no tokens, and leave all states as they are."""
    dtype = torch.float16
    num_seqs = len(query_lens)
    lengths = [*query_lens, 7]  # the last tokens become padding
    layer = optimize(make_delta_rule((2, 4, 20, 24), dtype).to(DEVICE), "triton", dtype)
    inputs, states, batch = make_delta_step(layer, lengths)
    end = batch.cu_seqlens_q[num_seqs]
    unpadded = replace(
        batch,
        cu_seqlens_q=batch.cu_seqlens_q[:-1],
        read_slots=batch.read_slots[:-1],
        write_slots=batch.write_slots[:-1],
        long_queries=batch.long_queries[:-1],
        max_seqlen_q=max(query_lens),
    )
    expected_states = states.clone()
    expected = layer(DeltaInputs(*[each[:end] for each in inputs]), expected_states, unpadded)
    batch.cu_seqlens_q[num_seqs + 1] = end
    if max(query_lens) == 1:
        batch = replace(batch, long_queries=batch.long_queries[:0], max_seqlen_q=1)
    output = layer(inputs, states, batch)
    assert torch.equal(output[:end], expected)
    assert torch.equal(states, expected_states)
