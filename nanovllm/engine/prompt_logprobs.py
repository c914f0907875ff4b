"""Log probabilities of the prompt's own tokens (`SamplingParams.prompt_logprobs`).

The logits at position i predict token i + 1. In a prompt that token is known, not sampled:

    positions of a chunk   | 4  5  6  7 |       a prompt of 8 tokens, whose last chunk is computed
    tokens they predict    | 5  6  7  8 |       three rows of logits score the prompt, one samples

`Request.prompt_logprobs` grows with every chunk. It depends only on the prompt, so it survives a
preemption. A prefix hit ends at `Request.first_logits`, because a hit computes no logits.

A chunk can have more rows of logits than the profile run had. They are then computed in parts, and
the rows of a part that score the prompt are reduced to a few numbers before the next part.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.engine.logprobs import find_logprobs
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.request import Request
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import PromptLogprobs
from nanovllm.transfers import to_device


class PromptRow(NamedTuple):
    """A row of logits that predicts a token of a prompt."""

    token_id: int
    num_top: int
    logprobs: PromptLogprobs  # receives the row's entry


class ScoringModelRunner(ModelRunner):
    """Also scores prompts. The sequences that ask for this are Requests."""

    # What each row of logits of the current step is for. None: the row samples a token. Empty if no
    # prompt is scored.
    rows: list[PromptRow | None]

    def prepare_batch(self, seqs: list[Sequence]) -> Batch:
        batch = super().prepare_batch(seqs)
        self.rows = []
        if all([seq.params.prompt_logprobs is None for seq in seqs]):
            return batch
        indices: list[int] = []
        for seq, start in zip(seqs, batch.cu_seqlens_q.tolist()):
            offset = start - seq.num_computed_tokens  # index in the batch minus position
            end = seq.num_computed_tokens + seq.num_scheduled_tokens
            for position in find_positions_to_score(seq):
                self.rows.append(make_row(seq, position))
                indices.append(offset + position)
            for position in range(end - seq.num_logits, end):
                self.rows.append(None)
                indices.append(offset + position)
        return replace(batch, logits_indices=torch.from_numpy(np.array(indices, np.int32)))

    def _execute(self, batch: Batch) -> Tensor:
        if not self.rows:
            return super()._execute(batch)
        worker = self.executor.worker
        sampled: list[Tensor] = []
        start = 0
        for hidden in worker.split_rows(worker.execute(batch)):
            end = start + len(hidden)
            sampled.append(score(worker.compute_logits(hidden), self.rows[start:end]))
            start = end
        return torch.cat(sampled)


def find_positions_to_score(seq: Sequence) -> range:
    """The scheduled positions of the prompt whose next token has no entry yet."""
    if seq.params.prompt_logprobs is None:
        return range(0)
    assert isinstance(seq, Request)
    start = seq.num_computed_tokens
    first = max(start, len(seq.prompt_logprobs) - 1)
    return range(first, min(start + seq.num_scheduled_tokens, seq.num_prompt_tokens - 1))


def make_row(seq: Sequence, position: int) -> PromptRow:
    """Describe the row of logits at `position`, which predicts the prompt's next token."""
    num_top = seq.params.prompt_logprobs
    assert isinstance(seq, Request) and num_top is not None
    return PromptRow(seq.token_ids[position + 1], num_top, seq.prompt_logprobs)


def score(logits: Tensor, rows: list[PromptRow | None]) -> Tensor:
    """Record the log probabilities of prompt tokens. Return the rows that sample."""
    token_ids = np.array([row.token_id if row else 0 for row in rows], np.int64)
    nums = [row.num_top if row else None for row in rows]
    entries = find_logprobs(logits, to_device(token_ids, logits.device), nums)
    sampled: list[int] = []
    for index, (row, entry) in enumerate(zip(rows, entries)):
        if row is None:
            sampled.append(index)
        else:
            row.logprobs.append(entry)
    return logits[to_device(np.array(sampled, np.int64), logits.device)]
