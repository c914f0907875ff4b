"""Log probabilities of the prompt's own tokens (`SamplingParams.prompt_logprobs`).

The logits at position i predict token i + 1. In a prompt that token is known, not sampled:

    positions of a chunk   | 4  5  6  7 |       a prompt of 8 tokens, whose last chunk is computed
    tokens they predict    | 5  6  7  8 |       three rows of logits score the prompt, one samples

`Request.prompt_logprobs` grows with every chunk. It depends only on the prompt, so it survives a
preemption. A prefix hit ends at `Request.first_logits_position`, because a hit computes no logits.

A chunk can have more rows of logits than the profile run had. They are then computed in parts, and
the rows of a part that score the prompt are reduced to a few numbers before the next part.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.request import Request
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.logprobs import find_logprobs
from nanovllm.outputs import PromptLogprobs
from nanovllm.utils.packing import to_device


class PromptRow(NamedTuple):
    """A row of logits that scores a token of a prompt."""

    entries: PromptLogprobs  # the list of the request, to which the row adds one
    token_id: int
    num_logprobs: int | None


class ScoringModelRunner(ModelRunner):
    """Also scores prompts. The sequences that ask for this are Requests."""

    def forward(self, seqs: list[Sequence]) -> Tensor:
        if all([seq.params.prompt_logprobs is None for seq in seqs]):
            return super().forward(seqs)
        batch, rows = self.add_rows(self.prepare_batch(seqs), seqs)
        return self.executor.call(self._execute_rows, batch, rows)

    def add_rows(self, batch: Batch, seqs: list[Sequence]) -> tuple[Batch, list[PromptRow | None]]:
        """Add the rows of logits that score prompts.

        Return what each row does. None: it samples a token.
        """
        rows: list[PromptRow | None] = []
        indices: list[int] = []
        for seq, start in zip(seqs, batch.cu_seqlens_q.tolist()):
            offset = start - seq.num_computed_tokens  # index in the batch minus position
            end = seq.num_computed_tokens + seq.num_scheduled_tokens
            if seq.params.prompt_logprobs is not None:
                assert isinstance(seq, Request)
                # The first position whose next token has no entry yet.
                first = max(seq.num_computed_tokens, len(seq.prompt_logprobs) - 1)
                for position in range(first, min(end, seq.num_prompt_tokens - 1)):
                    token_id = seq.token_ids[position + 1]
                    num_logprobs = seq.params.prompt_logprobs
                    rows.append(PromptRow(seq.prompt_logprobs, token_id, num_logprobs))
                    indices.append(offset + position)
            rows += [None] * seq.num_logits
            indices += range(offset + end - seq.num_logits, offset + end)
        logits_indices = torch.from_numpy(np.array(indices, np.int32))
        return replace(batch, logits_indices=logits_indices), rows

    def _execute_rows(self, batch: Batch, rows: list[PromptRow | None]) -> Tensor:
        worker = self.executor.worker
        sampled: list[Tensor] = []
        start = 0
        for hidden in worker.split_hidden(worker.execute(batch)):
            end = start + len(hidden)
            sampled.append(score(worker.compute_logits(hidden), rows[start:end]))
            start = end
        return torch.cat(sampled)


def score(logits: Tensor, rows: list[PromptRow | None]) -> Tensor:
    """Record the log probabilities of prompt tokens. Return the rows that sample."""
    token_ids = np.array([row.token_id if row else 0 for row in rows], np.int64)
    nums = [row.num_logprobs if row else None for row in rows]
    entries = find_logprobs(logits, to_device(token_ids, logits.device), nums)
    for row, entry in zip(rows, entries):
        if row is not None:
            row.entries.append(entry)
    sampled = np.flatnonzero([row is None for row in rows])
    return logits[to_device(sampled, logits.device)]
