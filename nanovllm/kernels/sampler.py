"""What the optimized samplers for CPUs and GPUs have in common."""

from torch import Tensor

from nanovllm.batch import Filters, Noise, SamplingBatch
from nanovllm.kernels.fallback import report_once
from nanovllm.kernels.optimized_layer import OptimizedLayer
from nanovllm.layers.sampler import Sampler

# The fields that the kernels compute with.
_BATCH = {"noise", "filters"}
_NOISE = {"temperatures", "keys"}
_FILTERS = {"rows", "temperatures", "top_ks", "top_ps", "min_ps", "max_top_k"}


class OptimizedSampler(OptimizedLayer, Sampler):
    """Samples with kernels, unless a step has a field that they would ignore.

    Such a step is computed by the plain `Sampler`. A new sampling option therefore works without a
    change in kernels/, and only its steps become slower.
    """

    replaces = Sampler

    token_hashes: Tensor

    def forward(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        unknown = find_unknown_fields(batch)
        if unknown:
            names = ", ".join(unknown)
            report_once(f"the sampling kernels ignore {names}: such steps use the plain sampler")
            return super().forward(logits, batch)  # calls the plain `filter` and `draw`
        if batch.filters is not None:
            logits = self.fast_filter(logits, batch.filters)
        return self.fast_draw(logits, batch.noise)

    def fast_filter(self, logits: Tensor, filters: Filters) -> Tensor:
        """As `filter`."""
        raise NotImplementedError

    def fast_draw(self, logits: Tensor, noise: Noise | None) -> Tensor:
        """As `draw`."""
        raise NotImplementedError


def find_unknown_fields(batch: SamplingBatch) -> list[str]:
    """Return the fields of a step that kernels do not know. A field that is None has no effect."""
    unknown: list[str] = []
    for part, known in ((batch, _BATCH), (batch.noise, _NOISE), (batch.filters, _FILTERS)):
        if part is not None:
            names = sorted(vars(part).keys() - known)
            unknown += [name for name in names if getattr(part, name) is not None]
    return unknown
