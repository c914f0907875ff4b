"""An engine's surroundings: the caller's torch settings, the current GPU, and freed memory."""

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager

import pytest
import torch
from conftest import greedy, random_prompt

from nanovllm import SamplingParams, kernels
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.penalties import Penalties
from nanovllm.engine.worker import Worker, find_device

GREEDY = greedy(6)
PROMPTS = [random_prompt(i, 5 + i) for i in range(4)]


@contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SURROUNDINGS: dict[str, Callable[[], list[AbstractContextManager]]] = {
    "autocast": lambda: [torch.autocast("cpu", dtype=torch.bfloat16)],
    "autocast float16": lambda: [torch.autocast("cpu", dtype=torch.float16)],
    "float64": lambda: [default_dtype(torch.float64)],
    "bfloat16": lambda: [default_dtype(torch.bfloat16)],
    "device": lambda: [torch.device("meta")],
    "grad": lambda: [torch.enable_grad()],
    "inference": lambda: [torch.inference_mode()],
    "deterministic": lambda: [deterministic()],
    "all": lambda: [
        torch.autocast("cpu"),
        default_dtype(torch.float64),
        torch.device("meta"),
        deterministic(),
    ],
}


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_the_callers_settings_change_nothing(tiny, make_llm, surroundings, backend):
    kinds = [
        {},
        {"presence_penalty": 1.0, "repetition_penalty": 1.3},
        {"temperature": 0.9, "top_p": 0.8, "min_p": 0.01},
        {"logprobs": 2, "min_tokens": 2},
    ]
    params = [
        SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "seed": 5, **kind}) for kind in kinds
    ]

    def serve(llm):
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        return [(o["token_ids"], o["finish_reason"]) for o in outputs]

    llm = make_llm(attention_backend=backend)
    expected = serve(make_llm(attention_backend=backend))
    with ExitStack() as stack:
        for context in SURROUNDINGS[surroundings]():
            stack.enter_context(context)
        before = (
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.is_autocast_enabled("cpu"),
            torch.is_grad_enabled(),
        )
        for engine in (llm, make_llm(attention_backend=backend)):  # made outside, made within
            assert serve(engine) == expected
        after = (
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.is_autocast_enabled("cpu"),
            torch.is_grad_enabled(),
        )
        assert before == after
    assert serve(llm) == expected, "and nothing wrong is left in the prefix cache"


def test_the_engines_gpu_is_the_current_one(make_llm, monkeypatch):
    """It is current while the engine starts and computes. Otherwise the caller's is."""
    current, seen = ["the caller's"], set()

    @contextmanager
    def device_index(index):
        current.append(f"the engine's, {index}")
        try:
            yield
        finally:
            current.pop()

    def watch(owner, name):
        original = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda *args, **options: seen.add((name, current[-1])) or original(*args, **options),
        )

    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    steps = [
        (Worker, "compute"),
        (ModelRunner, "prepare_sampling"),
        (Penalties, "apply"),
    ]
    parts = [
        (kernels, "select_backend"),
        (Worker, "_allocate"),
        (kernels, "capture_decode_steps"),
        *steps,
    ]
    for owner, name in parts:
        watch(owner, name)
    llm = make_llm()
    assert current == ["the caller's"]
    llm.generate(PROMPTS, SamplingParams(presence_penalty=1.0, max_tokens=3), use_tqdm=False)
    assert seen == {(name, "the engine's, None") for _, name in parts} and current == [
        "the caller's"
    ]
    monkeypatch.setattr(ModelRunner, "prepare_batch", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert current == ["the caller's"]


def test_graphs_are_recorded_undisturbed(make_llm, monkeypatch):
    """CUDA graphs are captured without the caller's autocast."""
    seen: list[bool] = []
    monkeypatch.setattr(
        kernels,
        "capture_decode_steps",
        lambda *_, **__: seen.append(torch.is_autocast_enabled("cpu")),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        make_llm()
    assert set(seen) == {False}


def test_torchs_switches_are_obeyed(make_llm, monkeypatch):
    """The engine computes with the caller's float32 matmul precision."""
    llm, seen = make_llm(), []
    forward = type(llm.model_runner.sampler).forward
    monkeypatch.setattr(
        type(llm.model_runner.sampler),
        "forward",
        lambda *args: seen.append(torch.get_float32_matmul_precision()) or forward(*args),
    )
    torch.set_float32_matmul_precision("medium")
    try:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert set(seen) == {"medium"} and torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_which_gpu_it_is(monkeypatch):
    """It is the GPU that is current when the engine is made, even if another one is later."""
    for name, value in {"is_available": True, "device_count": 4, "current_device": 2}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    names = "auto", "cuda", "cuda:1", "cpu"
    assert [str(find_device(name)) for name in names] == ["cuda:2", "cuda:2", "cuda:1", "cpu"]
    assert [str(find_device(name, local_rank=3)) for name in ("auto", "cuda", "cpu")] == [
        "cuda:3",
        "cuda:3",
        "cpu",
    ]
    assert [str(find_device("cuda:2", local_rank)) for local_rank in (0, 1)] == ["cuda:2", "cuda:3"]
    for name, local_rank in (("cuda", 4), ("cuda:2", 2), ("cuda:4", None)):
        with pytest.raises(ValueError, match="'cuda:4' is missing"):
            find_device(name, local_rank)
    with monkeypatch.context() as patch:
        patch.setattr(
            torch.cuda, "device_count", lambda: 1
        )  # as a launcher such as Slurm shows each rank its own
        assert str(find_device("cuda", local_rank=3)) == "cuda:0"
    assert find_device("cpu").index is None, "on a CPU, the caller's GPU stays the current one"


def test_exit_leaves_nothing_to_the_garbage_collector(make_llm):
    """The memory is free when exit returns, although the caller still has the engine."""
    llm = make_llm(max_num_seqs=4)
    llm.generate(PROMPTS, SamplingParams(repetition_penalty=1.3, max_tokens=3), use_tqdm=False)
    runner = llm.model_runner
    tensors = [
        *runner.executor.worker.kv_caches,
        runner.penalties.counts,
        *runner.executor.worker.model.parameters(),
    ]
    left = [weakref.ref(tensor) for tensor in tensors]
    gc.collect()
    gc.disable()
    try:
        del runner, tensors
        llm.exit()
        assert not any(ref() is not None for ref in left)
    finally:
        gc.enable()
