"""An engine neither follows nor changes its caller's torch settings and GPU, and frees memory."""

import gc
import weakref
from contextlib import ExitStack, contextmanager

import pytest
import torch
from conftest import generate_ids, greedy
from front_helpers import PROMPTS, interrupt_in

from nanovllm import DEMO_MODEL, LLM, SamplingParams, kernels
from nanovllm.engine import model_runner
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.worker import startup
from nanovllm.worker.device import find_device
from nanovllm.worker.worker import Worker


@contextmanager
def switched(switch, value, default):
    switch(value)
    try:
        yield
    finally:
        switch(default)


SETTINGS = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "float64": lambda: switched(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16": lambda: switched(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "deterministic": lambda: switched(torch.use_deterministic_algorithms, True, False),
}
# Different parts of the sampler, and a prompt each.
PARAMS = [
    SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "seed": 5, **options})
    for options in (
        {},
        {"presence_penalty": 1.0, "repetition_penalty": 1.3},
        {"temperature": 0.9, "top_p": 0.8, "min_p": 0.01},
        {"logprobs": 2, "min_tokens": 2},
    )
]


def read_settings():
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_autocast_enabled("cpu"),
        torch.is_grad_enabled(),
    )


@pytest.mark.parametrize(
    "has_kernels, names",
    [
        (True, ["autocast", "float64", "device"]),
        (True, ["bfloat16", "inference", "deterministic"]),
        (False, [*SETTINGS]),
    ],
    ids=str,
)
def test_the_callers_settings_change_no_token_and_stay(make_llm, has_kernels, names):
    llm = make_llm(enable_kernels=has_kernels)
    expected = generate_ids(make_llm(enable_kernels=has_kernels), PROMPTS, PARAMS)
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(SETTINGS[name]())
        before = read_settings()
        made_within = make_llm(enable_kernels=has_kernels)
        for engine in (llm, made_within):
            assert generate_ids(engine, PROMPTS, PARAMS) == expected
        assert read_settings() == before
    assert generate_ids(llm, PROMPTS, PARAMS) == expected, "the prefix cache has wrong K/V"


def test_the_engine_computes_on_its_gpu_without_autocast(make_llm, monkeypatch):
    """This includes the capture of CUDA graphs. The caller's matmul precision is obeyed."""
    current = ["the caller's"]
    seen = set()

    @contextmanager
    def device_index(index):
        current.append(f"the engine's, {index}")
        try:
            yield
        finally:
            current.pop()

    def watch(owner, name):
        original = getattr(owner, name)

        def look_and_call(*args, **options):
            is_autocast = torch.is_autocast_enabled("cpu")
            precision = torch.get_float32_matmul_precision()
            seen.add((name, current[-1], is_autocast, precision))
            return original(*args, **options)

        monkeypatch.setattr(owner, name, look_and_call)

    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    parts = [
        (kernels, "select_backend"),
        (startup, "allocate_caches"),
        (kernels, "make_cuda_graphs"),
        (Worker, "compute"),
        (model_runner, "make_sampling_batch"),
        (ModelRunner, "sample"),
    ]
    for owner, name in parts:
        watch(owner, name)
    precision = switched(torch.set_float32_matmul_precision, "medium", "highest")
    with torch.autocast("cpu", dtype=torch.bfloat16), precision:
        llm = make_llm()
        assert current == ["the caller's"]
        generate_ids(llm, PROMPTS, SamplingParams(presence_penalty=1.0, max_tokens=3))
    assert seen == {(name, "the engine's, None", False, "medium") for _, name in parts}
    interrupt_in(Worker, "compute", lambda: llm.generate(PROMPTS))
    assert current == ["the caller's"]


@pytest.mark.parametrize(
    "name, local_rank, num_gpus, expected",
    [
        ("auto", None, 4, "cuda:2"),
        ("cuda", None, 4, "cuda:2"),
        ("cuda:1", None, 4, "cuda:1"),
        ("cuda", 3, 4, "cuda:3"),
        ("cpu", 3, 4, "cpu"),
        ("cuda:2", 1, 4, "cuda:3"),
        ("cuda", 3, 1, "cuda:0"),  # a launcher such as Slurm shows each rank its own
        ("cuda:2", 2, 4, "'cuda:4' is missing: torch finds 4 GPUs here"),
        ("cuda:4", None, 4, "'cuda:4' is missing"),
        ("cuda", None, 0, "'cuda:0' is missing: torch finds 0 GPUs .* device='cpu'"),
    ],
)
def test_the_device_is_the_current_gpu_or_the_ranks(
    monkeypatch, name, local_rank, num_gpus, expected
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    if "missing" in expected:
        with pytest.raises(ValueError, match=expected):
            find_device(name, local_rank)
    else:
        # On a CPU there is no index, so the caller's GPU stays the current one.
        assert str(find_device(name, local_rank)) == expected


@pytest.mark.parametrize("is_exited", [True, False])
def test_memory_is_freed_without_a_garbage_collection(make_llm, is_exited):
    """When exit returns, although the caller still has the engine, or with its last reference."""
    llm = make_llm(max_num_seqs=4)
    generate_ids(llm, PROMPTS, SamplingParams(repetition_penalty=1.3, max_tokens=3))
    worker = llm.executor.worker
    tensors = [*worker.kv_caches, *worker.model.parameters()]
    references = [weakref.ref(tensor) for tensor in tensors]
    del worker, tensors
    gc.collect()
    gc.disable()
    try:
        if is_exited:
            llm.exit()
        else:
            del llm
        assert all(reference() is None for reference in references)
    finally:
        gc.enable()


def test_dummy_weights_do_not_depend_on_the_default_dtype():
    tokens = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        with switched(torch.set_default_dtype, dtype, torch.float32):
            llm = LLM(DEMO_MODEL, load_format="dummy", dtype="float32", num_kvcache_blocks=8)
            tokens.append(generate_ids(llm, [[1, 2, 3]], greedy(8)))
    assert tokens[0] == tokens[1] == tokens[2]
