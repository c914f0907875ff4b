"""Sampling for the profile run and the warm-up runs at the start of an engine.

The worker computes the logits of dummy batches. It does not know sequences, so the sequences that
would sample from these logits are made here.
"""

from collections.abc import Callable

from torch import Tensor

from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_p=0.5),
    # The most expensive kind comes last, so that its memory is on top of what the others keep.
    SamplingParams(top_p=0.5, repetition_penalty=2.0, min_tokens=1, logprobs=20),
]


def sample_dummies(
    sample: Callable[[Tensor, list[Sequence]], object], logits: Tensor, max_model_len: int
) -> None:
    """Sample from `logits` [num_rows, vocab_size] with each kind of parameters.

    On a GPU this lets MemoryMeter see the peak of sampling, and compiles the kernels. The memory of
    penalties depends on the longest sequence.
    """
    for params in KINDS:
        seqs: list[Sequence] = []
        for seq_id in range(len(logits)):
            num_tokens = max_model_len if seq_id == 0 else 1
            seq = Sequence(seq_id, [0] * num_tokens, params, stop_token_ids=frozenset([0]))
            seq.num_logits = 1
            seqs.append(seq)
        sample(logits, seqs)
