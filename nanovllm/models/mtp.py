"""A head for multi-token prediction (MTP), with which a model drafts its own next tokens.

    position       |    0      1      2      3         hidden states are those after the last norm
    tokens         |    a      b      c      d         d is the newest token, not computed yet
    hidden states  |   h(a)   h(b)   h(c)
    rows           |  0, a  h(a),b h(b),c h(c),d       the row of d predicts the token after d

A row joins a token with the hidden state before it: fc(concat(norm(embedding), norm(hidden))). The
rows pass through one more decoder layer with attention to the rows before, and the output head
turns them into logits. To draft another token, the head's own output stands for the next hidden
state.

The K/V of a row are in the slot of its token. They depend on no later token, so blocks with equal
hashes have equal K/V of the head, too. (Other engines keep the row h(a), b in the slot of a, which
prompts that go on differently must not share.) The model writes them, and the hidden states of all
tokens, in each step. The hidden state before a step's first token is read through the block table,
like K/V. Prefix hits, chunks, preemptions and rejected drafts therefore need nothing else.

Reference: DeepSeek-AI 2024 (DeepSeek-V3, section 2.2). Tensors are named as in Qwen3.5.
"""

from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.batch.batch import Batch
from nanovllm.checkpoints.tensor_files import TensorFiles
from nanovllm.config import Config
from nanovllm.layers.attention import Backend
from nanovllm.layers.linear import ColumnParallelLinear
from nanovllm.layers.tensor_parallel import ALONE
from nanovllm.models.decoder import CausalLM, CosSins, Decoder, DecoderLayers, DecoderSpec
from nanovllm.models.spec import ModelSpec

_NORM = "mtp.norm.weight"  # never quantized


def may_use_head(config: Config) -> bool:
    return config.num_speculative_tokens > 0 and config.speculative_method != "prompt_lookup"


def has_head(config: Config, spec: ModelSpec, files: TensorFiles | None) -> bool:
    """Return whether a model with the weights of `files` drafts with its own head.

    Raises ValueError if drafts need a head, and there is none that can be used.
    """
    method = config.speculative_method
    if not may_use_head(config):
        return False
    # With dummy weights, a head is made only on request.
    is_stored = method == "mtp" if files is None else _NORM in files
    problem = None
    if not is_stored:
        problem = f"the checkpoint has no tensor {_NORM}"
    elif config.tensor_parallel_size > 1:
        problem = f"tensor_parallel_size={config.tensor_parallel_size} is more than 1"
    elif not isinstance(spec, DecoderSpec) or spec.window is not None:
        problem = "only classes of models/ without sliding windows run a head"
    if problem is not None and method == "mtp":
        raise ValueError(f"speculative_method='mtp': {problem}: use 'prompt_lookup'")
    return problem is None


class MTPHead(nn.Module):
    def __init__(self, spec: DecoderSpec, backend: Backend) -> None:
        super().__init__()
        size = spec.hidden_size
        self.pre_fc_norm_embedding = spec.make_norm(size)
        self.pre_fc_norm_hidden = spec.make_norm(size)
        self.fc = ColumnParallelLinear(2 * size, [("fc", size)], False, spec.dtype)
        last = max(layer for layer in range(spec.num_layers) if spec.attention_shape(layer))
        self.layers = DecoderLayers([spec.make_layer(last, backend, ALONE)])
        self.norm = spec.make_norm(size)

    def forward(
        self, embedded: Tensor, before: Tensor, cos_sins: CosSins, kv_cache: Tensor, batch: Batch
    ) -> Tensor:
        """Write the K/V of rows. Return the rows of `logits_indices` after the layer.

        `embedded` are the embeddings of tokens, and `before` the hidden states before these tokens,
        both [num_tokens, hidden_size].
        """
        parts = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(before)]
        return self.layers(self.fc(torch.cat(parts, -1)), cos_sins, [kv_cache], batch)


class DraftingLM(CausalLM):
    """A model with an MTP head. Its last two caches are the head's K/V and the hidden states.

    The cache of hidden states is [1, num_blocks + 1, block_size, hidden_size]. Its last row
    receives those of tokens with slot -1, which are not stored.
    """

    model: Decoder

    def __init__(self, base: CausalLM, spec: DecoderSpec, backend: Backend) -> None:
        super().__init__(cast(Decoder, base.model), base.lm_head)
        self.mtp = MTPHead(spec, backend)

    def forward(self, batch: Batch, kv_caches: list[Tensor]) -> Tensor:
        *caches, head_cache, hidden_cache = kv_caches
        num_tokens = len(batch.input_ids)
        every = torch.arange(num_tokens, dtype=torch.int32, device=batch.input_ids.device)
        hidden = self.model(replace(batch, logits_indices=every), caches)
        # Before it is read, because sequences of this step may share blocks.
        hidden_cache.flatten(0, 2)[batch.slot_mapping.long()] = hidden
        before = F.pad(hidden, (0, 0, 1, 0))  # the hidden state of token i is in row i + 1
        before[batch.cu_seqlens_q[:-1].long()] = self.read_before(batch, hidden_cache)
        # Only K/V are needed, and the layers of kernels/cpu/ compute nothing else then.
        no_rows = replace(batch, logits_indices=batch.logits_indices[:0])
        self._run_head(no_rows, before[:-1], head_cache)
        return hidden.index_select(0, batch.logits_indices)

    def draft(self, batch: Batch, kv_caches: list[Tensor], before: Tensor | None = None) -> Tensor:
        """Compute the hidden states that predict the tokens after those of `batch`.

        Each sequence has one token. `before` are the head's own outputs for the tokens before, or
        None if the model has computed these tokens. K/V are written to the slots of the tokens,
        and the model overwrites them when it computes the tokens.
        """
        *_, head_cache, hidden_cache = kv_caches
        if before is None:
            before = self.read_before(batch, hidden_cache)
        return self.mtp.norm(self._run_head(batch, before, head_cache))

    def _run_head(self, batch: Batch, before: Tensor, kv_cache: Tensor) -> Tensor:
        cos_sins = [rotary(batch.positions) for rotary in self.model.rotaries]
        return self.mtp(self.model.embed(batch), before, cos_sins, kv_cache, batch)

    def read_before(self, batch: Batch, hidden_cache: Tensor) -> Tensor:
        """Return the hidden state before each sequence's first token, or zeros at position 0."""
        block_size = hidden_cache.shape[2]
        starts = batch.context_lens - batch.cu_seqlens_q.diff()
        last = (starts - 1).clamp(min=0).long()
        blocks = batch.block_tables.gather(1, (last // block_size)[:, None])[:, 0].long()
        hidden = hidden_cache.flatten(0, 2)[blocks * block_size + last % block_size]
        return hidden.masked_fill((starts == 0)[:, None], 0.0)


def make_hidden_cache(spec: ModelSpec, num_blocks: int, block_size: int) -> Tensor:
    """Make the cache of hidden states that DraftingLM describes, on the default device."""
    return torch.zeros(1, num_blocks + 1, block_size, spec.hidden_size, dtype=spec.dtype)
