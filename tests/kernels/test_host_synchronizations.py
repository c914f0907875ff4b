"""The host waits for the device once in a step, where it reads the results."""

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
    "params, num_reads",
    [(SAMPLED[0], 1), (SAMPLED[2], 1), (GREEDY, 1), (SAMPLED[3], 1), (SAMPLED[4], 3)],
    ids=["sampled", "filtered", "greedy", "penalties", "logprobs"],
)
def test_a_step_reads_tokens_and_log_probabilities(
    make_llm, monkeypatch, device, enforce_eager, params, num_reads
):
    """Log probabilities are read with their token ids. On a GPU, torch raises at any other wait."""
    llm = make_llm(device=device, enforce_eager=enforce_eager, **POOL)
    set_mode = torch.cuda.set_sync_debug_mode if device == "cuda" else lambda mode: None
    tolist = torch.Tensor.tolist
    reads = []

    def read(tensor):
        if tensor.device.type != device:
            return tolist(tensor)
        reads.append(tensor)
        set_mode("default")
        numbers = tolist(tensor)
        set_mode("error")
        return numbers

    def forbid_waiting(function):
        def call(*args):
            set_mode("error")
            try:
                return function(*args)
            finally:
                set_mode("default")

        return call

    monkeypatch.setattr(torch.Tensor, "tolist", read)
    for name in ("forward", "sample"):
        call = getattr(llm.model_runner, name)
        monkeypatch.setattr(llm.model_runner, name, forbid_waiting(call))
    for prompt in PROMPTS:
        llm.add_request(prompt, params)
    while not llm.is_finished():
        reads.clear()
        llm.step()
        assert len(reads) == num_reads
