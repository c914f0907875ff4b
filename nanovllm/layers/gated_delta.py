"""The gated delta rule (Gated DeltaNet, Yang et al. 2024): a recurrent state in place of K/V.

Each head has a matrix S that maps keys to values. A token lets S decay, corrects the value that S
has for the token's key, and reads the value for its query:

    S = decay * S
    S = S + k (beta * (v - S^T k))^T
    output = S^T q

q, k and v come from a short causal convolution, so its last inputs belong to the state, too. A
state is one row of `states`, whose layout is

    S of each value head [key_dim, value_dim] | last inputs of the convolution [conv_size - 1, size]

in float32 whatever the dtype of the model, because thousands of tokens add to it. A step reads the
state of a sequence from row `batch.read_slots` and writes it to row `batch.write_slots`. No slot is
written by one sequence and read by another one in the same step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.batch.batch import Batch
from nanovllm.layers.linear import Target
from nanovllm.layers.tensor_parallel import ALONE, TensorParallel

CHUNK = 64  # tokens per matrix product. More cost quadratic work, fewer cost more iterations


class DeltaInputs(NamedTuple):
    """The projections of the tokens of a step."""

    qkv: Tensor  # [num_tokens, sum(qkv_sizes)]
    gate: Tensor  # [num_tokens, qkv_sizes[2]]
    beta: Tensor  # [num_tokens, num_value_heads]
    decay: Tensor  # [num_tokens, num_value_heads]


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of a Gated DeltaNet, on all ranks together."""

    num_key_heads: int
    num_value_heads: int  # a multiple of num_key_heads
    key_dim: int
    value_dim: int
    conv_size: int  # tokens that the convolution sees

    @property
    def qkv_sizes(self) -> list[int]:
        """Sizes of the queries, keys and values."""
        key_size = self.num_key_heads * self.key_dim
        return [key_size, key_size, self.num_value_heads * self.value_dim]

    @property
    def matrices_size(self) -> int:
        """The number of elements of S of all heads."""
        return self.num_value_heads * self.key_dim * self.value_dim

    @property
    def state_size(self) -> int:
        """The number of elements of a state."""
        return self.matrices_size + (self.conv_size - 1) * sum(self.qkv_sizes)


