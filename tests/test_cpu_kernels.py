"""The CPU's kernels against what the layers compute with torch, and life without a compiler."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from conftest import Oracle, random_prompt
from nanovllm import LLM, SamplingParams
from nanovllm.layers import cpu_kernels
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.rotary import apply_rotary
from nanovllm.layers.sampler import Sampler, SamplingBatch
from nanovllm.models.decoder import silu_and_multiply

needs_compiler = pytest.mark.skipif(cpu_kernels.reason_unavailable(torch.float32) is not None, reason="no C++ compiler")
both_dtypes = pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str)


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], torch.Tensor]], torch.Tensor]:
    """Runs a function as if there were no kernels."""

    def run(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(cpu_kernels, "can_compute", lambda x: False)
            return compute()

    return run


@pytest.fixture
def no_kernels_known() -> Iterator[None]:
    """Forget which kernels are loaded, before and after."""
    for function in (cpu_kernels.reason_unavailable, cpu_kernels._library):
        function.cache_clear()
    yield
    for function in (cpu_kernels.reason_unavailable, cpu_kernels._library):
        function.cache_clear()


@needs_compiler
@both_dtypes
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 700])
def test_layers(num_tokens: int, dtype: torch.dtype, tolerance: float, by_torch: Callable) -> None:
    torch.manual_seed(0)
    wide = torch.randn(num_tokens, 3 * 5 * 20).to(dtype)
    heads = wide.split(100, dim=-1)[1].unflatten(-1, (5, 20))  # as from a fused projection: tokens lie apart
    angles = torch.randn(num_tokens, 1, 10)
    norm = RMSNorm(20, 1e-3, dtype).requires_grad_(False)
    torch.nn.init.normal_(norm.weight)
    long_norm = RMSNorm(300, 1e-3, dtype).requires_grad_(False)
    torch.nn.init.normal_(long_norm.weight)
    for compute in (
        lambda: norm(heads),
        lambda: long_norm(wide),
        lambda: apply_rotary(heads, angles.cos(), angles.sin()),
        lambda: silu_and_multiply(wide * 5),
    ):
        output, expected = compute(), by_torch(compute)
        assert output.dtype == dtype and output.shape == expected.shape and output.is_contiguous()
        torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [5, 1024, 3001])
def test_sample(vocab_size: int, dtype: torch.dtype, by_torch: Callable) -> None:
    """The same tokens, greedy rows and cut rows among them; of equal logits the first."""
    torch.manual_seed(0)
    logits = torch.randn(64, vocab_size).to(dtype)
    logits[0] = 1.0
    params = [SamplingParams(temperature=t, top_k=k) for t in (0.0, 0.7, 1.3, 1e-3) for k in (-1, 3)] * 8
    batch = SamplingBatch.build(params, list(range(64)), list(range(100, 164)), vocab_size, torch.device("cpu"))
    sampler = Sampler(vocab_size, torch.device("cpu"))
    tokens = sampler(logits, batch)
    assert torch.equal(tokens, by_torch(lambda: sampler(logits, batch)))
    assert tokens[0] == 0
    assert torch.equal(sampler(logits, SamplingBatch()), logits.float().argmax(-1))


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
