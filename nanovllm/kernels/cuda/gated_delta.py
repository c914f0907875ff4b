"""The gated delta rule in Triton. A step reads and writes each state once.

Two kernels compute a step, without host synchronization: gated_delta_kernels.py explains them.
"""

import triton
from torch import Tensor

from nanovllm.batch.batch import Batch
from nanovllm.kernels.cuda.attention import describe_gpu, has_matrix_instructions
from nanovllm.kernels.cuda.gated_delta_kernels import advance_states_kernel, prepare_chunks_kernel
from nanovllm.kernels.optimized_layer import OptimizedLayer
from nanovllm.layers.gated_delta import DeltaInputs, GatedDeltaRule

# With 64 tokens, and a state of 128 x 128, there would not be enough shared memory on an H100.
_CHUNK = 32


class FastGatedDeltaRule(OptimizedLayer, GatedDeltaRule):
    SUPPORTS_CUDA_GRAPHS = True

    def forward(self, inputs: DeltaInputs, states: Tensor, batch: Batch) -> Tensor:
        qkv, gate, beta, decay = inputs
        # Tokens need not be adjacent, so that the inputs can be parts of one projection.
        assert all([each.stride(1) == 1 for each in inputs]) and states.is_contiguous()
        num_tokens, num_seqs = len(qkv), len(batch.read_slots)
        num_heads = self.num_value_heads
        # Without matrix instructions, products of chunks would need more registers than there are.
        capability, _ = describe_gpu(qkv.device)
        is_chunked = batch.max_seqlen_q > 1 and has_matrix_instructions(qkv.dtype, capability)
        chunk = _CHUNK if is_chunked else 1
        k = max(16, triton.next_power_of_2(self.key_dim))  # as tl.dot takes them
        v = max(16, triton.next_power_of_2(self.value_dim))
        widths = (k, k, k, v, chunk, 1)  # of query, key, w, x, scores and decay
        prepared = [states.new_empty(num_tokens, num_heads, width) for width in widths]
        output = gate.new_empty(gate.shape)
        windows = states[:, self.matrices_size :]
        constants = {
            "NUM_HEADS": num_heads,
            "GROUP": num_heads // self.num_key_heads,
            "KEY_DIM": self.key_dim,
            "VALUE_DIM": self.value_dim,
            "SIZE": sum(self.qkv_sizes),
            "STATE": states.shape[1],
            "TAPS": self.conv_weight.shape[2],
            "K": k,
            "V": v,
            "CHUNK": chunk,
            "num_warps": 8,
            "enable_fp_fusion": True,
        }
        prepare_chunks_kernel[((num_tokens // chunk + num_seqs) * num_heads,)](
            qkv,
            beta,
            decay,
            qkv.stride(0),
            beta.stride(0),
            decay.stride(0),
            self.conv_weight,
            self.A_log,
            self.dt_bias,
            windows,
            batch.read_slots,
            batch.cu_seqlens_q,
            *prepared,
            num_seqs,
            **constants,
        )
        has_decodes = len(batch.long_queries) < num_seqs
        # Decodes, and then all other sequences.
        for length in sorted({1, chunk} if has_decodes else {chunk}):
            advance_states_kernel[(num_heads, num_seqs)](
                *prepared,
                qkv,
                gate,
                qkv.stride(0),
                gate.stride(0),
                self.norm_weight,
                self.norm_eps,
                states,
                windows,
                batch.read_slots,
                batch.write_slots,
                batch.cu_seqlens_q,
                output,
                C=length,
                num_stages=2,
                **constants,
            )
        return output
