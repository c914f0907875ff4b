"""A step is launched without a wait for the device. Only reading its tokens waits."""

import pytest
import torch
from kernel_helpers import needs_compiler
from test_gpu import GREEDY, POOL, PROMPTS, SAMPLED


@pytest.mark.parametrize(
    "device, enforce_eager",
    [
        # Plain attention, which an engine without a compiler has, reads lengths.
        pytest.param("cpu", True, marks=needs_compiler, id="cpu"),
        pytest.param("cuda", False, marks=pytest.mark.gpu, id="graphs"),
        pytest.param("cuda", True, marks=pytest.mark.gpu, id="eager"),
    ],
)
@pytest.mark.parametrize(
    "params",
    [SAMPLED[0], SAMPLED[2], GREEDY, SAMPLED[3], SAMPLED[4]],
    ids=["sampled", "filtered", "greedy", "penalties", "logprobs"],
)
def test_only_reading_tokens_waits(make_llm, monkeypatch, device, enforce_eager, params):
    """On a GPU, torch raises at any other wait. On a CPU, numbers must not be read."""
    options = {"enforce_eager": enforce_eager, "enable_prefix_caching": False}
    llm = make_llm(device=device, **options, **POOL)
    # These steps capture CUDA graphs, which waits. Without a prefix cache, the next ones are alike.
    llm.generate(PROMPTS, params)

    def fail(tensor):
        raise AssertionError("a number is read from the device")

    def forbid_waiting(function):
        def call(*args):
            with monkeypatch.context() as patch:
                if device == "cuda":
                    torch.cuda.set_sync_debug_mode("error")
                else:
                    patch.setattr(torch.Tensor, "tolist", fail)
                    patch.setattr(torch.Tensor, "item", fail)
                try:
                    return function(*args)
                finally:
                    if device == "cuda":
                        torch.cuda.set_sync_debug_mode("default")

        return call

    for name in ("forward", "sample"):
        call = getattr(llm.model_runner, name)
        monkeypatch.setattr(llm.model_runner, name, forbid_waiting(call))
    outputs = llm.generate(PROMPTS, params)
    assert len(outputs) == len(PROMPTS)
