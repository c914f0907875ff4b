"""The roofline of a machine (Williams et al. 2009): the minimum time for a workload.

It is the necessary memory traffic and FLOPs divided by peak rates, which are measured, not taken
from a data sheet.
"""

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from nanovllm.benchmark.workloads import Request
from nanovllm.layers import attention
from nanovllm.layers.attention import AttentionShape
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.linear import Linear
from nanovllm.layers.quantized import Scheme
from nanovllm.models.moe import Experts, MoESpec
from nanovllm.models.spec import ModelSpec

NOTE = """\
% of roofline is the share of the best possible speed: the minimum time at the machine's peak rates,
divided by the measured time. Above 100% the peak rates are too low for this model, because it stays
in the processor's cache, or because torch, which measured them, multiplies matrices more slowly.
Then this column says nothing: compare tok/s."""


class PeakRates(NamedTuple):
    bytes_per_second: float
    flops_per_second: float
    matmul_dtype: str  # dtype of the measured GEMMs

    def __str__(self) -> str:
        bandwidth = f"{self.bytes_per_second / 1e9:.4g} GB/s"
        return f"{bandwidth} and {self.flops_per_second / 1e12:.4g} TFLOP/s in {self.matmul_dtype}"


def measure_peak_rates(device: torch.device, dtype: torch.dtype) -> PeakRates:
    """Measure memory bandwidth and GEMMs, for a model in `dtype`."""
    flops_per_second, matmul_dtype = find_matmul_rate(device, dtype)
    name = str(matmul_dtype).removeprefix("torch.")
    return PeakRates(measure_bandwidth(device), flops_per_second, name)


def measure_bandwidth(device: torch.device) -> float:
    """Measure the bytes/s of large copies on a GPU, and of large reductions on a CPU.

    A reduction only reads, as most of a decode does.
    """
    source = torch.rand(1 << 26, device=device)  # 256 MiB, more than a cache holds
    if device.type == "cuda":
        num_bytes = 2 * source.nbytes
        seconds = time_best("target.copy_(source)", source=source, target=source.clone())
    else:
        num_bytes = source.nbytes
        seconds = time_best("source.max()", source=source)
    return num_bytes / seconds


def find_matmul_rate(device: torch.device, dtype: torch.dtype) -> tuple[float, torch.dtype]:
    """Return the highest FLOP/s of GEMMs for a model in `dtype`, and the dtype that has it.

    A CPU may multiply float32 numbers faster than 16-bit ones. Without instructions for bfloat16 or
    float16, torch is much slower in these, and a large GEMM takes seconds. Smaller GEMMs therefore
    decide which dtype is measured.
    """
    if device.type == "cuda":
        return measure_matmul(device, dtype, side=8192), dtype
    rates = {each: measure_matmul(device, each, side=512) for each in (dtype, torch.float32)}
    best = max(rates, key=lambda each: rates[each])
    return measure_matmul(device, best, side=1024), best


def measure_matmul(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """Measure the best FLOP/s of GEMMs with matrices of `side` rows and columns."""
    left, right = torch.randn(2, side, side, device=device).to(dtype)
    return 2 * side**3 / time_best("left @ right", left=left, right=right)


def time_best(statement: str, **tensors: Tensor) -> float:
    """Time `statement` repeatedly for at least 0.3 s. Return the shortest time in seconds."""
    timer = Timer(statement, globals=tensors, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=0.3).times)


class ModelSizes(NamedTuple):
    matrices: int  # weights of the linear layers that a token uses, without the head
    experts: int  # weights of all experts
    used_share: float  # of the experts, by one token
    head: int  # weights of the output head
    state: int  # elements of recurrent states for each sequence
    attention: Counter[AttentionShape]  # number of layers of each shape


def find_sizes(spec: ModelSpec) -> ModelSizes:
    with torch.device("meta"):
        model = spec.make_model(attention)
    shapes = list(filter(None, map(spec.attention_shape, range(spec.num_layers))))
    matrices = 0
    experts = 0
    used_share = 0.0
    head = 0
    for layer in model.modules():
        if isinstance(layer, Linear):
            matrices += layer.weight.numel()
        elif isinstance(layer, Embedding):  # the last one is the head
            head = layer.weight.numel()
        elif isinstance(layer, Experts):
            assert isinstance(spec, MoESpec)
            num_weights = sum(parameter.numel() for parameter in layer.parameters())
            matrices += num_weights * spec.num_experts_per_tok // spec.num_experts
            experts += num_weights
            used_share = spec.num_experts_per_tok / spec.num_experts
    return ModelSizes(
        matrices=matrices,
        experts=experts,
        used_share=used_share,
        head=head,
        state=(spec.num_layers - len(shapes)) * spec.state_size,
        attention=Counter(shapes),
    )


