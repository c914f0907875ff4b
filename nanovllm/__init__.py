"""nanovllm: a compact LLM inference engine to read and to run.

engine/ is the core, which decides what each step computes. Features sit on the engine, the engine
drives the worker, the worker runs the model, and kernels replace layers. Each folder's __init__.py
lists its files. The README says in which order to read them. The entry point is `LLM` in llm.py.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.engine.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM

__version__ = "0.1.0"
DEMO_MODEL = str(Path(__file__).parent / "checkpoints" / "demo_model")

__all__ = ["DEMO_MODEL", "LLM", "RequestOutput", "SamplingParams", "StructuredOutputsParams"]


def __getattr__(name: str) -> Any:
    """Import LLM where it is first used, because torch takes seconds. Programs prepare before."""
    if name != "LLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nanovllm.llm import LLM

    return LLM
