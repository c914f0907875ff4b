"""An engine uses kernels only where they work, and only for code that they know."""

import re
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from conftest import DEVICE, generate_ids, greedy, make_checkpoint, make_shape, random_prompt
from kernel_helpers import (
    CPU,
    all_kernels,
    make_spec,
    needs_compiler,
    needs_triton,
    optimize,
    triton_layers,
)

from nanovllm import SamplingParams
from nanovllm.kernels import replacement, select
from nanovllm.kernels.cpu import layers as cpu_layers
from nanovllm.kernels.cpu import library
from nanovllm.kernels.select import BACKENDS
from nanovllm.kernels.self_tests import check_backend
from nanovllm.layers import attention as torch_backend
from nanovllm.models.decoder import Attention
from nanovllm.utils.helpers import report_once


@all_kernels
def test_an_optimized_layer_is_named_after_the_class_that_it_replaces(language, device):
    layers = triton_layers() if language == "triton" else cpu_layers
    for kind in layers.OPTIMIZED_LAYERS:
        assert kind.__name__ == f"Fast{kind.replaces.__name__}"


@needs_triton
def test_fused_attention_needs_the_triton_backend():
    """It stores K/V as that backend does."""
    model = optimize(make_spec(torch.float32).make_model(torch_backend), "triton").model
    assert type(model.layers) is triton_layers().decoder.FastDecoderLayers
    assert type(model.layers[0].self_attn) is Attention


@needs_triton
def test_the_check_at_start_finds_wrong_kernels(monkeypatch):
    """Also those that ignore all but the first tile of a context, or do not combine splits."""
    backend = import_module("nanovllm.kernels.cuda.attention")
    store_kvcache = backend.store_kvcache

    def store_few(key, value, kv_cache, slots):
        """Leave most tokens to torch. The kernel has a program for each, in a slow interpreter."""
        store_kvcache(key[:40], value[:40], kv_cache, slots[:40])
        torch_backend.store_kvcache(key[40:], value[40:], kv_cache, slots[40:])

    if DEVICE.type == "cpu":
        monkeypatch.setattr(backend, "store_kvcache", store_few)
    state = torch.get_rng_state()
    check = partial(check_backend, backend, DEVICE, torch.float16, make_shape(2, 1), 16)
    with torch.device("meta"):
        check()
    assert torch.equal(torch.get_rng_state(), state)

    def attend_to_64(query, kv_cache, batch, shape):
        shorter = replace(batch, context_lens=batch.context_lens.clamp(max=64))
        return torch_backend.attend(query, kv_cache, shorter, shape)

    no_kernel = MagicMock(arg_names=[])
    for name, wrong in (("attend", attend_to_64), ("combine_splits_kernel", no_kernel)):
        with monkeypatch.context() as patch:
            patch.setattr(backend, name, wrong)
            with pytest.raises(RuntimeError, match="has an error of"):
                check()


def test_auto_skips_a_backend_that_fails_on_this_gpu(monkeypatch, capfd, forget_kernels):
    """For example a wheel that was not built for it. Requested by name, it raises an error."""

    def fail(*_):
        raise RuntimeError("no kernel image is available for execution on the device")

    failing = SimpleNamespace(
        PREFERRED_BLOCK_SIZE=256,
        KNOWN_FIELDS=None,
        reason_unavailable=lambda *_: None,
        make_cache=fail,
    )
    monkeypatch.setitem(sys.modules, BACKENDS["flash_attn"].module, None)
    monkeypatch.setitem(sys.modules, BACKENDS["triton"].module, failing)
    monkeypatch.setattr(
        select, "check_backend", lambda backend, device, *rest: check_backend(backend, CPU, *rest)
    )
    gpu_model = (torch.device("cuda"), torch.bfloat16, [make_shape()], None)
    assert select.select_backend("auto", *gpu_model) == (torch_backend, 16)
    reason = "'triton' cannot run here: the kernels fail on this GPU: RuntimeError('no kernel image"
    assert reason in capfd.readouterr().err
    with pytest.raises(ValueError, match="no kernel image"):
        select.select_backend("triton", *gpu_model)


