"""What these scripts use of nanovllm besides LLM, bench.py and other commands.

These names can move. `bash .ci/gpu/run 240 dry` uses each of them.
"""

import os
import time
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

from nanovllm import LLM, kernels
from nanovllm.benchmark.report import describe_hardware as describe_hardware
from nanovllm.benchmark.report import find_versions as find_versions
from nanovllm.benchmark.roofline import count_attention as count_attention
from nanovllm.benchmark.roofline import find_sizes as find_sizes
from nanovllm.benchmark.roofline import measure_peak_rates as measure_peak_rates
from nanovllm.benchmark.workloads import SHAPES as SHAPES
from nanovllm.checkpoints.checkpoint import read_config as read_config
from nanovllm.engine import model_runner
from nanovllm.engine.model_runner import Sampled as Sampled
from nanovllm.kernels.bench import TOLERANCES, time_call
from nanovllm.kernels.cuda import attention as attention
from nanovllm.kernels.cuda import graphs, linear
from nanovllm.kernels.cuda import sampler as fast_sampler
from nanovllm.kernels.replacement import install
from nanovllm.kernels.self_tests import BatchShape, compare_with_torch
from nanovllm.layers import sampler
from nanovllm.layers.attention import AttentionShape
from nanovllm.layers.linear import ColumnParallelLinear
from nanovllm.layers.quantized import Scheme, multiply
from nanovllm.models.architectures import read_spec as read_spec
from nanovllm.sampling_params import SamplingParams
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
    attend, error = compare_with_torch(
        attention,
        AttentionShape(*heads, scale=shape.head_dim**-0.5, window=shape.window),
        BatchShape(shape.num_seqs, shape.context_len, shape.query_len, shape.block_size),
        DEVICE,
        getattr(torch, dtype),
        TOLERANCES[dtype],
    )
    return attend, error


def time_attention(
    shape: Shape,
    dtype: str,
    tile: tuple[int, ...] | None = None,
    programs: int | None = None,
    min_tokens: int | None = None,
) -> tuple[float, float]:
    """Return the seconds and the error with another choice of the Triton backend.

    A tile is (rows, tokens, warps, stages). Contexts are split for `programs` per multiprocessor,
    into splits of `min_tokens` and more.
    """
    changes: dict = {}
    if tile is not None:
        changes["_choose_tile"] = lambda *_: attention._Tile(*tile)
    if programs is not None:
        changes["_PROGRAMS_PER_PROCESSOR"] = programs
    if min_tokens is not None:
        changes["_LEAST_TOKENS"] = min_tokens
    with patch.multiple(attention, **changes) if changes else nullcontext():
        attend, error = check_attention(shape, dtype)
        return time_call(attend, DEVICE), error


def time_in_graph(calls: list[Callable[[], object]]) -> float:
    """Return the microseconds of a call, when a CUDA graph makes all of them. On a CPU, once."""
    calls[0]()
    if not ON_GPU:
        start = time.perf_counter()
        calls[0]()
        return 1e6 * (time.perf_counter() - start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    seconds = []
    for _ in range(5):
        start, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        start.record()
        for _ in range(5):
            graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / 5 / len(calls))
    return 1e6 * min(seconds)


class Products:
    """Linear layers of one shape, in bfloat16 or quantized, and an input of a few rows."""

    def __init__(self, shape: tuple[int, int], num_rows: int, num_layers: int, bits: int = 16):
        self.shape = shape
        self.layers = []
        for _ in range(num_layers):
            with DEVICE:
                layer = ColumnParallelLinear(shape[1], [("", shape[0])], False, torch.bfloat16)
            layer.requires_grad_(False)
            layer.weight.normal_(std=0.02)
            if bits < 16:
                layer.quantize(Scheme(bits, 64))
            with self._choose((1, 4)):
                install([linear.FastColumnParallelLinear], layer, torch.bfloat16)
            self.layers.append(layer)
        self.x = torch.randn(num_rows, shape[1], device=DEVICE, dtype=torch.bfloat16)

    def _choose(self, tile: tuple[int, int] | None):
        """A tile is (outputs, warps). Without one, the kernel for few rows is not used."""
        chosen = None if tile is None else linear._Tile(4, *tile, 0)
        return patch.object(linear, "choose_tile_of_few_rows", lambda *_: chosen)

    def list_calls(self, tile: tuple[int, int] | None) -> list[Callable[[], object]]:
        def call(layer):
            with self._choose(tile):
                return layer(self.x)

        return [lambda layer=layer: call(layer) for layer in self.layers]

    def check(self, tile: tuple[int, int]) -> None:
        layer = self.layers[0]
        with self._choose(tile):
            output = layer(self.x)
            rows = [layer(row[None]) for row in self.x]
        expected = multiply(self.x, layer.weight).float()
        error = ((output.float() - expected).norm() / expected.norm()).item()
        assert error < 0.01, f"{self.shape}, tile {tile}: the error is {error:.2g}"
        assert torch.equal(output, torch.cat(rows)), f"{self.shape}, tile {tile}: rows differ"


def time_sampler(
    num_rows: int, vocab_size: int, spread: float, temperature: float, block: int, num_warps: int
) -> float:
    """Return the microseconds of sampling from random logits, and check the tokens."""
    plain = sampler.Sampler(vocab_size).to(DEVICE)
    fast = sampler.Sampler(vocab_size).to(DEVICE)
    install([fast_sampler.FastSampler], fast, torch.bfloat16)
    logits = (spread * torch.randn(num_rows, vocab_size, device=DEVICE)).bfloat16()
    rows = []
    for seed in range(num_rows):
        params = SamplingParams(temperature=temperature)
        rows.append(SimpleNamespace(params=params, seed=seed, needs_filtering=False))
    batch = sampler.make_sampling_batch(rows, [7] * num_rows, vocab_size, DEVICE)
    with patch.multiple(fast_sampler, _BLOCK=block, _NUM_WARPS=num_warps):
        different = (fast(logits, batch) != plain(logits, batch)).sum().item()
        assert different == 0, f"{different} of {num_rows} tokens differ"
        return time_in_graph([lambda: fast(logits, batch)] * 10)


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
    worker.graphs.capture(minimum=list)
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
    kinds = captured.kinds
    captured.kinds = [kind for kind in kinds if kind.num_long_queries == 0]
    try:
        yield
    finally:
        captured.kinds = kinds


def count_graphs(llm: LLM) -> int:
    captured = llm.executor.worker.graphs
    return 0 if captured is None else len(captured.graphs)


@contextmanager
def time_start(clock: Callable[[], float]) -> Iterator[dict[str, list[float]]]:
    """Measure the seconds of the parts of a start. Those of a profile run include its graphs.

    "MB of graphs" is memory of the driver, beside that of torch.
    """
    parts: dict[str, list[float]] = {"MB of graphs": []}
    make_cuda_graphs = kernels.make_cuda_graphs

    def capture_and_measure(*args, **options) -> graphs.CudaGraphs | None:
        before = count_driver_bytes()
        captured = make_cuda_graphs(*args, **options)
        parts["MB of graphs"].append((count_driver_bytes() - before) / 1e6)
        return captured

    owners = {
        "Worker": executor,
        "optimize": startup,
        "profile": startup,
        "make_cuda_graphs": kernels,
        "run_dummy_step": startup,
        "sample_each_kind": model_runner.ModelRunner,
    }
    with ExitStack() as stack:
        stack.enter_context(patch.object(kernels, "make_cuda_graphs", capture_and_measure))
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
