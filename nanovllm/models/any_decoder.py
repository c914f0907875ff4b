"""Any decoder of transformers, with this engine's paged KV cache and without a line for its family.

transformers takes attention from a table of functions. The one of this file stores the K/V of a
step, and attends through the block tables. All else is the family's own code, over one flat batch:

    ids, positions [1, num_tokens] -> embedding -> layers -> norm -> hidden [1, num_tokens, size]
                                                     |
                                attend_paged: store K/V, attend to each sequence's context

    rows of hidden whose logits are wanted -> the family's head -> logits

Nothing about a family is written down here. What a layer attends to is observed: the model runs
once on the device `meta`, with functions that record the calls of attention and evaluate the masks.
An argument that would change the result, and that no backend takes, is an error. Layers that
compute the same as one of layers/ are replaced by it (recognized_layers.py).

After loading, the model runs again while no token attends to another one. A token that changes with
the others shows that the family mixes tokens elsewhere, such as in a convolution. The KV cache does
not have what such a token needs, so the family is rejected.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
)

from nanovllm.batch.batch import Batch
from nanovllm.checkpoints.quantization import Quantization
from nanovllm.checkpoints.tensor_files import normalize
from nanovllm.layers.attention import AttentionShape, Backend
from nanovllm.layers.linear import Target
from nanovllm.layers.tensor_parallel import ALONE, TensorParallel
from nanovllm.models import borrowed
from nanovllm.models.config_fields import read_max_len
from nanovllm.models.decoder import CausalLM
from nanovllm.models.recognized_layers import list_kept, replace_layers
from nanovllm.models.spec import ModelSpec
from nanovllm.utils.checks import naming
from nanovllm.utils.helpers import report

# Names in the tables of transformers.
PAGED = "nanovllm_paged"
OBSERVED = "nanovllm_observed"
# Arguments of attention that change nothing here: masks say the same, or they are for training.
HARMLESS = {"dropout", "scaling", "sliding_window", "is_causal", "position_ids", "use_cache"}
SUPPORTED = {"softcap", "s_aux"}  # arguments that AttentionShape has
NUM_TESTED = 64  # tokens of the test of independence
MAX_ROUNDING = 0.05  # a relative change, far above that of 16-bit numbers


class PagedStep(NamedTuple):
    """What attention needs of a step. The family's code passes it on as a keyword argument."""

    batch: Batch
    kv_caches: list[Tensor]
    backend: Backend
    # For each attention module of the family its index among the layers, and its shape.
    shapes: dict[nn.Module, tuple[int, AttentionShape]]


