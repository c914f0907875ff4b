"""How many blocks of KV cache there is memory for.

bytes of a token  = 2 (K and V) * layers * KV heads of this rank * head_dim * bytes of a number
bytes of a block  = block size * bytes of a token
GPU               = min(gpu_memory_utilization * total, GPU_SHARE_OF_FREE * free before loading)
                    - weights - CUDA graphs - peak of the largest step
CPU               = CPU_SHARE * available once the weights are loaded / ranks
of either         = at most what max_num_seqs sequences of max_model_len can use
of several ranks  = what the smallest has: the block tables are the same on all
available         = what the machine and the cgroups around this process (version 2) have left, the least
"""

from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from nanovllm.config import Config
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.tensor_parallel import ALONE, TensorParallel
from nanovllm.models.decoder import ModelSpec
from nanovllm.sampling_params import SamplingParams

GPU_SHARE_OF_FREE = 0.95  # where others use the GPU, leave room for what they and the driver still allocate
CPU_SHARE = 0.25
ENLARGE = "give the cache more memory (num_kvcache_blocks, kvcache_memory_bytes, gpu_memory_utilization)"


class MemoryMeter:
    """Counts this engine's GPU memory from its making on, apart from other engines' in the process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.init()
            torch.cuda.empty_cache()  # what a former engine of this process left
            torch.cuda.reset_peak_memory_stats(device)
            self.reserved_before = torch.cuda.memory_reserved(device)
            self.free_before, self.total = torch.cuda.mem_get_info(device)

    def peak(self) -> int:
        """Bytes that this engine has had at the most: torch's, and what the driver needs for its libraries and graphs.

        Count reserved memory: a CUDA graph's pool keeps what it freed.
        """
        taken = self.free_before - torch.cuda.mem_get_info(self.device)[0]
        drivers = taken - (torch.cuda.memory_reserved(self.device) - self.reserved_before)
        return torch.cuda.max_memory_reserved(self.device) - self.reserved_before + max(0, drivers)


def profile_sampling(
    sample: Callable[[torch.Tensor, list[Sequence]], object],
    max_model_len: int,
    logits: torch.Tensor,
) -> None:
    """Sample profiling logits with each kind of SamplingParams.

    Peak memory is then measured and kernels are compiled. The most expensive kind comes last. The
    longest sequence decides how much memory penalties need.
    """
    costliest = SamplingParams(top_p=0.5, repetition_penalty=2.0, min_tokens=1, logprobs=20)
    kinds = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.5), costliest]
    for params in kinds:
        seqs: list[Sequence] = []
        for lane in range(len(logits)):
            num_tokens = max_model_len if lane == 0 else 1
            seq = Sequence(lane, [0] * num_tokens, params, stop_token_ids=frozenset([0]))
            seq.lane = lane
            seq.num_logits = 1
            seqs.append(seq)
        sample(logits, seqs)


def find_available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: the least of what the machine and its cgroups have left.

    What a cgroup uses includes files that nobody reads any more (inactive_file), which can be reclaimed.
    """
    left = [psutil.virtual_memory().available]
    groups = root / "proc/self/cgroup"
    own = Path(groups.read_text().partition("0::/")[2].strip() if groups.exists() else "")
    for group in (root / "sys/fs/cgroup" / each for each in (own, *own.parents)):  # in a container only the last may exist
        for limit in (group / "memory.max", group / "memory.high"):
            if limit.exists() and (num_bytes := limit.read_text().strip()) != "max":
                counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                left.append(int(num_bytes) - int((group / "memory.current").read_text()) + int(counts["inactive_file"]))
    return max(0, min(left))


def count_blocks(
    config: Config, spec: ModelSpec, block_size: int, max_model_len: int, meter: MemoryMeter,
    profile_run: Callable[[], object], tp: TensorParallel = ALONE,
) -> tuple[int, str]:  # fmt: skip
    """The number of blocks and a line that shows how it was found. Raises ValueError if there is memory for none."""
    block_bytes = block_size * 2 * spec.num_layers * tp.divide(spec.num_kv_heads)[0] * spec.head_dim * spec.dtype.itemsize
    useful = config.max_num_seqs * -(-max_model_len // block_size) * block_bytes
    budget = config.kvcache_memory_bytes if config.num_kvcache_blocks is None else config.num_kvcache_blocks * block_bytes
    origin = "as asked for"
    if budget is None and meter.device.type == "cuda":
        profile_run()
        share, peak = config.gpu_memory_utilization, meter.peak()
        budget = min(int(min(share * meter.total, GPU_SHARE_OF_FREE * meter.free_before)) - peak, useful)
        origin = f"min({share} * {_gb(meter.total)}, {GPU_SHARE_OF_FREE} * {_gb(meter.free_before)} free) - {_gb(peak)} taken"
    elif budget is None:
        available = find_available_memory()
        budget = min(int(available * CPU_SHARE / tp.size), useful)
        origin = f"{CPU_SHARE} * {_gb(available)} available / {tp.size} ranks"
    if budget == useful:
        origin = f"min({origin}, {_gb(useful)} for max_num_seqs)"
    num_blocks, least, minus_most = tp.minimum([budget // block_bytes, block_size, -block_size])
    if least != -minus_most:
        raise ValueError(f"the ranks' backends prefer blocks of {least} and {-minus_most} tokens: set kvcache_block_size")
    arithmetic = f"({origin} = {_gb(budget)}) / {block_bytes} B" + f", the smallest of {tp.size} ranks" * (tp.size > 1)
    if num_blocks < 1:
        raise ValueError(f"no memory for a KV cache: {arithmetic}; {ENLARGE}")
    return num_blocks, f"KV cache: {arithmetic} = {num_blocks} blocks of {block_size} = {num_blocks * block_size} tokens"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
