"""Calls what this engine uses of transformers' modeling code, beyond its table of attention.

It makes a family's own model, runs its decoder and its head, and finds out which stored tensor
becomes which rows of which parameter. All undocumented functions and attributes of transformers are
used here only, because a release can change them. tests/models/test_any_decoder.py would fail then.
"""

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

VERSIONS = f"transformers {transformers.__version__}, tested with 5.22 to 5.24"
try:
    from transformers.core_model_loading import revert_weight_conversion
except ImportError as error:
    raise ImportError(f"model_impl='transformers' needs {VERSIONS}: {error}") from error


def make_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Make the family's own model on `meta`, with buffers such as RoPE's frequencies on the CPU.

    Raises ValueError if config.json names another class than the one that transformers makes of it,
    or if that class says that its attention cannot be replaced, or that it has recurrent states.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{type(config).__name__} is not the config of a causal decoder")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    made = model_class.__name__
    name = next(iter(config.architectures or ()), None)
    if name != made and not str(name).endswith("ForConditionalGeneration"):
        raise ValueError(f"architectures[0] must be {made!r} for this model_type, not {name!r}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if not model._supports_attention_backend:
        raise ValueError("its attention cannot be replaced")
    if model._is_stateful:
        raise ValueError("recurrent states are not supported")
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        for name, buffer in buffers.items():
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
        if buffers:  # as from_pretrained does, because no checkpoint has them
            with torch.device("cpu"):
                model._init_weights(module)
    return model.eval()


def find_stored_form(
    config: PretrainedConfig, tensors: dict[str, Tensor]
) -> dict[str, Tensor] | None:
    """Return a state dict of transformers as `save_pretrained` stores it.

    None: it is stored as it is, or it is no state dict of this model.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    own = model.state_dict()
    is_own = tensors.keys() <= own.keys()
    if not is_own or revert_weight_conversion(model, own).keys() == own.keys():
        return None
    return revert_weight_conversion(model, tensors)


def set_functions(model: PreTrainedModel, attention: str, experts: str) -> None:
    """Choose the attention function of a model, by its registered name, and that of experts.

    "batched_mm" computes each token by itself, also on `meta`, but copies the weights of its
    experts. "eager" computes all tokens of an expert together.
    """
    model.set_attn_implementation(attention)
    if model._can_set_experts_implementation():
        model.set_experts_implementation(experts)


def list_skipped(model: PreTrainedModel) -> list[str]:
    """List patterns of stored tensors that the family's class does not need, such as of MTP."""
    return list(model._keys_to_ignore_on_load_unexpected or ())


def fix_rope(model: nn.Module, max_model_len: int) -> None:
    """Let frequencies be those of a context of `max_model_len` in every step.

    Otherwise those of "dynamic" and "longrope" would depend on the longest position of a step.
    """
    last = torch.tensor([[max_model_len - 1]], device="cpu")
    for module in model.modules():
        rope_type: Any = getattr(module, "rope_type", None)
        if isinstance(rope_type, dict):  # by the type of layer
            for layer_type in rope_type:
                module(last.float(), last, layer_type)
            module.rope_type = dict.fromkeys(rope_type, "default")  # type: ignore[assignment]
        elif isinstance(rope_type, str):
            module(last.float(), last)
            module.rope_type = "default"  # type: ignore[assignment]


def run_decoder(decoder: nn.Module, ids: Tensor, positions: Tensor, **options: Any) -> Any:
    """Run a decoder over ids and positions [1, num_tokens].

    Attention functions receive `options` as keyword arguments. The output has the
    `last_hidden_state` [1, num_tokens, hidden_size].
    """
    return decoder(
        input_ids=ids, position_ids=positions, use_cache=False, return_dict=True, **options
    )


class Given(nn.Module):
    """Takes the place of the decoder in the family's class, of which only the head is left."""

    def __init__(self, output_class: type) -> None:
        super().__init__()
        self.output_class = output_class

    def forward(self, *ids: None, inputs_embeds: Tensor, **options: Any) -> Any:
        return self.output_class(last_hidden_state=inputs_embeds)


def take_decoder(model: PreTrainedModel, output_class: type) -> tuple[nn.Module, str]:
    """Take the decoder out of a model. Return it, and its name."""
    decoder = model.get_decoder()
    (name,) = [name for name, module in model.named_modules() if module is decoder]
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, Given(output_class))
    return decoder, name


def run_head(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Compute the logits of rows [num_rows, hidden_size] by a model without its decoder."""
    return model(inputs_embeds=hidden[None], use_cache=False).logits[0]


class StoredRows(NamedTuple):
    """Where a stored tensor goes: rows of a parameter, or all of it."""

    parameter: str
    first: int = 0
    num_rows: int = 0  # 0: the whole parameter


def find_stored_rows(model: PreTrainedModel) -> Iterator[tuple[str, StoredRows]]:
    """Yield the names of a checkpoint's tensors, and where they go.

    transformers merges some tensors while it loads them, such as the matrices of experts. Which
    rows a stored tensor becomes is found by the conversion that transformers applies when it saves
    a model, here to tensors that consist of row numbers.
    """
    numbers: dict[str, Tensor] = {}
    starts: list[int] = []  # of the parameters, in the order of `numbers`
    end = 0
    for name, tensor in model.state_dict().items():
        shape = (*tensor.shape[:-1], 1) if tensor.dim() > 1 else tensor.shape
        starts.append(end)
        end += torch.Size(shape).numel()
        numbers[name] = torch.arange(starts[-1], end, device="cpu").reshape(shape)
    names = list(numbers)
    for stored_name, rows in revert_weight_conversion(model, dict(numbers)).items():
        flat = rows.flatten()
        if len(flat) == 0:
            continue
        first = int(flat[0])
        index = bisect_right(starts, first) - 1
        end_of_parameter = starts[index] + numbers[names[index]].numel()
        is_in_order = torch.equal(flat, torch.arange(first, first + len(flat)))
        if not is_in_order or first + len(flat) > end_of_parameter:
            raise ValueError(f"transformers permutes or splits the rows of {stored_name}")
        is_whole = rows.shape == numbers[names[index]].shape
        num_rows = 0 if is_whole else len(flat)
        yield stored_name, StoredRows(names[index], first - starts[index], num_rows)
