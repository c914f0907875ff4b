"""nanovllm: a compact LLM inference engine, to read and to run.

Start reading at `llm.py` (what a caller sees), then follow one request:
engine/llm_engine.py -> scheduler.py -> block_manager.py -> model_runner.py -> executor.py -> models/decoder.py -> layers/.
kernels/ can be left for the end: nothing on that way knows of it but two lines of the executor and the runner.
"""

from pathlib import Path

from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

DEMO_MODEL = str(Path(__file__).parent / "demo_model")

__all__ = ["DEMO_MODEL", "LLM", "RequestOutput", "SamplingParams"]
