"""The kernels of the gated delta rule in Triton.

Chunks of C tokens are computed together. Their triangular system (layers/gated_delta.py) has the
solution u = T beta (v - (decayed k) S), where T is the inverse of a triangular matrix. A program of
the first kernel prepares one chunk of one value head, which does not depend on S:

    w = T beta (decayed k)    x = T beta v    scores = (q k^T) * decay between the two tokens

A program of the second kernel takes one value head of a sequence through all of its chunks:

    u = x - w S    output = (decayed q) S + scores u    S = decay S + (k decayed to the end)^T u

Between the two there are float32 tensors, with a row for each token and head (K and V are key_dim
and value_dim, rounded up):

    query    [num_tokens, num_heads, K]    decayed from the start of the chunk
    key      [num_tokens, num_heads, K]    decayed to its end
    w, x     [num_tokens, num_heads, K or V]
    scores   [num_tokens, num_heads, C]    with the tokens of the chunk
    decay    [num_tokens, num_heads]       since the start of the chunk

S stays in registers. It is transposed, because matrix instructions take only their left operand
from there. A decode is a chunk of one token, so that its products need no matrix instructions.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from nanovllm.kernels.cuda.attention_kernels import find_tile


# Slots and bounds can have any alignment in a packed batch.
@triton.jit(
    do_not_specialize=["num_seqs"],
    do_not_specialize_on_alignment=["read_slots_ptr", "cu_seqlens_ptr"],
)
def prepare_chunks_kernel(
    qkv_ptr,
    beta_ptr,
    decay_ptr,
    qkv_stride,
    beta_stride,
    decay_stride,
    conv_weight_ptr,
    A_log_ptr,
    dt_bias_ptr,
    windows_ptr,
    read_slots_ptr,
    cu_seqlens_ptr,
    query_ptr,
    key_ptr,
    w_ptr,
    x_ptr,
    scores_ptr,
    row_decay_ptr,
    num_seqs,
    NUM_HEADS: constexpr,
    GROUP: constexpr,
    KEY_DIM: constexpr,
    VALUE_DIM: constexpr,
    SIZE: constexpr,
    STATE: constexpr,
    TAPS: constexpr,
    K: constexpr,
    V: constexpr,
    CHUNK: constexpr,
):
    C: constexpr = CHUNK
    head = tl.program_id(0) % NUM_HEADS
    seq, chunk = find_tile(tl.program_id(0) // NUM_HEADS, cu_seqlens_ptr, None, num_seqs, C)
    start = tl.load(cu_seqlens_ptr + seq).to(tl.int64)
    num_tokens = tl.load(cu_seqlens_ptr + seq + 1) - start
    if chunk * C >= num_tokens:
        return
    rows = tl.arange(0, C)[:, None]
    columns = tl.arange(0, C)[None, :]
    keys = tl.arange(0, K)[None, :]
    values = tl.arange(0, V)[None, :]
    positions = chunk * C + rows  # in the sequence's part of the batch
    tokens = start + positions
    is_token = positions < num_tokens

    beta = tl.load(beta_ptr + tokens * beta_stride + head, mask=is_token, other=0.0)
    beta = tl.sigmoid(beta.to(tl.float32))
    decay = tl.load(decay_ptr + tokens * decay_stride + head, mask=is_token, other=0.0)
    decay = _softplus(decay.to(tl.float32) + tl.load(dt_bias_ptr + head))
    log_decay = tl.where(is_token, -tl.exp(tl.load(A_log_ptr + head)) * decay, 0.0)  # [C, 1]
    # A masked sum, because Triton 3.4 to 3.6 cannot compile tl.cumsum of a single column.
    until_here = tl.where(rows >= columns, tl.trans(log_decay), 0.0)
    since_start = tl.sum(until_here, axis=1, keep_dims=True)
    decay = tl.exp(since_start)
    to_end = tl.exp(tl.sum(log_decay, axis=0, keep_dims=True) - since_start)
    between = since_start - tl.trans(since_start)
    between = tl.exp(tl.where(rows >= columns, between, float("-inf")))
    token_heads = tokens * NUM_HEADS + head
    tl.store(row_decay_ptr + token_heads, decay, mask=is_token)

    KEY_SIZE: constexpr = NUM_HEADS // GROUP * KEY_DIM
    qkv_ptr += start * qkv_stride
    windows_ptr += tl.load(read_slots_ptr + seq).to(tl.int64) * STATE
    source = (qkv_ptr, qkv_stride, windows_ptr, SIZE, TAPS)
    channels = KEY_SIZE + head // GROUP * KEY_DIM + keys
    mask = is_token & (keys < KEY_DIM)
    key = _convolve(source, conv_weight_ptr, positions, channels, mask)
    key *= tl.rsqrt(tl.sum(key * key, axis=1, keep_dims=True) + 1e-6)
    tl.store(key_ptr + token_heads * K + keys, to_end * key, mask=is_token)
    transposed = tl.trans(key)
    system = _multiply(key, transposed) * between * beta
    inverse = tl.where(rows == columns, 1.0, 0.0)
    half = 1
    while half < C:
        is_part = (rows // half % 2 == 1) & (rows // half == columns // half + 1)
        part = tl.where(is_part, system, 0.0)
        part = _multiply(_multiply(inverse, part), inverse)
        inverse -= part
        half *= 2
    w = _multiply(inverse, beta * decay * key)
    tl.store(w_ptr + token_heads * K + keys, w, mask=is_token)

    query = _convolve(source, conv_weight_ptr, positions, channels - KEY_SIZE, mask)
    query *= tl.rsqrt(tl.sum(query * query, axis=1, keep_dims=True) + 1e-6) * KEY_DIM**-0.5
    tl.store(query_ptr + token_heads * K + keys, decay * query, mask=is_token)
    scores = _multiply(query, transposed) * between
    tl.store(scores_ptr + token_heads * C + columns, scores, mask=is_token)

    channels = 2 * KEY_SIZE + head * VALUE_DIM + values
    mask = is_token & (values < VALUE_DIM)
    value = _convolve(source, conv_weight_ptr, positions, channels, mask)
    x = _multiply(inverse, beta * value)
    tl.store(x_ptr + token_heads * V + values, x, mask=is_token)


@triton.jit(do_not_specialize_on_alignment=["read_slots_ptr", "write_slots_ptr", "cu_seqlens_ptr"])
def advance_states_kernel(
    query_ptr,
    key_ptr,
    w_ptr,
    x_ptr,
    scores_ptr,
    decay_ptr,
    qkv_ptr,
    gate_ptr,
    qkv_stride,
    gate_stride,
    norm_weight_ptr,
    norm_eps,
    states_ptr,
    windows_ptr,
    read_slots_ptr,
    write_slots_ptr,
    cu_seqlens_ptr,
    output_ptr,
    NUM_HEADS: constexpr,
    GROUP: constexpr,
    KEY_DIM: constexpr,
    VALUE_DIM: constexpr,
    SIZE: constexpr,
    STATE: constexpr,
    TAPS: constexpr,
    K: constexpr,
    V: constexpr,
    CHUNK: constexpr,
    C: constexpr,
):
    head = tl.program_id(0)
    seq = tl.program_id(1)
    start = tl.load(cu_seqlens_ptr + seq).to(tl.int64)
    num_tokens = tl.load(cu_seqlens_ptr + seq + 1) - start
    is_other = (tl.minimum(num_tokens, CHUNK) == 1) != (C == 1)
    if is_other | (num_tokens == 0):  # a padding sequence has no tokens
        return
    old = tl.load(read_slots_ptr + seq).to(tl.int64) * STATE
    new = tl.load(write_slots_ptr + seq).to(tl.int64) * STATE
    keys = tl.arange(0, K)[None, :]
    values = tl.arange(0, V)[None, :]
    columns = tl.arange(0, C)[None, :]
    is_value = values < VALUE_DIM
    is_state = (keys < KEY_DIM) & tl.trans(is_value)
    state_ptrs = states_ptr + (head * KEY_DIM + keys) * VALUE_DIM + tl.trans(values)
    state = tl.load(state_ptrs + old, mask=is_state, other=0.0)  # [V, K]
    norm_weight = tl.load(norm_weight_ptr + values, mask=is_value, other=0.0)
    for chunk in range(0, num_tokens, C):
        positions = chunk + tl.arange(0, C)[:, None]
        tokens = start + positions
        is_token = positions < num_tokens
        token_heads = tokens * NUM_HEADS + head
        query = tl.load(query_ptr + token_heads * K + keys, mask=is_token, other=0.0)
        key = tl.load(key_ptr + token_heads * K + keys, mask=is_token, other=0.0)
        w = tl.load(w_ptr + token_heads * K + keys, mask=is_token, other=0.0)
        x = tl.load(x_ptr + token_heads * V + values, mask=is_token, other=0.0)
        scores = tl.load(scores_ptr + token_heads * CHUNK + columns, mask=is_token, other=0.0)
        last = start + tl.minimum(chunk + C, num_tokens) - 1
        decay = tl.load(decay_ptr + last * NUM_HEADS + head)

        u = tl.trans(x) - _multiply(state, tl.trans(w))
        output = _multiply(state, tl.trans(query))
        output += _multiply(u, tl.trans(scores))
        output = tl.trans(output)
        state = decay * state + _multiply(u, key)

        squares = tl.sum(output * output, axis=1, keep_dims=True)
        output *= tl.rsqrt(squares / VALUE_DIM + norm_eps) * norm_weight
        mask = is_token & is_value
        offsets = head * VALUE_DIM + values
        gate = tl.load(gate_ptr + tokens * gate_stride + offsets, mask=mask, other=0.0)
        gate = gate.to(tl.float32)
        output *= gate * tl.sigmoid(gate)
        output_ptrs = output_ptr + tokens * (NUM_HEADS * VALUE_DIM) + offsets
        tl.store(output_ptrs, output.to(output_ptr.dtype.element_ty), mask=mask)
    tl.store(state_ptrs + new, state, mask=is_state)

    # The programs of a sequence share its window. No other program reads these channels.
    source = (qkv_ptr + start * qkv_stride, qkv_stride, windows_ptr + old, SIZE, TAPS)
    for first in range(head * K, SIZE, NUM_HEADS * K):
        channels = first + tl.arange(0, K)
        mask = channels < SIZE
        for i in tl.static_range(TAPS - 1):
            position = num_tokens - (TAPS - 1) + tl.full([1], i, dtype=tl.int64)
            numbers = _load_inputs(source, position, channels, mask)
            # Both slots can be the same, so a row is read by all threads before it is written.
            tl.debug_barrier()
            tl.store(windows_ptr + new + i * SIZE + channels, numbers, mask=mask)


@triton.jit
def _convolve(source, weight_ptr, positions, channels, mask):
    """Return the convolution at `positions` [C, 1] of channels [1, D], after SiLU."""
    _, _, _, SIZE, TAPS = source
    total = tl.zeros(mask.shape, dtype=tl.float32)
    for tap in range(TAPS):
        inputs = _load_inputs(source, positions - (TAPS - 1) + tap, channels, mask)
        weight = tl.load(weight_ptr + channels * TAPS + tap, mask=channels < SIZE, other=0.0)
        total += inputs * weight.to(tl.float32)
    return total * tl.sigmoid(total)


@triton.jit
def _load_inputs(source, positions, channels, mask):
    """Load the convolution's inputs. Those at negative positions are in the window."""
    qkv_ptr, qkv_stride, window_ptr, SIZE, TAPS = source
    new_ptrs = qkv_ptr + positions.to(tl.int64) * qkv_stride + channels
    new = tl.load(new_ptrs, mask=mask & (positions >= 0), other=0.0)
    old_ptrs = window_ptr + (positions + (TAPS - 1)) * SIZE + channels
    old = tl.load(old_ptrs, mask=mask & (positions < 0), other=0.0)
    return new.to(tl.float32) + old


@triton.jit
def _softplus(x):
    # log(1 + y) = y log(z) / (z - 1) with z = 1 + y, in which the rounding of z cancels out.
    y = tl.exp(-tl.abs(x))
    z = 1 + y
    return tl.maximum(x, 0.0) + tl.where(z == 1, y, tl.log(z) * (y / (z - 1)))


@triton.jit
def _multiply(x, y):
    """Return x [M, N] times y [N, P]. N or P can be 1, unlike in tl.dot.

    tf32 has the 11 bits of float16, so its error is about that of rounding the layer's inputs.
    """
    if x.shape[1] == 1:
        return x * y
    elif y.shape[1] == 1:
        return tl.sum(x * tl.trans(y), axis=1, keep_dims=True)
    else:
        return tl.dot(x, y, input_precision="tf32")
