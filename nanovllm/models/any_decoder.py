"""Any decoder of transformers, with this engine's paged KV cache and without a line for its family.

transformers takes attention from a table of functions. The one of this file stores the K/V of a
step, and attends through the block tables. All else is the family's own code, over one flat batch:

    ids, positions [1, num_tokens] -> embedding -> layers -> norm -> hidden [1, num_tokens, size]
                                                     |
                                attend_paged: store K/V, attend to each sequence's context

    rows of hidden whose logits are wanted -> the family's head -> logits

Nothing about a family is written down here. What a layer attends to is observed (observation.py).
Layers that compute the same as one of layers/ are replaced by it (recognized_layers.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from nanovllm.batch.batch import Batch
from nanovllm.checkpoints.quantization import Quantization
from nanovllm.checkpoints.tensor_files import normalize
from nanovllm.layers.attention import AttentionShape, Backend
from nanovllm.layers.linear import Target
from nanovllm.layers.tensor_parallel import ALONE, TensorParallel
from nanovllm.models import borrowed
from nanovllm.models.borrowed import VERSIONS as VERSIONS
from nanovllm.models.borrowed import StoredRows
from nanovllm.models.config_fields import read_max_len
from nanovllm.models.decoder import CausalLM
from nanovllm.models.observation import OBSERVED, mixes_tokens, observe
from nanovllm.models.recognized_layers import Replacement, check_ranks, list_kept
from nanovllm.models.spec import ModelSpec
from nanovllm.utils.helpers import report_once

PAGED = "nanovllm_paged"  # a name in transformers' table of attention functions


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


AttentionInterface.register(PAGED, attend_paged)  # without a mask function: no masks are made


class AnyDecoder(CausalLM):
    """A decoder of transformers, and its family's class as the output head."""

    def __init__(self, spec: "AnyDecoderSpec", backend: Backend, tp: TensorParallel) -> None:
        super().__init__(nn.Identity(), None)
        with torch.no_grad():
            model = borrowed.make_model(spec.config, spec.dtype)
            borrowed.fix_rope(model, spec.max_model_len)
            borrowed.set_functions(model, PAGED, experts="eager")
            modules = map(model.get_submodule, spec.attention_modules)
            self.shapes = dict(zip(modules, enumerate(spec.shapes)))
            self.stored_rows = self._find_stored_rows(model)
            self.prefix = normalize(f"{model.base_model_prefix}.")
            self.skipped_names = borrowed.list_skipped(model)
            Replacement(model, spec.called_modules, spec.dtype, tp).replace_layers()
        self.title = f"{type(model).__name__} of transformers {transformers.__version__}"
        self.kept = sorted({type(module).__name__ for module in list_kept(model)})
        self.model, self.decoder_name = borrowed.take_decoder(model, spec.output_class)
        self.head = model
        self.backend = backend
        self.max_model_len = spec.max_model_len
        self.vocab_size = spec.vocab_size

    def _find_stored_rows(self, model: PreTrainedModel) -> dict[str, StoredRows]:
        """Find where stored tensors go, and the names of those that can be tied.

        A tied output head is no tensor of its own. Another parameter that two modules share is
        missing in the checkpoint under one of its names, which is an error.
        """
        found = {normalize(name): rows for name, rows in borrowed.find_stored_rows(model)}
        stored_names = {rows.parameter: name for name, rows in found.items()}
        names = {module: f"{name}.weight" for name, module in model.named_modules()}
        embedding: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()
        self.embedding_name = stored_names[names[embedding]]
        if head is not None:
            self.head_name = stored_names[names[head]]
            if head.weight is embedding.weight:
                del found[self.head_name]
        return found

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
        """Raise ValueError if tokens reach others in another way than by attention."""
        borrowed.set_functions(self.head, OBSERVED, experts="batched_mm")
        is_mixed = mixes_tokens(self._run_alone, self.vocab_size, self.max_model_len)
        borrowed.set_functions(self.head, PAGED, experts="eager")
        if is_mixed:
            raise ValueError(
                f"{self.title} mixes tokens outside of attention, or depends on their number or"
                " their longest position, so a KV cache does not have all that a token needs"
            )
        rest = f"; runs as transformers has it: {', '.join(self.kept)}" if self.kept else ""
        report_once(f"model: {self.title}{rest}")

    def _run_alone(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Compute hidden states in float32 while no token attends to another one."""
        device = next(self.parameters()).device
        ids, positions = [each.to(device) for each in (ids, positions)]
        output = borrowed.run_decoder(
            self.model,
            ids[None],
            positions[None],
            attention_mask=torch.ones_like(ids[None]),
            observed_shapes={},
        )
        return output.last_hidden_state[0].float().nan_to_num()  # float16 can overflow

    def name_targets(self, own: dict[str, list[Target]]) -> Iterator[tuple[str, list[Target]]]:
        """Map names of stored tensors to where they go. `own` has the names of this model."""
        own = {name.replace(".ours.", "."): targets for name, targets in own.items()}
        for stored_name, rows in self.stored_rows.items():
            name = self.find_own_name(rows.parameter)
            yield stored_name, own.get(name) or [Target(self.find_rows(name, rows))]

    def find_own_name(self, name: str) -> str:
        """Return the name that a parameter of the family's class has here."""
        prefix = f"{self.decoder_name}."
        if name.startswith(prefix):
            return f"model.{name.removeprefix(prefix)}"
        return f"head.{name}"

    def find_rows(self, name: str, rows: StoredRows) -> Any:
        """Return rows of a stack of experts, which can be quantized, or a whole tensor."""
        path, _, attribute = name.rpartition(".")
        module = self.get_submodule(path)
        weight = getattr(getattr(module, "ours", module), attribute)
        if rows.num_rows == 0:
            return weight
        expert, row = divmod(rows.first, weight.shape[1])
        return weight[expert][row : row + rows.num_rows]


@dataclass(frozen=True, kw_only=True)
class AnyDecoderSpec(ModelSpec):
    """What was observed of a decoder."""

    config: PretrainedConfig
    shapes: tuple[AttentionShape, ...]  # of all layers
    attention_modules: tuple[str, ...]  # their names
    called_modules: frozenset[str]  # whose weights the family's code does not read
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
    if config.is_encoder_decoder:
        raise ValueError("encoder-decoders are not supported")
    with torch.no_grad():
        model = borrowed.make_model(config, dtype)
        max_len = config.max_position_embeddings
        if getattr(config, "rope_parameters", None):
            max_len = read_max_len(config, max_model_len)
        max_model_len = max_model_len or max_len
        borrowed.fix_rope(model, max_model_len)  # "dynamic" cannot run on `meta`
        observed = observe(model)
    shapes = observed.shapes
    if len(shapes) != config.num_hidden_layers:
        problem = f"{len(shapes)} of {config.num_hidden_layers} layers have attention"
        raise ValueError(f"{problem}, and layers without it are not supported")
    check_ranks(model, observed, num_ranks)
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
        called_modules=frozenset(names[module] for module in observed.called),
        output_class=observed.output_class,
        max_model_len=max_model_len,
    )
