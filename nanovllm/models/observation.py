"""Runs a decoder of transformers to find out what its layers attend to.

The model runs once on the device `meta`, so without memory. transformers takes attention and masks
from tables of functions. Those of this file record the calls of attention, and evaluate the masks.
An argument that would change the result, and that no backend takes, is an error.

With the same functions no token attends to another one. After loading, the model runs once more in
this way. A token that changes with the others shows that the family mixes tokens elsewhere, such as
in a convolution. The KV cache does not have what such a token needs, so the family is rejected.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
)

from nanovllm.layers.attention import AttentionShape
from nanovllm.models import borrowed
from nanovllm.utils.checks import naming

OBSERVED = "nanovllm_observed"  # a name in the tables of transformers
# Arguments of attention that change nothing here: masks say the same, or they are for training.
_HARMLESS = {"dropout", "scaling", "sliding_window", "is_causal", "position_ids", "use_cache"}
_SUPPORTED = {"softcap", "s_aux"}  # arguments that AttentionShape has
_NUM_TESTED = 64  # tokens of the test of independence
_MAX_ROUNDING = 0.05  # a relative change, far above that of 16-bit numbers
# What code raises that cannot run on `meta`, or takes masks for tensors.
_FAILURES = (RuntimeError, AttributeError, TypeError, LookupError)


class ObservedMask(NamedTuple):
    """What transformers passes to attention in place of a mask, while a model is observed."""

    window: int | None


def observe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    observed_shapes: dict[nn.Module, AttentionShape] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Record what a layer attends to. The result of a token depends on its own Q, K and V only."""
    if observed_shapes is None:
        raise ValueError("a layer does not pass keyword arguments on to attention")
    given = {name for name, option in options.items() if option is not None and option is not False}
    unknown = given - _HARMLESS - _SUPPORTED
    if unknown:
        raise ValueError(f"attention with {', '.join(sorted(unknown))} is not supported")
    if not isinstance(attention_mask, ObservedMask):
        raise ValueError(f"attention with a mask of its own ({attention_mask}) is not supported")
    if module in observed_shapes:
        raise ValueError("a layer attends twice")
    _, num_heads, _, head_dim = query.shape
    _, num_kv_heads, _, _ = key.shape
    if value.shape != key.shape or key.shape[3] != head_dim or num_heads % num_kv_heads != 0:
        sizes = [tuple(each.shape[1::2]) for each in (query, key, value)]
        raise ValueError(f"queries, keys and values of different sizes are not supported: {sizes}")
    observed_shapes[module] = AttentionShape(
        num_heads,
        num_kv_heads,
        head_dim,
        scale=float(options.get("scaling") or head_dim**-0.5),
        window=attention_mask.window,
        softcap=options.get("softcap"),
        has_sinks="s_aux" in given,
    )
    own = query + (key + value).repeat_interleave(num_heads // num_kv_heads, dim=1)
    return own.transpose(1, 2), None


def observe_mask(
    mask_function: Callable[..., Tensor], config: PretrainedConfig, **options: Any
) -> ObservedMask:
    """Find the window of a mask, which is a function of (sequence, head, query, key)."""
    num_heads = config.num_attention_heads
    heads = torch.arange(num_heads, device="cpu")[:, None]
    last = getattr(config, "max_position_embeddings", None) or 4096
    keys = torch.arange(last, device="cpu")[None]
    zero = torch.tensor(0, device="cpu")

    def find_visible(query: int) -> Tensor:
        with naming("a mask cannot be evaluated", RuntimeError):
            visible = mask_function(zero, heads, torch.tensor(query, device="cpu"), keys)
        return visible.expand(num_heads, last)

    window = int(find_visible(last - 1)[0].sum())
    for query in {0, 1, window // 2, window - 1, min(window, last - 1), last // 2, last - 1}:
        expected = (keys <= query) & (keys > query - window)
        if not torch.equal(find_visible(query), expected.expand(num_heads, last)):
            raise ValueError("a mask that is neither causal nor a sliding window is not supported")
    return ObservedMask(window if window < last else None)


AttentionInterface.register(OBSERVED, observe_attention)
AttentionMaskInterface.register(OBSERVED, observe_mask)


class ObservedLinear(nn.Linear):
    """Knows whether its weight was read by other code than its own."""

    weight_is_read = False

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            self.weight_is_read = True
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self._parameters["weight"], self._parameters["bias"])  # type: ignore


class Observed(NamedTuple):
    shapes: dict[nn.Module, AttentionShape]  # of each attention module, in their order
    # Modules that were called, except each Linear whose weight other code reads (some routers).
    called: set[nn.Module]
    output_class: type  # of the decoder


def observe(model: PreTrainedModel) -> Observed:
    """Run the decoder of a model once on `meta`. The model cannot be used afterwards.

    Raises ValueError if it cannot be observed, or has attention that no backend computes.
    """
    borrowed.set_functions(model, OBSERVED, experts="batched_mm")
    shapes: dict[nn.Module, AttentionShape] = {}
    called: set[nn.Module] = set()
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    nn.Module.to(model, "meta")  # the buffers
    decoder: Any = model.get_decoder()
    for module in decoder.modules():
        module.register_forward_pre_hook(lambda module, args: called.add(module))
        if type(module) is nn.Linear:
            module.__class__ = ObservedLinear
    with naming("its code cannot be observed", *_FAILURES):
        output = borrowed.run_decoder(
            decoder, ids, ids, attention_mask=ids + 1, observed_shapes=shapes
        )
    called -= {each for each in called if getattr(each, "weight_is_read", False)}
    return Observed(shapes, called, type(output))


def mixes_tokens(run: Callable[..., Tensor], vocab_size: int, max_len: int) -> bool:
    """Return whether tokens reach others in another way than by attention.

    run(ids, positions) returns hidden states [num_tokens, hidden_size], while OBSERVED is the
    attention function. A token must keep its hidden state to the last bit when all others get
    other ids and positions. In another order, and beside fewer others, only its rounding may
    change.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(limit: int) -> Tensor:
        return torch.randint(limit, (2, _NUM_TESTED), generator=generator, device="cpu")

    ids, other_ids = draw(vocab_size)
    positions, other_positions = draw(max_len)
    ends = [0, -1]
    positions[ends] = 0
    other_positions[ends] = max_len - 1
    hidden = run(ids, positions)
    for kept in (1, _NUM_TESTED // 2, _NUM_TESTED - 2):
        is_kept = torch.arange(_NUM_TESTED, device="cpu") == kept
        changed = run(ids.where(is_kept, other_ids), positions.where(is_kept, other_positions))
        if not torch.equal(changed[kept], hidden[kept]):
            return True
    half = _NUM_TESTED // 2
    fewer = run(ids[:half].flip(0), positions[:half].flip(0)).flip(0)
    change = (fewer - hidden[:half]).norm() / hidden[:half].norm()
    return bool(change > _MAX_ROUNDING)
