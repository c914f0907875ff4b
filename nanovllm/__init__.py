"""nanovllm: a compact LLM inference engine, to read and to run.

Start reading at `llm.py` (what a caller sees), then follow one request:
engine/llm_engine.py -> scheduler.py -> block_manager.py -> model_runner.py -> models/decoder.py -> layers/.
"""

from pathlib import Path

from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

DEMO_MODEL = str(Path(__file__).parent / "demo_model")

__all__ = ["DEMO_MODEL", "LLM", "RequestOutput", "SamplingParams"]
