"""Which fields of a step the sampling kernels for CPUs and GPUs know.

With any other field the plain sampler computes the step. A new sampling option therefore works
without a change in kernels/, and only its own steps are slower.
"""

from nanovllm.batch.batch import Filters, Noise
from nanovllm.utils.helpers import report_once

_KNOWN = {"temperatures", "keys", "rows", "top_ks", "top_ps", "min_ps", "max_top_k"}


def has_unknown_fields(group: Filters | Noise) -> bool:
    """Return whether kernels would ignore a field. One that is None has no effect."""
    values = vars(group).items()
    unknown = [name for name, value in values if name not in _KNOWN and value is not None]
    if unknown:
        names = ", ".join(unknown)
        report_once(f"the sampling kernels ignore {names}: such steps use the plain sampler")
    return bool(unknown)