def attend_paged(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    paged_step: PagedStep,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as a function of transformers.

    `query` is [1, num_heads, num_tokens, head_dim], the result [1, num_tokens, num_heads,
    head_dim].
    """
    layer, shape = paged_step.shapes[module]
    sinks = {"sinks": options["s_aux"]} if shape.has_sinks else {}
    batch = paged_step.batch if shape.window is None else paged_step.batch.for_windows
    query, key, value = [each[0].transpose(0, 1).contiguous() for each in (query, key, value)]
    kv_cache = paged_step.kv_caches[layer]
    paged_step.backend.store_kvcache(key, value, kv_cache, batch.slot_mapping)
    return paged_step.backend.attend(query, kv_cache, batch, shape, **sinks)[None], None


class ObservedMask(NamedTuple):
    """What transformers passes to attention in place of a mask, while a model is observed."""

    window: int | None


def observe(
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
    given = {name for name, option in options.items() if option is not None}
    unknown = given - HARMLESS - SUPPORTED
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


AttentionInterface.register(PAGED, attend_paged)  # without a mask function: no masks are made
AttentionInterface.register(OBSERVED, observe)
AttentionMaskInterface.register(OBSERVED, observe_mask)


class AnyDecoder(CausalLM):
    """A decoder of transformers, and its family's class as the output head."""

    def __init__(self, spec: "AnyDecoderSpec", backend: Backend, tp: TensorParallel) -> None:
        super().__init__(nn.Identity(), None)
        with torch.no_grad():
            model = borrowed.make_model(spec.config, spec.dtype)
            borrowed.fix_rope(model, spec.max_model_len)
        modules = map(model.get_submodule, spec.attention_modules)
        self.shapes = dict(zip(modules, enumerate(spec.shapes)))
        self.stored_rows = dict(borrowed.find_stored_rows(model))
        self.title = f"{type(model).__name__} of transformers {transformers.__version__}"
        called = {model.get_submodule(name) for name in spec.called_modules}
        replace_layers(model, called, spec.dtype, tp)
        self.kept = sorted({type(module).__name__ for module in list_kept(model)})
        borrowed.set_functions(model, PAGED, experts="eager")
        self.model, self.decoder_name = borrowed.take_decoder(model, spec.output_class)
        self.head = model
        self.backend = backend
        self.max_model_len = spec.max_model_len
        self.vocab_size = spec.vocab_size

    def forward(self, batch: Batch, kv_caches: list[Tensor]) -> Tensor:
        step = PagedStep(batch, kv_caches, self.backend, self.shapes)
        output = borrowed.run_decoder(
            self.model, batch.input_ids[None], batch.positions[None], paged_step=step
        )
        return output.last_hidden_state[0].index_select(0, batch.logits_indices)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return borrowed.run_head(self.head, hidden)

    @torch.inference_mode()
    def check_loaded(self) -> None:
        """Raise ValueError if tokens reach others in another way than by attention.

        No token attends to another one here. A token must therefore keep its hidden state to the
        last bit when all others get other ids and positions. In another order, and beside fewer
        others, only its rounding may change.
        """
        generator = torch.Generator().manual_seed(0)

        def draw(limit: int) -> Tensor:
            return torch.randint(limit, (2, NUM_TESTED), generator=generator, device="cpu")

        ids, other_ids = draw(self.vocab_size)
        positions, other_positions = draw(self.max_model_len)
        ends = [0, -1]
        positions[ends] = 0
        other_positions[ends] = self.max_model_len - 1
        borrowed.set_functions(self.head, OBSERVED, experts="batched_mm")
        hidden = self._run_alone(ids, positions)
        is_independent = True
        for kept in (1, NUM_TESTED // 2, NUM_TESTED - 2):
            is_kept = torch.arange(NUM_TESTED, device="cpu") == kept
            changed = self._run_alone(
                ids.where(is_kept, other_ids), positions.where(is_kept, other_positions)
            )
            is_independent &= torch.equal(changed[kept], hidden[kept])
        half = NUM_TESTED // 2
        fewer = self._run_alone(ids[:half].flip(0), positions[:half].flip(0)).flip(0)
        change = (fewer - hidden[:half]).norm() / hidden[:half].norm()
        borrowed.set_functions(self.head, PAGED, experts="eager")
        if not is_independent or change > MAX_ROUNDING:
            raise ValueError(
                f"{self.title} mixes tokens outside of attention, or depends on their number or"
                " their longest position, so a KV cache does not have all that a token needs"
            )
        rest = f"; runs as transformers has it: {', '.join(self.kept)}" if self.kept else ""
        report(f"model: {self.title}{rest}")

    def _run_alone(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Compute hidden states while no token attends to another one."""
        device = next(self.parameters()).device
        ids, positions = [each.to(device) for each in (ids, positions)]
        output = borrowed.run_decoder(
            self.model,
            ids[None],
            positions[None],
            attention_mask=torch.ones_like(ids[None]),
            observed_shapes={},
        )
        return output.last_hidden_state[0]

    def name_targets(self, own: dict[str, list[Target]]) -> Iterator[tuple[str, list[Target]]]:
        """Map names of stored tensors to where they go. `own` has the names of this model."""
        own = {name.replace(".matrix.", "."): targets for name, targets in own.items()}
        unused = set(own)
        for stored_name, rows in self.stored_rows.items():
            name = self.find_own_name(rows.parameter)
            unused.discard(name)
            targets = own[name]
            if rows.num_rows > 0:
                (target,) = targets
                matrix, row = divmod(rows.first, target.destination.shape[1])
                targets = [Target(target.destination[matrix][row : row + rows.num_rows])]
            yield normalize(stored_name), targets
        assert not unused, f"parameters that no stored tensor fills: {unused}"

    def find_own_name(self, name: str) -> str:
        """Return the name that a parameter of the family's class has here."""
        prefix = f"{self.decoder_name}."
        if name.startswith(prefix):
            return f"model.{name.removeprefix(prefix)}"
        return f"head.{name}"


@dataclass(frozen=True, kw_only=True)
class AnyDecoderSpec(ModelSpec):
    """What was observed of a decoder."""

    config: PretrainedConfig
    shapes: tuple[AttentionShape, ...]  # of all layers
    attention_modules: tuple[str, ...]  # their names
    called_modules: frozenset[str]  # of all modules whose forward ran
    output_class: type  # of the decoder
    max_model_len: int  # RoPE has the frequencies of such a context

    def attention_shape(self, layer: int) -> AttentionShape | None:
        return self.shapes[layer]

    def make_model(self, backend: Backend, tp: TensorParallel = ALONE) -> CausalLM:
        with torch.device("cpu"):
            return AnyDecoder(self, backend, tp)


def read_any_spec(
    config: PretrainedConfig,
    dtype: torch.dtype,
    num_ranks: int,
    quantization: Quantization,
    max_model_len: int | None,
) -> AnyDecoderSpec:
    """Observe a model of transformers.

    Raises ValueError if it cannot be served. The family's code can raise other exceptions.
    """
    if num_ranks > 1:
        raise ValueError("tensor_parallel_size must be 1")
    if config.is_encoder_decoder:
        raise ValueError("encoder-decoders are not supported")
    with torch.no_grad():
        model = borrowed.make_model(config, dtype)
        borrowed.set_functions(model, OBSERVED, experts="batched_mm")
        max_len = config.max_position_embeddings
        if getattr(config, "rope_parameters", None):
            max_len = read_max_len(config, max_model_len)
        max_model_len = max_model_len or max_len
        borrowed.fix_rope(model, max_model_len)  # "dynamic" cannot run on `meta`
        shapes, called, output_class = observe_attention(model)
    if len(shapes) != config.num_hidden_layers:
        problem = f"{len(shapes)} of {config.num_hidden_layers} layers have attention"
        raise ValueError(f"{problem}, and layers without it are not supported")
    names = {module: name for name, module in model.named_modules()}
    first, *_ = shapes.values()
    return AnyDecoderSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=len(shapes),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        scale=first.scale,
        windows=tuple(shape.window for shape in shapes.values()),
        tie_embeddings=bool(config.tie_word_embeddings),
        max_len=max_len,
        dtype=dtype,
        quantization=quantization,
        config=config,
        shapes=tuple(shapes.values()),
        attention_modules=tuple(names[module] for module in shapes),
        called_modules=frozenset(names[module] for module in called),
        output_class=output_class,
        max_model_len=max_model_len,
    )


def observe_attention(
    model: PreTrainedModel,
) -> tuple[dict[nn.Module, AttentionShape], set[nn.Module], type]:
    """Run the decoder once on `meta`.

    Return the shape of each attention module, in their order, all modules that were called, and the
    class of the output.
    """
    shapes: dict[nn.Module, AttentionShape] = {}
    called: set[nn.Module] = set()
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    nn.Module.to(model, "meta")  # the buffers
    decoder: Any = model.get_decoder()
    for module in decoder.modules():
        module.register_forward_pre_hook(lambda module, args: called.add(module))
    output = borrowed.run_decoder(decoder, ids, ids, attention_mask=ids + 1, observed_shapes=shapes)
    return shapes, called, type(output)
