"""What these scripts use of nanovllm besides LLM, bench.py and other commands.

These names can move. `bash .ci/gpu/run 240 dry` uses each of them.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
if not ON_GPU:
    # Triton reads this when it is imported. Its kernels then run on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from nanovllm import LLM
from nanovllm.benchmark.report import describe_hardware as describe_hardware
from nanovllm.benchmark.report import find_versions as find_versions
from nanovllm.benchmark.roofline import count_decode as count_decode
from nanovllm.benchmark.roofline import count_prefill as count_prefill
from nanovllm.benchmark.roofline import find_sizes as find_sizes
from nanovllm.benchmark.roofline import measure_peak_rates as measure_peak_rates
from nanovllm.benchmark.shapes import SHAPES as SHAPES
from nanovllm.kernels.attention_check import BatchShape, compare_with_torch
from nanovllm.kernels.bench import TOLERANCES, time_call
from nanovllm.kernels.cuda import attention, graphs
from nanovllm.layers import sampler
from nanovllm.layers.attention import AttentionShape
from nanovllm.models.architectures import read_spec as read_spec
from nanovllm.worker import executor, startup
from nanovllm.worker.dummy_steps import make_dummy_batch
from nanovllm.worker.process_groups import Place
from nanovllm.worker.startup import make_step


@dataclass(frozen=True)
class Shape:
    """A batch in which all sequences are alike, and the heads of a layer."""

    num_seqs: int
    context_len: int
    query_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    window: int | None = None


def check_attention(shape: Shape, dtype: str) -> tuple[Callable[[], object], float]:
    """Compare Triton's attention with torch's. Return a call to be timed, and the error."""
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    _, attend, error = compare_with_torch(
        attention,
        AttentionShape(*heads, scale=shape.head_dim**-0.5, window=shape.window),
        BatchShape(shape.num_seqs, shape.context_len, shape.query_len, shape.block_size),
        DEVICE,
        getattr(torch, dtype),
        TOLERANCES[dtype],
    )
    return attend, error


def time_attention(
    shape: Shape, dtype: str, tile: tuple[int, ...] | None = None, programs: int | None = None
) -> tuple[float, float]:
    """Return the seconds and the error with another choice of the Triton backend.

    A tile is (rows, tokens, warps, stages). Contexts are split for `programs` per multiprocessor.
    """
    changes: dict = {}
    if tile is not None:
        changes["_choose_tile"] = lambda *_: attention._Tile(*tile)
    if programs is not None:
        changes["_PROGRAMS_PER_PROCESSOR"] = programs
    attention._prepare.cache_clear()  # it keeps the kernels of the last choice
    with patch.multiple(attention, **changes) if changes else nullcontext():
        attend, error = check_attention(shape, dtype)
        return time_call(attend, DEVICE), error


@contextmanager
def one_rank_with_collectives() -> Iterator[None]:
    """Let engines have one rank that makes all collective calls, as each of several ranks does."""
    worker_class = executor.Worker

    def make_worker(*args):
        return worker_class(*args, Place(0, 0, dist.HashStore()))

    with patch.object(executor, "Worker", make_worker):
        yield


def disconnect(llm: LLM) -> None:
    llm.executor.worker.disconnect()


class NoModel(torch.nn.Module):
    """Stands for the decoder: returns the same rows in each step."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, batch, kv_caches):
        return self.rows[: len(batch.logits_indices)]

    def compute_logits(self, hidden):
        return hidden


def remove_the_gpu_work(llm: LLM, max_num_seqs: int, sampled: torch.Tensor) -> None:
    """Replace what a GPU does in an engine on the CPU. What its host does is left.

    Decodes are packed and copied as for CUDA graphs.
    """
    worker = llm.executor.worker
    model = NoModel(torch.zeros(max_num_seqs, 8))
    worker.model = model

    graphs.capture = lambda *_: SimpleNamespace(replay=lambda: None)
    batch = make_dummy_batch(worker, [1] * max_num_seqs)
    worker.graphs = graphs.CudaGraphs(make_step(worker), model, batch, worker.device)
    llm.model_runner.sampler = lambda logits, batch: sampled[: len(logits)]
    # Into pinned memory, and to the device.
    sampler.to_device = lambda array, device: torch.from_numpy(array).clone().clone()


@contextmanager
def only_decodes_replay_graphs(llm: LLM) -> Iterator[None]:
    """Let steps with prompts run eagerly."""
    captured = llm.executor.worker.graphs
    if captured is None:
        yield
        return
    largest = captured.largest
    captured.largest = largest._replace(num_long_queries=0)
    try:
        yield
    finally:
        captured.largest = largest


def count_graphs(llm: LLM) -> int:
    captured = llm.executor.worker.graphs
    return 0 if captured is None else len(captured.graphs)


@contextmanager
def time_start(clock: Callable[[], float]) -> Iterator[dict[str, list[float]]]:
    """Measure the seconds of the parts of a start. Those of a profile run include its graph.

    "MB of graphs" is memory of the driver, beside that of torch.
    """
    parts: dict[str, list[float]] = {"MB of graphs": []}
    capture_graphs = startup.capture_graphs

    def capture_and_measure(*args, **options) -> None:
        before = count_driver_bytes()
        capture_graphs(*args, **options)
        parts["MB of graphs"].append((count_driver_bytes() - before) / 1e6)

    owners = {
        "Worker": executor,
        "optimize": startup,
        "profile": startup,
        "capture_graphs": startup,
        "run_dummy_step": startup,
    }
    with ExitStack() as stack:
        stack.enter_context(patch.object(startup, "capture_graphs", capture_and_measure))
        for name, owner in owners.items():
            parts[name] = []
            timed = _timed(getattr(owner, name), clock, parts[name])
            stack.enter_context(patch.object(owner, name, timed))
        yield parts


def count_driver_bytes() -> int:
    if not ON_GPU:
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def watch_steps(llm: LLM, see: Callable[[], object]) -> None:
    """Call see() at the start of each step."""
    schedule = llm.scheduler.schedule

    def see_and_schedule():
        see()
        return schedule()

    llm.scheduler.schedule = see_and_schedule


def time_parts(llm: LLM, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Measure the parts of the following steps. Return seconds by the name of the part."""
    runner = llm.model_runner
    owners = {
        "schedule": llm.scheduler,
        "prepare_batch": runner,
        "execute": llm.executor.worker,
        "sample": runner,
        "postprocess": llm.scheduler,
    }
    seconds: dict[str, list[float]] = {}
    for name, owner in owners.items():
        seconds[name] = []
        setattr(owner, name, _timed(getattr(owner, name), clock, seconds[name]))
    return seconds


def _timed(function: Callable, clock: Callable[[], float], seconds: list[float]) -> Callable:
    def run_and_time(*args, **options):
        start = clock()
        result = function(*args, **options)
        seconds.append(clock() - start)
        return result

    return run_and_time
