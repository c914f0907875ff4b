"""The fused kernels against what the layers compute with torch, and life without a compiler."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from conftest import Oracle, make_checkpoint, random_prompt
from nanovllm import LLM, SamplingParams
from nanovllm.layers import cpu_kernels, kernels
from nanovllm.layers.cpu_kernels import TiledWeight
from nanovllm.layers.linear import silu_and_multiply
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import apply_rotary
from nanovllm.layers.sampler import Sampler, SamplingBatch

ON_GPU = torch.cuda.is_available()
needs_compiler = pytest.mark.skipif(which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler")
needs_bfloat16 = pytest.mark.skipif(
    not TiledWeight.can_hold(torch.empty(0, 2, dtype=torch.bfloat16)), reason="no compiler, or no bfloat16 instructions"
)
# Without a GPU, Triton's kernels run in its interpreter, on the CPU.
all_kernels = pytest.mark.parametrize(
    "module, device",
    [
        pytest.param("cpu_kernels", "cpu", marks=needs_compiler),
        pytest.param("gpu_kernels", "cuda" if ON_GPU else "cpu", marks=pytest.mark.skipif(not find_spec("triton"), reason="no triton")),
    ],
)
Computing = Callable[[str | None], AbstractContextManager[None]]


@pytest.fixture
def computing_with(monkeypatch: pytest.MonkeyPatch) -> Computing:
    """A context in which the layers compute with the kernels of a module, or with torch (None)."""

    @contextmanager
    def compute(name: str | None) -> Iterator[None]:
        module = name and import_module(f"nanovllm.layers.{name}")
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "_find_kernels", lambda device_type, dtype: module)
            yield

    return compute


@pytest.fixture
def no_kernels_known() -> Iterator[None]:
    """Forget which kernels are loaded, before and after."""
    for function in (cpu_kernels.reason_unavailable, cpu_kernels._library, kernels._find_kernels):
        function.cache_clear()
    yield
    for function in (cpu_kernels.reason_unavailable, cpu_kernels._library, kernels._find_kernels):
        function.cache_clear()


@all_kernels
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 200])
def test_layers(
    num_tokens: int, dtype: torch.dtype, tolerance: float, module: str, device: str, computing_with: Computing
) -> None:
    torch.manual_seed(0)
    wide = torch.randn(num_tokens, 3 * 5 * 20, device=device).to(dtype)
    heads = wide.split(100, dim=-1)[1].unflatten(-1, (5, 20))  # as from a fused projection: tokens lie apart
    angles = torch.randn(num_tokens, 1, 10, device=device)
    norm, long_norm = (RMSNorm(size, 1e-3, dtype).requires_grad_(False).to(device) for size in (20, 300))
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(long_norm.weight)
    for compute in (
        lambda: long_norm(wide),
        lambda: apply_rotary(heads, angles.cos(), angles.sin()),
        lambda: apply_rotary(heads, angles.cos(), angles.sin(), norm),
        lambda: silu_and_multiply(wide * 5),
    ):
        with computing_with(None):
            expected = compute()
        with computing_with(module):
            output = compute()
        assert output.dtype == dtype and output.shape == expected.shape and output.is_contiguous()
        torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)


@needs_bfloat16
@pytest.mark.parametrize("in_features, out_features", [(2, 1), (30, 64), (64, 100), (320, 16), (4096, 130)])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
def test_tiled_weight(in_features: int, out_features: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(out_features, in_features).bfloat16()
    tiled = TiledWeight(weight)
    bias = torch.randn(out_features).bfloat16() if has_bias else None
    for num_rows in (0, 1, 2, 5, 12, 13, 17, 32, 150):  # 4096 inputs: more rows than one pass takes
        x = torch.randn(num_rows, in_features).bfloat16()
        expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        atol = 1e-3 * in_features**0.5
        torch.testing.assert_close(tiled.multiply(x, bias).float(), expected, atol=atol, rtol=8e-3)
    ids = torch.tensor([out_features - 1, 0, out_features // 2])
    assert torch.equal(tiled.rows(ids), weight[ids])


@needs_bfloat16
@pytest.mark.parametrize("in_features, out_features", [(2, 1), (30, 16), (64, 100), (1030, 48)])
def test_gated_weight(in_features: int, out_features: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(2 * out_features, in_features).bfloat16()
    for num_rows in (0, 1, 12, 33, 150):
        x = torch.randn(num_rows, in_features).bfloat16() / in_features**0.5
        gate, up = (x.float() @ weight.float().T).chunk(2, dim=-1)
        output = TiledWeight(weight, gated=True).multiply(x)
        torch.testing.assert_close(output.float(), F.silu(gate) * up, atol=1e-3, rtol=8e-3)


@needs_bfloat16
@pytest.mark.parametrize("shape", [{}, {"attention_bias": True}, {"num_key_value_heads": 1}, {"head_dim": 10}], ids=str)
def test_fused_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]) -> None:
    """The same hidden states and K/V as layer by layer, in long steps and short ones, of prefills, pieces and decodes."""
    make_checkpoint(tmp_path, dtype=torch.bfloat16, max_position_embeddings=1024, **shape)
    llm = LLM(str(tmp_path), num_kvcache_blocks=64, kvcache_block_size=16, max_num_batched_tokens=640)
    runner, batches = llm.model_runner, []
    prepare_batch = runner.prepare_batch
    monkeypatch.setattr(runner, "prepare_batch", lambda seqs: batches.append(deepcopy(prepare_batch(seqs))) or batches[-1])
    llm.generate([random_prompt(n, n) for n in (600, 3, 100, 40)], SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
    assert {batch.max_seqlen_q for batch in batches} >= {1, 600} and any(len(b.context_lens) > 1 for b in batches)

    fused, model = runner.model.model.fused_layers, runner.model
    assert fused is not None
    kv_caches = [[torch.full_like(cache, poison) for cache in runner.kv_caches] for poison in (3.0, 5.0)]
    with torch.inference_mode():
        for batch in batches:
            monkeypatch.setattr(model.model, "fused_layers", fused)
            ours = model(batch, kv_caches[0])
            monkeypatch.setattr(model.model, "fused_layers", None)
            torch.testing.assert_close(ours, model(batch, kv_caches[1]), atol=0.1, rtol=0.05)
            slots = batch.slot_mapping
            for one, other in zip(*kv_caches):
                written = [cache.flatten(1, 2)[:, slots] for cache in (one, other)]
                torch.testing.assert_close(*written, atol=0.1, rtol=0.05)
    assert all((cache.flatten(1, 2) == 3.0).all((-2, -1)).any() for cache in kv_caches[0])  # and no other slots


@all_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [5, 1024, 5001])
def test_sample(vocab_size: int, dtype: torch.dtype, module: str, device: str, computing_with: Computing) -> None:
    """The same tokens as with torch, greedy rows and cut rows among them; of equal logits the first."""
    torch.manual_seed(0)
    logits = torch.randn(32, vocab_size, device=device).to(dtype)
    logits[0] = 1.0
    params = [SamplingParams(temperature=t, top_k=k) for t in (0.0, 0.7, 1.3, 1e-3) for k in (-1, 3)] * 4
    batch = SamplingBatch.build(params, list(range(32)), list(range(100, 132)), vocab_size, torch.device(device))
    sampler = Sampler(vocab_size, torch.device(device))
    with computing_with(None):
        expected = sampler(logits, batch)
    with computing_with(module):
        tokens = sampler(logits, batch)
        assert torch.equal(sampler(logits, SamplingBatch()), logits.float().argmax(-1))
        assert sampler(logits[:0], SamplingBatch()).shape == (0,)
    assert torch.equal(tokens, expected) and tokens[0] == 0


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler(
    tiny: tuple[str, Oracle],
    make_llm: Callable[..., LLM],
    no_kernels_known: None,
    monkeypatch: pytest.MonkeyPatch,
    compiler: str,
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(ValueError, match="compiler"):
        make_llm(attention_backend="cpp")
    llm = make_llm()
    assert llm.model_runner.backend.__name__.endswith(".torch")
    (output,) = llm.generate([random_prompt(0, 9)], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    assert output["token_ids"] == tiny[1](random_prompt(0, 9), 8)


@needs_compiler
def test_compiled_once(tmp_path: Path, no_kernels_known: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cpu_kernels.reason_unavailable(torch.float32) is None
    (library,) = (tmp_path / "nanovllm").iterdir()
    cpu_kernels._library.cache_clear()
    calls: list[tuple[str, ...]] = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **options: calls.append(command) or run(command, **options))
    cpu_kernels._library(torch.float32)
    assert len(calls) == 1 and "-E" in calls[0] and library.exists()
