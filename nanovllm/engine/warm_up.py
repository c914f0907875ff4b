"""Sampling before the first request: for self-tests, the profile run and warm-up runs."""

from typing import Any

import torch
from torch import Tensor

from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.layers.sampler import Sampler, make_sampling_batch
from nanovllm.sampling_params import SamplingParams

KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_p=0.5),
    # The most expensive kind comes last, so that its memory is on top of what the others keep.
    SamplingParams(top_p=0.5, repetition_penalty=2.0, min_tokens=1, logprobs=20),
]


def sample_test_rows(sampler: Sampler, dtype: torch.dtype) -> None:
    """Sample rows of random logits in each way, for the self-test of the sampler."""
    # Not the greedy kind, because 16-bit logits can be equal.
    rows = [Sequence(i, [0], params, seed=i) for i, params in enumerate(KINDS[1:] * 8)]
    device = sampler.token_hashes.device
    vocab_size = len(sampler.token_hashes)
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(len(rows), vocab_size, device="cpu", generator=generator)
    batch = make_sampling_batch(rows, [1] * len(rows), vocab_size, device)
    sampler(logits.to(device, dtype), batch)


def sample_each_kind(runner: Any, logits: Tensor) -> None:
    """Sample from `logits` [num_rows, vocab_size] with each kind of parameters.

    `runner` is a ModelRunner, whose module imports this one.

    On a GPU this lets MemoryMeter see the peak of sampling, and compiles the kernels. The memory of
    penalties depends on the longest sequence.
    """
    for params in KINDS:
        step = Step()
        for seq_id in range(len(logits)):
            num_tokens = runner.executor.worker.max_model_len if seq_id == 0 else 1
            seq = Sequence(seq_id, [0] * num_tokens, params, stop_token_ids=frozenset([0]))
            step.add(seq, num_tokens=1, num_logits=1)
        runner.read(runner.sample(logits, step))
