"""nanovllm: a compact LLM inference engine to read and to run.

The README says in which order to read it. The entry point is `LLM` in llm.py. kernels/ has
optimized versions of layers and attention. With enable_kernels=False, the engine runs without them.
"""

from pathlib import Path

from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"
DEMO_MODEL = str(Path(__file__).parent / "demo_model")

__all__ = ["DEMO_MODEL", "LLM", "RequestOutput", "SamplingParams", "StructuredOutputsParams"]
