"""The kernel of linear layers in Triton. linear.py explains it."""

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit(do_not_specialize=["num_rows", "steps_per_split"])
def multiply_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    output_ptr,
    sums_ptr,
    num_rows,
    out_features,
    steps_per_split,
    IN_FEATURES: constexpr,
    BITS: constexpr,
    GROUP: constexpr,
    N: constexpr,
    M: constexpr,
    K: constexpr,
):
    # 64 bits, because a vocabulary times the inputs or the rows overflows 32 bits.
    outputs = (tl.program_id(0) * N + tl.arange(0, N)[:, None]).to(tl.int64)
    rows = (tl.program_id(1) * M + tl.arange(0, M)[None, :]).to(tl.int64)
    split = tl.program_id(2)
    is_output = outputs < out_features
    is_row = rows < num_rows
    first = split * steps_per_split
    end = tl.minimum(first + steps_per_split, tl.cdiv(IN_FEATURES, K))
    acc = tl.zeros([N, M], dtype=tl.float32)
    for step in range(first, end):
        inputs = step * K + tl.arange(0, K)
        is_input = inputs < IN_FEATURES
        if BITS is None:
            mask = is_output & is_input[None, :]
            weight = tl.load(
                weight_ptr + outputs * IN_FEATURES + inputs[None, :], mask=mask, other=0.0
            )
        else:
            ROW_BYTES: constexpr = tl.cdiv(IN_FEATURES * BITS, 8)
            ROW_GROUPS: constexpr = tl.cdiv(IN_FEATURES, GROUP)
            GROUPS: constexpr = K // GROUP
            BYTES: constexpr = K * BITS // 8
            columns = step * BYTES + tl.arange(0, BYTES)[None, :]
            mask = is_output & (columns < ROW_BYTES)
            codes = tl.load(weight_ptr + outputs * ROW_BYTES + columns, mask=mask)
            if BITS == 4:
                codes = tl.interleave(codes & 15, codes >> 4)
            groups = step * GROUPS + tl.arange(0, GROUPS)[None, :]
            mask = is_output & (groups < ROW_GROUPS)
            zeros = tl.load(zeros_ptr + outputs * ROW_GROUPS + groups, mask=mask)
            scales = tl.load(scales_ptr + outputs * ROW_GROUPS + groups, mask=mask, other=0.0)
            # Subtracted as integers, because GPUs convert 32-bit integers to floats faster than
            # codes.
            centered = codes.to(tl.int32).reshape(N, GROUPS, GROUP) - zeros[:, :, None]
            weight = (centered.to(tl.float32) * scales[:, :, None]).reshape(N, K)
            weight = weight.to(x_ptr.dtype.element_ty)
        if M < 16:
            for row in tl.static_range(M):
                row_ptr = x_ptr + tl.minimum(row, num_rows - 1) * IN_FEATURES
                x = tl.load(row_ptr + inputs, mask=is_input, other=0.0)
                products = weight.to(tl.float32) * x.to(tl.float32)[None, :]
                acc += tl.where(rows == row, tl.sum(products, axis=1)[:, None], 0.0)
        else:
            mask = is_row & is_input[:, None]
            x = tl.load(x_ptr + rows * IN_FEATURES + inputs[:, None], mask=mask, other=0.0)
            acc = tl.dot(weight, x, acc, input_precision="ieee")  # no effect on 16-bit operands
    if bias_ptr is not None:
        if split == 0:
            acc += tl.load(bias_ptr + outputs, mask=is_output, other=0.0)
    mask = is_output & is_row
    if tl.num_programs(2) == 1:
        output = acc.to(output_ptr.dtype.element_ty)
        tl.store(output_ptr + rows * out_features + outputs, output, mask=mask)
    else:
        rows += split * num_rows
        tl.store(sums_ptr + rows * out_features + outputs, acc, mask=mask)
