"""What the engine and the worker know of a model: its sizes, and how to make it.

Each structure of models has a subclass of ModelSpec in the file of its layers, and architectures.py
fills it from config.json.
"""

from dataclasses import dataclass
from typing import Any

import torch

from nanovllm.checkpoints.quantization import NOT_QUANTIZED, Quantization
from nanovllm.layers.attention import AttentionShape, Backend
from nanovllm.layers.tensor_parallel import ALONE, TensorParallel


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The sizes of a model. A subclass makes the model."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # factor on the scores of attention
    windows: tuple[int | None, ...]  # for each layer, as in AttentionShape
    intermediate_size: int = 0  # width of the MLPs, if there are any
    tie_embeddings: bool  # the embedding is the output head, too
    has_head: bool = True  # whether the checkpoint has an output head
    max_len: int  # maximum number of positions, with RoPE scaling
    dtype: torch.dtype
    quantization: Quantization = NOT_QUANTIZED

    @property
    def state_size(self) -> int:
        """The number of elements in a layer's recurrent state, on all ranks together."""
        return 0

    def attention_shape(self, layer: int) -> AttentionShape | None:
        """Return the attention of a layer, or None if it keeps a recurrent state and no K/V."""
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim)
        return AttentionShape(*sizes, self.scale, self.windows[layer])

    @property
    def attention_shapes(self) -> list[AttentionShape]:
        """The shapes that occur, each once."""
        shapes = map(self.attention_shape, range(self.num_layers))
        return list(dict.fromkeys(filter(None, shapes)))

    @property
    def window(self) -> int | None:
        """The largest window of a layer, or None if no layer has one."""
        windows = [shape.window for shape in self.attention_shapes]
        return max(filter(None, windows), default=None)

    @property
    def has_states(self) -> bool:
        """Whether there are layers with a recurrent state."""
        return None in map(self.attention_shape, range(self.num_layers))

    @property
    def needs(self) -> list[str]:
        """What the model needs of the features of an engine."""
        needs = {
            "recurrent states": self.has_states,
            "sliding windows": self.window is not None,
            "embeddings": not self.has_head,
        }
        return [name for name, is_needed in needs.items() if is_needed]

    def make_model(self, backend: Backend, tp: TensorParallel = ALONE) -> Any:
        """Make one rank's share of the model, a CausalLM (decoder.py)."""
        raise NotImplementedError