def count_read_matrices(sizes: ModelSizes, num_tokens: int) -> float:
    """Return how many weights a step reads, without the head.

    Of the experts, these are the ones that at least one token uses. Their expected number is that
    of tokens that choose at random.
    """
    unused_share = (1 - sizes.used_share) ** num_tokens
    return sizes.matrices + sizes.experts * (1 - sizes.used_share - unused_share)


def count_prefill(sizes: ModelSizes, num_tokens: int) -> float:
    """Return the FLOPs of attention in a prefill of `num_tokens`, in all layers.

    A query attends to the tokens up to its own, in half of all pairs of tokens, or to a window.
    """
    flops = 0.0
    for shape, num_layers in sizes.attention.items():
        visible = min(num_tokens, shape.window or num_tokens)
        num_pairs = visible * (num_tokens - visible / 2)
        flops += num_layers * _count_pair_flops(shape) * num_pairs
    return flops


def count_decode(sizes: ModelSizes, context_lens: list[int]) -> tuple[int, int]:
    """Return FLOPs and read elements of K/V of attention in a decode step, in all layers.

    Each sequence reads its own context, also what it shares with others.
    """
    flops = 0
    elements = 0
    for shape, num_layers in sizes.attention.items():
        num_pairs = sum([min(each, shape.window or each) for each in context_lens])
        flops += num_layers * _count_pair_flops(shape) * num_pairs
        elements += num_layers * 2 * shape.num_kv_heads * shape.head_dim * num_pairs
    return flops, elements


def _count_pair_flops(shape: AttentionShape) -> int:
    """Return the FLOPs of a query and a token it attends to: query * key, weight * value."""
    return 2 * 2 * shape.num_heads * shape.head_dim


def compute_roofline_seconds(
    spec: ModelSpec,
    requests: list[Request],
    shared_prefix: int,
    cached_prefix: int,
    peak: PeakRates,
) -> float:
    """Compute the minimum seconds for `requests`: one prefill, then the fewest decode steps.

        prefill        2 * matrices * tokens + 2 * head * prompts + attention, in FLOPs
                       matrices + head, in elements to read
        decode step i  of the requests with more than i output tokens, whose contexts have i tokens
                       more than their prompts:
                       2 * (matrices + head) * sequences + attention, in FLOPs
                       matrices (of experts, those of all sequences) + head + K/V, in elements to
                       read, of which quantized weights take fewer bytes
                       2 * bytes of recurrent states * sequences, to read and to write

    A step is bound by FLOPs or by bandwidth, whichever takes longer. A shared prefix is computed
    once, without what is cached of it before the requests arrive. The FLOPs of a recurrent state
    are few and are not counted.
    """
    sizes = find_sizes(spec)
    num_repeats = len(requests) - 1
    lengths = [len(request.prompt) for request in requests]
    num_tokens = sum(lengths) - shared_prefix * num_repeats - cached_prefix
    flops: float = 2 * sizes.matrices * num_tokens + 2 * sizes.head * len(requests)
    flops += sum(count_prefill(sizes, length) for length in lengths)
    flops -= count_prefill(sizes, shared_prefix) * num_repeats + count_prefill(sizes, cached_prefix)
    num_weights = sizes.matrices + sizes.head
    # Weights whose codes are read as floats are quantized by the option, as in models/weights.py.
    quantization = spec.quantization
    stored = None if quantization.format is None else quantization.format.scheme
    bytes_per_weight = _count_bytes(1, stored or quantization.linear, spec.dtype)
    head_bytes = _count_bytes(sizes.head, quantization.head, spec.dtype)
    num_bytes = head_bytes + bytes_per_weight * count_read_matrices(sizes, num_tokens)
    seconds = max(flops / peak.flops_per_second, num_bytes / peak.bytes_per_second)
    for step in range(1, max(request.num_tokens for request in requests)):
        running = [request for request in requests if request.num_tokens > step]
        context_lens = [len(request.prompt) + step for request in running]
        flops, elements = count_decode(sizes, context_lens)
        flops += 2 * num_weights * len(running)
        num_bytes = head_bytes + elements * spec.dtype.itemsize
        num_bytes += bytes_per_weight * count_read_matrices(sizes, len(running))
        num_bytes += 2 * sizes.state * torch.float32.itemsize * len(running)
        seconds += max(flops / peak.flops_per_second, num_bytes / peak.bytes_per_second)
    return seconds


def _count_bytes(num_weights: int, scheme: Scheme | None, dtype: torch.dtype) -> float:
    return num_weights * (dtype.itemsize if scheme is None else scheme.bytes_per_weight)
