"""The start of a worker, from its weights to its first step.

    Worker           find the device, meet the other ranks, choose a backend, load the weights
    start_worker     prepare the first step:
    optimize           replace layers by optimized ones, on a GPU after self-tests
    profile            run the largest step, to measure what it leaves of a GPU's memory
    fill_memory        plan the size of the KV cache, allocate it, and capture CUDA graphs
    warm_up            compile the kernels of a GPU

All ranks run the same steps in the same order, because these have collective operations.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from nanovllm.batch.batch import Batch
from nanovllm.config import Config
from nanovllm.models import weights
from nanovllm.models.decoder import CausalLM
from nanovllm.models.spec import ModelSpec
from nanovllm.utils.checks import naming
from nanovllm.worker.cache_plan import (
    ENLARGE_ADVICE,
    CachePlan,
    CachePlanner,
    find_budget,
)
from nanovllm.worker.device import engine_settings
from nanovllm.worker.dummy_steps import (
    find_largest_step,
    make_dummy_batch,
    run_dummy_step,
    run_test_steps,
)
from nanovllm.worker.memory import release_free_memory, show_bytes
from nanovllm.worker.process_groups import Place
from nanovllm.worker.state_slots import StateSlots
from nanovllm.worker.worker import Worker, fill_pending


def start_worker(worker: Worker, sample: Callable[[Tensor], object]) -> None:
    """Prepare a loaded worker for its first step.

    `sample` receives the logits of each dummy step, because sampling takes memory and has kernels,
    too. On ranks 1 and up it does nothing.
    """
    config = worker.config
    worker.report(f"weights: {show_bytes(weights.count_bytes(worker.model))}")
    is_given = config.num_kvcache_blocks is not None or config.kvcache_memory_bytes is not None
    on_gpu = worker.device.type == "cuda"
    names = optimize(worker, worker.model)
    if names:
        advice = "enable_kernels=False runs layers/ and models/ as written"
        worker.report(f"optimized layers: {', '.join(names)}; {advice}")
    if on_gpu and not is_given:
        sample(profile(worker))
    fill_memory(worker)
    if on_gpu:
        warm_up(worker, sample)


def serve_rank(config: Config, spec: ModelSpec, directory: Path, place: Place) -> None:
    """Be rank 1 or up, until rank 0 disconnects."""
    worker = Worker(config, spec, directory, place)
    with engine_settings(worker.device):  # under torchrun, the caller's thread serves
        start_worker(worker, sample=lambda logits: None)
        worker.serve()
    worker.disconnect()


@torch.inference_mode(False)  # so that weights which are converted stay ordinary tensors
def optimize(worker: Worker, model: CausalLM) -> list[str]:
    """Replace layers by optimized ones. Return the names of their classes."""
    if worker.kernels is None:
        return []
    run = (lambda: run_test_steps(worker, model)) if worker.device.type == "cuda" else None
    names = worker.kernels.kernelize(model, worker.device, worker.spec.dtype, run)
    release_free_memory()  # of the weights that were replaced
    return names


def profile(worker: Worker) -> Tensor:
    """Run the largest step, in a KV cache of one block. Return its logits."""
    # A lane, because the graphs of a model with states write to one.
    plan = CachePlan(num_blocks=1, num_lanes=1)
    allocate_caches(worker, plan, worker.config.max_num_seqs)
    return run_dummy_step(worker, find_largest_step(worker))


def fill_memory(worker: Worker) -> None:
    """Give the worker a KV cache of the size that its options or its memory determine."""
    config = worker.config
    if config.num_kvcache_blocks is not None:  # no sequence is longer than all of them
        capacity = config.num_kvcache_blocks * worker.block_size
        worker.max_model_len = min(worker.max_model_len, capacity)
    own_bytes, origin = find_budget(config, worker.meter)
    # Ranks share block tables, so all of them have what the smallest budget allows.
    num_bytes, block_size = worker.tp.minimum([own_bytes, worker.block_size])
    if block_size != worker.block_size:
        raise ValueError(
            f"the ranks' attention backends prefer blocks of {block_size} and {worker.block_size}"
            " tokens: set kvcache_block_size"
        )
    plan = make_planner(worker).plan(num_bytes, origin)
    if config.max_model_len is not None and config.max_model_len > plan.num_tokens:
        raise ValueError(
            f"max_model_len={config.max_model_len} exceeds the capacity of the KV cache:"
            f" lower it to {plan.num_tokens}, or {ENLARGE_ADVICE}"
        )
    worker.max_model_len = min(worker.max_model_len, plan.num_tokens)
    worker.max_num_batched_tokens = plan.max_num_batched_tokens
    allocate_caches(worker, plan, plan.num_lanes)
    if worker.graphs is not None:
        prompts = [make_dummy_batch(worker, lens) for lens in ([2], [2, 1])]  # beside a decode
        worker.graphs.check(prompts, worker.tp.minimum)
    backend = f"{worker.backend.NAME} attention"
    worker.report(f"{worker.device}, {worker.spec.dtype}, {backend}; {plan.description}")


def warm_up(worker: Worker, sample: Callable[[Tensor], object]) -> None:
    """Run a chunk beside decodes, and then a decode. Attention has other kernels for many decodes.

    A step has no more sequences than rows of logits.
    """
    decodes = [1] * min(32, worker.max_num_logits - 1)
    sample(run_dummy_step(worker, [2, *decodes]))
    sample(run_dummy_step(worker, [1]))


def make_planner(worker: Worker) -> CachePlanner:
    """Find the bytes of a block and of a state slot, without memory for them."""

    def sum_bytes(**number: int) -> int:
        caches = worker.make_caches(torch.device("meta"), **number)
        return sum(cache.nbytes for cache in caches)

    def count_bytes(**number: int) -> int:  # that these add to an empty cache
        return sum_bytes(**number) - sum_bytes()

    block_bytes = count_bytes(num_blocks=1)  # in all layers
    window_block_bytes = 0
    window = worker.spec.window or 0  # without windows, no layer is in the second pool
    # A window of max_model_len tokens never leaves a block behind.
    if window < worker.max_model_len:
        window_block_bytes = count_bytes(num_window_blocks=1)
        block_bytes -= window_block_bytes
    return CachePlanner(
        config=worker.config,
        block_bytes=block_bytes,
        window_block_bytes=window_block_bytes,
        state_bytes=count_bytes(num_state_slots=1),
        block_size=worker.block_size,
        blocks_per_lane=worker.block_table_width,
        window=window,
    )


def make_step(worker: Worker) -> Callable[[Batch], Tensor]:
    """Return what a CUDA graph captures. It does not refer to the worker, which has the graphs."""
    model = worker.model
    kv_caches = worker.kv_caches
    newest_tokens = worker.newest_tokens
    return lambda batch: model(fill_pending(batch, newest_tokens), kv_caches)


def release_caches(worker: Worker) -> None:
    worker.graphs = None
    worker.kv_caches = []
    torch.cuda.empty_cache()  # no effect without a GPU


def allocate_caches(worker: Worker, plan: CachePlan, max_num_seqs: int) -> None:
    """Replace the KV cache by one of this size.

    Where there is a GPU, capture CUDA graphs of short steps, which read the cache, for up to
    `max_num_seqs` sequences.
    """
    release_caches(worker)
    problem = (
        f"no memory for {plan.num_blocks} blocks of {worker.block_size} tokens: lower"
        " num_kvcache_blocks, kvcache_block_size, kvcache_memory_bytes or max_num_seqs"
    )
    num_state_slots = StateSlots(worker.config, plan.num_lanes).count
    with naming(problem, RuntimeError):  # torch's own error on any device
        worker.kv_caches = worker.make_caches(
            worker.device, plan.num_blocks, plan.num_window_blocks, num_state_slots
        )
    worker.plan = plan
    if worker.kernels is not None and not worker.config.enforce_eager:
        worker.graphs = worker.kernels.make_cuda_graphs(
            make_step(worker),
            worker.model,
            worker.backend,
            make_dummy_batch(worker, [1] * min(max_num_seqs, worker.max_num_batched_tokens)),
            worker.device,
            worker.max_num_batched_tokens,
            worker.tp.minimum,
        )