def test_a_backend_is_checked_with_every_shape_of_the_model(monkeypatch, forget_kernels):
    shapes = [make_shape(), make_shape(head_dim=32), make_shape(scale=0.5)]
    checked = []

    def check(backend, device, dtype, shape, block_size):
        checked.append(shape)
        if shape.head_dim == 32:
            raise RuntimeError("wrong results")

    monkeypatch.setattr(select, "check_backend", check)
    gpu = torch.device("cuda")
    assert select.select_backend("torch", gpu, torch.float32, shapes[::2], None)[1] == 16
    assert checked == shapes[::2]
    with pytest.raises(ValueError, match="wrong results"):
        select.select_backend("torch", gpu, torch.float32, shapes, None)


@needs_triton
def test_small_blocks_on_a_gpu_are_explained_once(monkeypatch, capfd, forget_kernels):
    """As those of the two engines in example.py."""
    monkeypatch.setitem(sys.modules, BACKENDS["flash_attn"].module, None)
    monkeypatch.setattr(select, "check_backend", lambda *_: None)
    gpu_model = (torch.device("cuda"), torch.bfloat16, [make_shape()], 4)
    for _ in range(2):
        assert select.select_backend("auto", *gpu_model) == (torch_backend, 4)
    messages = capfd.readouterr().err
    assert messages.count("plain torch attention, which is slower with many or long") == 1
    assert "kvcache_block_size must be a power of two and at least 16, not 4" in messages


@pytest.fixture
def forget_kernels():
    """Clear the caches of what works here, before and after the test."""
    cached = [library.reason_unavailable, library.load]
    cached += [replacement.find_optimized_layers, report_once]
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@needs_triton
@pytest.mark.skipif(DEVICE.type == "cuda", reason="Triton works there")
def test_without_a_gpu_triton_layers_are_not_used(forget_kernels, capfd):
    assert replacement.find_optimized_layers("cuda", torch.float32) == []
    assert "plain torch layers, which are slow:" in capfd.readouterr().err


def test_without_a_compiler_the_engine_uses_torch(
    tiny, make_llm, forget_kernels, monkeypatch, capfd
):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="no-such-compiler"):
        make_llm(device="cpu", attention_backend="cpp")
    llm = make_llm(device="cpu")
    assert llm.executor.worker.backend is torch_backend
    messages = capfd.readouterr().err
    assert "plain torch attention, which is slower" in messages
    assert "plain torch layers, which are slow:" in messages
    assert "no-such-compiler" in messages
    prompt = random_prompt(0, 9)
    assert generate_ids(llm, [prompt], greedy(8)) == [tiny[1](prompt, 8)]


@needs_compiler
def test_an_engine_names_what_is_optimized(make_llm, capfd):
    make_llm(device="cpu")
    expected = r"nanovllm: optimized layers: .*\bRMSNorm\b.*; enable_kernels=False runs layers/"
    assert re.search(expected, capfd.readouterr().err)


@needs_compiler
def test_an_engine_loads_only_the_library_of_its_dtype(tmp_path, make_llm, forget_kernels):
    """A library that is loaded first by a request can be compiled while all others wait."""
    make_checkpoint(tmp_path, dtype=torch.bfloat16)
    llm = make_llm(str(tmp_path), device="cpu")
    assert library.load.cache_info().currsize == 1
    settings = [
        {},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"top_p": 0.9, "top_k": 5, "min_p": 0.1},
        {"top_p": 0.9, "repetition_penalty": 1.3, "logprobs": 2},
        {"min_tokens": 2, "stop_token_ids": [3]},
    ]
    for kind in settings:
        generate_ids(llm, [random_prompt(0, 20)], SamplingParams(max_tokens=3, **kind))
    assert library.load.cache_info().currsize == 1
