"""The start of a worker, from its weights to its first step.

    load_worker      find the device, meet the other ranks, choose a backend, load the weights
    start_worker     prepare the first step:
    optimize           replace layers by optimized ones, on a GPU after self-tests
    profile            run the largest step, to measure what it leaves of a GPU's memory
    fill_memory        plan the size of the KV cache, allocate it, and capture CUDA graphs
    run_dummy_step     compile the kernels of a GPU

All ranks run the same steps in the same order, because these have collective operations.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.checkpoints.tensor_files import open_weights
from nanovllm.config import MAX_DRAFT_STEP, Config
from nanovllm.layers import attention
from nanovllm.layers.tensor_parallel import ALONE
from nanovllm.models import weights
from nanovllm.models.spec import ModelSpec
from nanovllm.utils.checks import naming
from nanovllm.utils.terminal import report
from nanovllm.worker.cache_plan import ENLARGE_ADVICE, CacheUnits, plan_cache
from nanovllm.worker.device import engine_settings, find_device
from nanovllm.worker.dummy_steps import (
    find_largest_step,
    make_dummy_batch,
    run_dummy_step,
    run_test_steps,
)
from nanovllm.worker.memory import MemoryMeter, release_free_memory, show_bytes
from nanovllm.worker.process_groups import Place, connect
from nanovllm.worker.state_slots import StateSlots
from nanovllm.worker.worker import Worker, run_step

_DEFAULT_MAX_MODEL_LEN = 4096


def load_worker(
    config: Config, spec: ModelSpec, directory: Path, place: Place | None = None
) -> Worker:
    """Load one rank's share of the weights. `place` is None if there is only one rank.

    Raises ValueError for options that conflict with each other, the model or this machine.
    """
    if config.max_model_len is not None and config.max_model_len > spec.max_len:
        raise ValueError(
            f"max_model_len={config.max_model_len} exceeds the model's limit:"
            f" lower it to {spec.max_len}"
        )
    device = find_device(config.device, place.local_rank if place else None)
    tp = connect(device, config.tensor_parallel_size, place) if place else ALONE
    kernels = import_module("nanovllm.kernels") if config.enable_kernels else None
    backend: attention.Backend = attention
    block_size = config.kvcache_block_size or attention.PREFERRED_BLOCK_SIZE
    # Weights must stay ordinary tensors, which can be changed in place.
    with engine_settings(device), torch.inference_mode(False):
        if kernels is not None:
            backend, block_size = kernels.select_backend(
                config.attention_backend,
                device,
                spec.dtype,
                spec.attention_shapes,
                config.kvcache_block_size,
            )
        meter = MemoryMeter(device) if device.type == "cuda" else None
        with torch.device("cpu"):  # safetensors reads there, whatever the caller's default is
            files = open_weights(directory, config.load_format)
            model = weights.allocate_model(spec, backend, device, files, tp)
            if kernels is not None:
                kernels.speed_up_loading(model, device, spec.dtype)
            if files is None:
                weights.init_dummy_weights(model, config.seed)
            else:
                weights.load_checkpoint(model, files, spec.quantization.format)
    if tp.rank == 0:
        report(f"weights: {show_bytes(weights.count_bytes(model))}")
    # Rows of logits in a step: one per sequence, or more with drafts.
    num_rows = config.max_num_seqs
    if config.num_speculative_tokens:
        num_rows = max(num_rows, MAX_DRAFT_STEP)
    return Worker(
        config=config,
        spec=spec,
        device=device,
        tp=tp,
        kernels=kernels,
        backend=backend,
        block_size=block_size,
        max_model_len=config.max_model_len or min(spec.max_len, _DEFAULT_MAX_MODEL_LEN),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_logits=min(num_rows, config.max_num_batched_tokens),
        model=model,
        meter=meter,
    )


def start_worker(worker: Worker, sample: Callable[[Tensor], object]) -> None:
    """Prepare a loaded worker for its first step.

    `sample` receives the logits of each dummy step, because sampling takes memory and has kernels,
    too. On ranks 1 and up it does nothing.
    """
    config = worker.config
    is_given = config.num_kvcache_blocks is not None or config.kvcache_memory_bytes is not None
    on_gpu = worker.device.type == "cuda"
    optimize(worker)
    if on_gpu and not is_given:
        sample(profile(worker))
    fill_memory(worker)
    if on_gpu:
        # A chunk beside decodes, and then a decode. Attention has other kernels for many decodes.
        decodes = [1] * min(32, worker.max_num_logits)
        sample(run_dummy_step(worker, [2, *decodes]))
        sample(run_dummy_step(worker, [1]))


def serve_rank(config: Config, spec: ModelSpec, directory: Path, place: Place) -> None:
    """Be rank 1 or up, until rank 0 disconnects."""
    worker = load_worker(config, spec, directory, place)
    with engine_settings(worker.device):  # under torchrun, the caller's thread serves
        start_worker(worker, sample=lambda logits: None)
        worker.serve()
    worker.disconnect()


@torch.inference_mode(False)  # so that weights which are converted stay ordinary tensors
def optimize(worker: Worker) -> None:
    """Replace layers by optimized ones."""
    if worker.kernels is None:
        return
    run = (lambda: run_test_steps(worker)) if worker.device.type == "cuda" else None
    names = worker.kernels.kernelize(worker.model, worker.device, worker.spec.dtype, run)
    release_free_memory()  # of the weights that were replaced
    if names and worker.tp.rank == 0:
        advice = "enable_kernels=False runs layers/ and models/ as written"
        report(f"optimized layers: {', '.join(names)}; {advice}")


def profile(worker: Worker) -> Tensor:
    """Run the largest step, in a KV cache of one block. Return its logits."""
    allocate(worker, num_blocks=1, num_window_blocks=0, num_lanes=0)
    capture_graphs(worker, worker.config.max_num_seqs, only_largest=True)
    return run_dummy_step(worker, find_largest_step(worker))


def fill_memory(worker: Worker) -> None:
    """Give the worker a KV cache of the size that its options or its memory determine."""
    config = worker.config
    if config.num_kvcache_blocks is not None:  # no sequence is longer than all of them
        capacity = config.num_kvcache_blocks * worker.block_size
        worker.max_model_len = min(worker.max_model_len, capacity)
    # A window of max_model_len tokens never leaves a block behind.
    window = worker.spec.window
    has_second_pool = window is not None and window < worker.max_model_len
    plan = plan_cache(
        config,
        worker.meter,
        CacheUnits(
            block_bytes=count_cache_bytes(worker, 1, 0 if has_second_pool else 1, 0),
            window_block_bytes=count_cache_bytes(worker, 0, 1 if has_second_pool else 0, 0),
            state_bytes=count_cache_bytes(worker, 0, 0, 1),
            block_size=worker.block_size,
            max_model_len=worker.max_model_len,
            window=window or 0,
        ),
        worker.tp,
    )
    if config.max_model_len is not None and config.max_model_len > plan.num_tokens:
        raise ValueError(
            f"max_model_len={config.max_model_len} exceeds the capacity of the KV cache:"
            f" lower it to {plan.num_tokens}, or {ENLARGE_ADVICE}"
        )
    worker.max_model_len = min(worker.max_model_len, plan.num_tokens)
    worker.max_num_batched_tokens = plan.max_num_batched_tokens
    allocate(worker, plan.num_blocks, plan.num_window_blocks, plan.num_lanes)
    capture_graphs(worker, plan.num_lanes)
    if worker.tp.rank == 0:
        backend = f"{worker.backend.NAME} attention"
        report(f"{worker.device}, {worker.spec.dtype}, {backend}; {plan.describe()}")


def count_cache_bytes(
    worker: Worker, num_blocks: int, num_window_blocks: int, num_state_slots: int
) -> int:
    """Count the bytes of caches, without memory for them."""
    sizes = (num_blocks, num_window_blocks, num_state_slots)
    return sum(cache.nbytes for cache in worker.make_caches(*sizes, torch.device("meta")))


def allocate(worker: Worker, num_blocks: int, num_window_blocks: int, num_lanes: int) -> None:
    """Replace the KV cache by one of this size, which has no CUDA graphs yet.

    If num_window_blocks is 0, there is one pool of blocks for all layers.
    """
    # Release the old caches before new ones are allocated.
    worker.graphs = None
    worker.kv_caches = []
    torch.cuda.empty_cache()  # no effect without a GPU
    num_state_slots = StateSlots(worker.config, num_lanes).count
    problem = (
        f"no memory for {num_blocks} blocks of {worker.block_size} tokens:"
        " lower num_kvcache_blocks, kvcache_block_size or kvcache_memory_bytes, or max_num_seqs if"
        " the model has recurrent states or windows"
    )
    with naming(problem, RuntimeError):  # torch's own error on any device
        worker.kv_caches = worker.make_caches(
            num_blocks, num_window_blocks or num_blocks, num_state_slots, worker.device
        )
    worker.num_blocks = num_blocks
    worker.num_window_blocks = num_window_blocks
    worker.num_lanes = num_lanes


def make_step(worker: Worker) -> Callable[[Batch], Tensor]:
    """Return what a CUDA graph captures. It does not refer to the worker, which has the graphs."""
    return partial(run_step, worker.model, worker.kv_caches, worker.newest_tokens)


def capture_graphs(worker: Worker, num_lanes: int, only_largest: bool = False) -> None:
    """Capture CUDA graphs of decodes, where there is a GPU for them."""
    config = worker.config
    if worker.kernels is not None and not config.enforce_eager:
        worker.graphs = worker.kernels.capture_decode_steps(
            make_step(worker),
            worker.model,
            worker.backend,
            make_dummy_batch(worker, [1]),
            worker.device,
            max_num_seqs=min(num_lanes, worker.max_num_batched_tokens),
            only_largest=only_largest,
        )
