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

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.engine.logprobs import find_logprobs
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.request import Request
from nanovllm.engine.sequence import Sequence
from nanovllm.transfers import to_device


class ScoringModelRunner(ModelRunner):
    """Also scores prompts. The sequences that ask for this are Requests."""

    # The request and the prompt's token that each row of logits of the current step predicts. None:
    # the row samples a token. Empty if no prompt is scored.
    rows: list[tuple[Request, int] | None]

    def prepare_batch(self, seqs: list[Sequence]) -> Batch:
        batch = super().prepare_batch(seqs)
        self.rows = []
        if all([seq.params.prompt_logprobs is None for seq in seqs]):
            return batch
        indices: list[int] = []
        for seq, start in zip(seqs, batch.cu_seqlens_q.tolist()):
            offset = start - seq.num_computed_tokens  # index in the batch minus position
            end = seq.num_computed_tokens + seq.num_scheduled_tokens
            if seq.params.prompt_logprobs is not None:
                assert isinstance(seq, Request)
                # The first position whose next token has no entry yet.
                first = max(seq.num_computed_tokens, len(seq.prompt_logprobs) - 1)
                for position in range(first, min(end, seq.num_prompt_tokens - 1)):
                    self.rows.append((seq, seq.token_ids[position + 1]))
                    indices.append(offset + position)
            self.rows += [None] * seq.num_logits
            indices += range(offset + end - seq.num_logits, offset + end)
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


def score(logits: Tensor, rows: list[tuple[Request, int] | None]) -> Tensor:
    """Record the log probabilities of prompt tokens. Return the rows that sample."""
    token_ids = np.array([row[1] if row else 0 for row in rows], np.int64)
    nums = [row[0].params.prompt_logprobs if row else None for row in rows]
    entries = find_logprobs(logits, to_device(token_ids, logits.device), nums)
    for row, entry in zip(rows, entries):
        if row is not None:
            request, _ = row
            request.prompt_logprobs.append(entry)
    sampled = np.flatnonzero([row is None for row in rows])
    return logits[to_device(sampled, logits.device)]