class GatedDeltaRule(nn.Module):
    """Everything between the projections of a Gated DeltaNet: convolution, delta rule, gated norm.

    A rank has a share of the key heads, and the value heads that belong to them.
    """

    SUPPORTS_CUDA_GRAPHS = False  # the lengths of sequences are read on the host

    def __init__(
        self, sizes: DeltaSizes, norm_eps: float, dtype: torch.dtype, tp: TensorParallel = ALONE
    ) -> None:
        super().__init__()
        self.tp = tp
        self.key_dim = sizes.key_dim
        self.value_dim = sizes.value_dim
        self.num_key_heads = sizes.num_key_heads // tp.size
        self.num_value_heads = sizes.num_value_heads // tp.size
        self.norm_eps = norm_eps
        self.qkv_sizes = [size // tp.size for size in sizes.qkv_sizes]
        self.matrices_size = sizes.matrices_size // tp.size
        conv_shape = (sum(self.qkv_sizes), 1, sizes.conv_size)
        self.conv_weight = nn.Parameter(torch.empty(conv_shape, dtype=dtype))
        # These three are float32 in some checkpoints and 16 bits in others.
        self.A_log = nn.Parameter(torch.empty(self.num_value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(self.num_value_heads, dtype=torch.float32))
        self.norm_weight = nn.Parameter(torch.empty(self.value_dim, dtype=torch.float32))

    def targets(self, name: str) -> Iterator[tuple[str, Target]]:
        """Checkpoints name these tensors as parts of the parent."""
        parent = name.rpartition(".")[0]
        rank, num_ranks = self.tp.rank, self.tp.size
        for key, tensor in (("A_log", self.A_log), ("dt_bias", self.dt_bias)):
            size = len(tensor)
            yield f"{parent}.{key}", Target(tensor, 0, rank * size, num_ranks * size)
        before = 0  # rows of earlier parts
        full_size = num_ranks * len(self.conv_weight)
        for rows in self.conv_weight.split(self.qkv_sizes):  # each part is sharded separately
            start = num_ranks * before + rank * len(rows)
            yield f"{parent}.conv1d.weight", Target(rows, 0, start, full_size)
            before += len(rows)
        yield f"{parent}.norm.weight", Target(self.norm_weight)

    def forward(self, inputs: DeltaInputs, states: Tensor, batch: Batch) -> Tensor:
        """Compute the tokens of a step, with `states` [num_slots, state size].

        Return [num_tokens, qkv_sizes[2]].
        """
        qkv, gate, beta, decay = inputs
        beta = beta.float().sigmoid()
        log_decay = -self.A_log.exp() * F.softplus(decay.float() + self.dt_bias)
        new_states = states[batch.read_slots]  # a copy
        output = torch.empty_like(gate, dtype=torch.float32)
        bounds = batch.cu_seqlens_q.tolist()
        for seq, (start, end) in enumerate(pairwise(bounds)):
            if start < end:  # padding has no tokens
                own = slice(start, end)
                computed, new_states[seq] = self.advance(
                    new_states[seq], qkv[own], beta[own], log_decay[own]
                )
                output[own] = computed.flatten(1)
        states[batch.write_slots] = new_states
        return self.norm_and_gate(output, gate)

    def advance(
        self, state: Tensor, qkv: Tensor, beta: Tensor, log_decay: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the n tokens of a sequence: qkv is [n, sum(qkv_sizes)], and so on.

        Return the outputs [n, num_value_heads, value_dim] and the next state.
        """
        matrices = state[: self.matrices_size].view(-1, self.key_dim, self.value_dim)
        window = state[self.matrices_size :].view(-1, qkv.shape[-1])
        qkv, window = convolve(qkv.float(), window, self.conv_weight.float())
        query, key, value = qkv.split(self.qkv_sizes, dim=-1)
        query = self.normalize(query) * self.key_dim**-0.5
        key = self.normalize(key)
        value = value.unflatten(-1, (-1, self.value_dim)).transpose(0, 1)
        inputs = (query, key, value, beta.T, log_decay.T)  # each [num_value_heads, n, ...]
        outputs: list[Tensor] = []
        for chunks in zip(*[each.split(CHUNK, dim=1) for each in inputs]):
            output, matrices = apply_delta_rule(matrices, *chunks)
            outputs.append(output)
        state = torch.cat((matrices.flatten(), window.flatten()))
        return torch.cat(outputs, dim=1).transpose(0, 1), state

    def normalize(self, heads: Tensor) -> Tensor:
        """Turn queries or keys [n, size] into unit vectors [num_value_heads, n, key_dim]."""
        heads = heads.unflatten(-1, (-1, self.key_dim)).transpose(0, 1)
        heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)
        return heads.repeat_interleave(self.num_value_heads // self.num_key_heads, dim=0)

    def norm_and_gate(self, output: Tensor, gate: Tensor) -> Tensor:
        """RMSNorm of each head of `output`, times silu(gate). Rounded once, to the gate's dtype."""
        heads = output.unflatten(-1, (-1, self.value_dim))
        heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + self.norm_eps)
        return ((heads * self.norm_weight).flatten(1) * F.silu(gate.float())).to(gate.dtype)


def convolve(x: Tensor, window: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Causal convolution of x [n, size] along n, then SiLU.

    `window` has the inputs before x, [conv_size - 1, size]. `weight` is [size, 1, conv_size].
    Return the outputs, and the window of the next step.
    """
    inputs = torch.cat((window, x))
    output = F.conv1d(inputs.T, weight, groups=len(weight)).T
    return F.silu(output), inputs[len(x) :]


def apply_delta_rule(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, log_decay: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute n tokens of the gated delta rule, with one head per leading index.

    state is S [..., key_dim, value_dim], query and key are [..., n, key_dim], value [..., n,
    value_dim], beta and log_decay [..., n]. Return the outputs [..., n, value_dim] and the next S.

    Token t adds k_t u_t^T to S, and all earlier parts of S decay:

        S_t = exp(c_t) S_0 + sum over s <= t of exp(c_t - c_s) k_s u_s^T       c = cumsum(log_decay)
        u_t = beta_t (v_t - k_t^T (decayed S_{t-1}))

    Each u depends linearly on the earlier ones, so one triangular system has them all.
    """
    since_start = log_decay.cumsum(-1)
    between = (since_start[..., :, None] - since_start[..., None, :]).exp().tril()  # [..., n, n]
    decay = since_start.exp()[..., None]
    beta = beta[..., None]
    u = beta * (value - (key * decay) @ state)
    if key.shape[-2] > 1:
        system = beta * (key @ key.mT) * between
        u = torch.linalg.solve_triangular(system, u, upper=False, unitriangular=True)
    output = (query * decay) @ state + ((query @ key.mT) * between) @ u
    to_end = between[..., -1, :, None]
    return output, decay[..., -1:, :] * state + (key * to_end).mT @ u
