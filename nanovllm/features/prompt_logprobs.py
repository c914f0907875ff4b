"""Log probabilities of the prompt's own tokens (`SamplingParams.prompt_logprobs`).

The logits at position i predict token i + 1. In a prompt that token is known, not sampled:

    positions of a chunk   | 4  5  6  7 |       a prompt of 8 tokens, whose last chunk is computed
    tokens they predict    | 5  6  7  8 |       three rows of logits score the prompt, one samples

`Request.prompt_logprobs` grows with every chunk. It depends only on the prompt, so it survives a
preemption and an interrupt. A prefix hit ends before the first token whose logits are still needed,
because a hit computes no logits.
"""

import numpy as np
from torch import Tensor

from nanovllm.batch.packing import to_device
from nanovllm.engine.block_manager import Block
from nanovllm.engine.feature import Feature
from nanovllm.engine.outputs import PromptLogprobs
from nanovllm.engine.request import Request
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Row, Step
from nanovllm.layers.logprobs import find_logprobs, read_logprobs


class PromptScores(Feature):
    """Reduces the rows of logits that score a prompt to a few numbers."""

    serves = "prompt_logprobs"

    def limit_prefix(self, seq: Sequence, prefix: list[Block]) -> list[Block]:
        entries = find_entries(seq)
        if entries is None:
            return prefix
        # The logits at position len(entries) - 1 are still needed.
        return prefix[: (len(entries) - 1) // self.scheduler.block_size]

    def wanted_rows(self, step: Step) -> list[Row]:
        rows: list[Row] = []
        for seq, num_tokens in zip(step.seqs, step.num_tokens):
            entries = find_entries(seq)
            if entries is not None:
                # The first position whose next token has no entry yet.
                first = max(seq.num_computed_tokens, len(entries) - 1)
                end = min(seq.num_computed_tokens + num_tokens, seq.num_prompt_tokens - 1)
                rows += [Row(seq, position) for position in range(first, end)]
        return rows

    def receive_rows(self, rows: list[Row], logits: Tensor) -> None:
        token_ids = np.array([seq.token_ids[position + 1] for seq, position in rows], np.int64)
        nums = [seq.params.prompt_logprobs for seq, _ in rows]
        found = find_logprobs(logits, to_device(token_ids, logits.device), nums)
        for (seq, position), entry in zip(rows, read_logprobs(found, nums)):
            entries = find_entries(seq)
            # The rows of an interrupted step may come twice.
            if entries is not None and len(entries) == position + 1:
                entries.append(entry)


def find_entries(seq: Sequence) -> PromptLogprobs | None:
    """Return the entries that a request has so far, or None if it needs no more."""
    if seq.params.prompt_logprobs is None:
        return None
    assert isinstance(seq, Request)
    is_complete = len(seq.prompt_logprobs) == seq.num_prompt_tokens
    return None if is_complete else seq.prompt_logprobs
