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
    matmul_dtype: torch.dtype  # of the measured GEMMs

    def __str__(self) -> str:
        bandwidth = f"{self.bytes_per_second / 1e9:.4g} GB/s"
        return f"{bandwidth} and {self.flops_per_second / 1e12:.4g} TFLOP/s in {self.matmul_dtype}"


def measure_peak_rates(device: torch.device, dtype: torch.dtype) -> PeakRates:
    """Measure memory bandwidth and GEMMs, for a model in `dtype`."""
    return PeakRates(measure_bandwidth(device), *find_matmul_rate(device, dtype))


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
    dense: int  # weights of the linear layers that every token uses, without the head
    experts: int  # weights of all experts
    used_share: float  # of the experts, by one token
    head: int  # weights of the output head
    state: int  # elements of recurrent states for each sequence
    attention: Counter[AttentionShape]  # number of layers of each shape

    def count_used(self, num_tokens: int) -> float:
        """Return how many weights at least one of the tokens uses, without the head.

        Their expected number is that of tokens that choose experts at random.
        """
        return self.dense + self.experts * (1 - (1 - self.used_share) ** num_tokens)


def find_sizes(spec: ModelSpec) -> ModelSizes:
    with torch.device("meta"):
        model = spec.make_model(attention)
    dense = 0
    experts = 0
    head = 0
    for layer in model.modules():
        if isinstance(layer, Linear):
            dense += layer.weight.numel()
        elif isinstance(layer, Embedding):  # the last one is the head
            head = layer.weight.numel()
        elif isinstance(layer, Experts):
            experts += sum(map(Tensor.numel, layer.parameters()))
    used_share = 1.0
    if isinstance(spec, MoESpec):
        used_share = spec.num_experts_per_tok / spec.num_experts
    shapes = Counter(filter(None, map(spec.attention_shape, range(spec.num_layers))))
    return ModelSizes(
        dense=dense,
        experts=experts,
        used_share=used_share,
        head=head,
        state=(spec.num_layers - shapes.total()) * spec.state_size,
        attention=shapes,
    )


Span = tuple[int, int]  # the positions of the tokens of a sequence that a step computes: start, end


def count_attention(sizes: ModelSizes, spans: list[Span]) -> tuple[float, int]:
    """Return FLOPs and read elements of K/V of attention in a step, in all layers.

    A query attends to the tokens up to its own, or to those in a window. Each sequence reads the
    K/V of earlier steps, also those that it shares with others.
    """
    flops = 0.0
    elements = 0
    for shape, num_layers in sizes.attention.items():
        num_pairs = 0
        num_read = 0
        for start, end in spans:
            window = shape.window or end
            num_pairs += _count_pairs(end, window) - _count_pairs(start, window)
            num_read += min(start, window - 1)
        # A pair of a query and a token costs query * key and weight * value.
        flops += num_layers * 2 * 2 * shape.num_heads * shape.head_dim * num_pairs
        elements += num_layers * 2 * shape.num_kv_heads * shape.head_dim * num_read
    return flops, elements


def _count_pairs(num_tokens: int, window: int) -> int:
    """Return the number of pairs of one of the first `num_tokens` and a token it attends to."""
    visible = min(num_tokens, window)
    return visible * (visible + 1) // 2 + visible * (num_tokens - visible)


def compute_roofline_seconds(
    spec: ModelSpec,
    requests: list[Request],
    shared_prefix: int,
    cached_prefix: int,
    peak: PeakRates,
) -> float:
    """Compute the minimum seconds for `requests`: one prefill, then the fewest decode steps.

    A shared prefix is computed once, without what is cached of it before the requests arrive.
    Decode step i computes a token of each request with more than i output tokens.
    """
    starts = [cached_prefix] + [shared_prefix] * (len(requests) - 1)
    steps = [[(start, len(request.prompt)) for start, request in zip(starts, requests)]]
    for step in range(1, max(request.num_tokens for request in requests)):
        ends = [len(each.prompt) + step for each in requests if each.num_tokens > step]
        steps.append([(end - 1, end) for end in ends])
    sizes = find_sizes(spec)
    return sum(compute_step_seconds(spec, sizes, spans, peak) for spans in steps)


def compute_step_seconds(
    spec: ModelSpec, sizes: ModelSizes, spans: list[Span], peak: PeakRates
) -> float:
    """Compute the minimum seconds for one step, in which each sequence samples a token.

        FLOPs    2 * matrices * tokens + 2 * head * sequences + attention
        bytes    matrices (of experts, those of all tokens) + head + K/V of earlier steps
                 + recurrent states in float32, which are written, and read by all spans but those
                 that start at 0

    Quantized matrices have the bytes of the checkpoint's codes if these are kept, and otherwise
    those of the option, as the head.

    A step is bound by FLOPs or by bandwidth, whichever takes longer. The FLOPs of a recurrent state
    are few and are not counted.
    """
    num_tokens = sum(end - start for start, end in spans)
    flops, elements = count_attention(sizes, spans)
    flops += 2 * sizes.count_used(1) * num_tokens + 2 * sizes.head * len(spans)
    quantization = spec.quantization
    # Weights whose codes are read as floats are quantized by the option, as in choose_scheme of
    # checkpoints/quantization.py.
    stored = quantization.format and quantization.format.scheme
    linear = stored or quantization.linear
    num_bytes = _count_bytes(sizes.count_used(num_tokens), linear, spec.dtype)
    num_bytes += _count_bytes(sizes.head, quantization.head, spec.dtype)
    num_bytes += elements * spec.dtype.itemsize
    for start, _ in spans:
        num_bytes += (2 if start else 1) * sizes.state * torch.float32.itemsize
    return max(flops / peak.flops_per_second, num_bytes / peak.bytes_per_second)


def _count_bytes(num_weights: float, scheme: Scheme | None, dtype: torch.dtype) -> float:
    return num_weights * (scheme.bytes_per_weight if scheme else dtype.itemsize)
