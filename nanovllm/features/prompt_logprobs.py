"""Log probabilities of the prompt's own tokens (`SamplingParams.prompt_logprobs`).

The logits at position i predict token i + 1. In a prompt that token is known, not sampled:

    positions of a chunk   | 4  5  6  7 |       a prompt of 8 tokens, whose last chunk is computed
    tokens they predict    | 5  6  7  8 |       three rows of logits score the prompt, one samples

`Request.prompt_logprobs` grows with every chunk. It depends only on the prompt, so it survives a
preemption. A prefix hit ends before the first token whose logits are still needed, because a hit
computes no logits.

A chunk can have more rows of logits than the profile run had. They are then computed in parts, and
the rows of a part that score the prompt are reduced to a few numbers before the next part.
"""

from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np
from torch import Tensor

from nanovllm.engine.block_manager import Block
from nanovllm.engine.feature import Feature
from nanovllm.engine.outputs import PromptLogprobs
from nanovllm.engine.request import Request
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.layers.batch import Batch
from nanovllm.layers.logprobs import find_logprobs, read_logprobs
from nanovllm.layers.packing import to_device


class PromptRow(NamedTuple):
    """A row of logits that scores a token of a prompt."""

    entries: PromptLogprobs  # the list of the request, to which the row adds one
    token_id: int
    num_logprobs: int | None


class PromptScores(Feature):
    """Adds rows of logits to the batch, and takes them out of what is sampled.

    The rows belong to the step and not to the feature, because rank 0's thread may still compute an
    interrupted step.
    """

    serves = "prompt_logprobs"

    def reset(self) -> None:
        # Complete entries stay. Others get a new list, because an interrupted step of several ranks
        # may still write to the old one.
        for seq in self.scheduler.waiting:
            if isinstance(seq, Request) and find_entries(seq) is not None:
                seq.prompt_logprobs = [None]

    def limit_prefix(self, seq: Sequence, prefix: list[Block]) -> list[Block]:
        entries = find_entries(seq)
        if entries is None:
            return prefix
        # The logits at position len(entries) - 1 are still needed.
        return prefix[: (len(entries) - 1) // self.scheduler.block_size]

    def prepared(self, step: Step, batch: Batch) -> Batch:
        """Add the rows of logits that score prompts."""
        all_entries = [find_entries(seq) for seq in step.seqs]
        if not any(all_entries):
            return batch
        rows: list[PromptRow | None] = []
        indices: list[int] = []
        starts = batch.cu_seqlens_q.tolist()
        for (seq, num_tokens, num_logits), entries, start in zip(step, all_entries, starts):
            offset = start - seq.num_computed_tokens  # index in the batch minus position
            end = seq.num_computed_tokens + num_tokens
            if entries is not None:
                # The first position whose next token has no entry yet.
                first = max(seq.num_computed_tokens, len(entries) - 1)
                for position in range(first, min(end, seq.num_prompt_tokens - 1)):
                    token_id = seq.token_ids[position + 1]
                    rows.append(PromptRow(entries, token_id, seq.params.prompt_logprobs))
                    indices.append(offset + position)
            rows += [None] * num_logits
            indices += range(offset + end - num_logits, offset + end)
        # What each row of logits does. None: it samples a token. Each call of `computed` takes the
        # rows of its part.
        step.kept[self] = iter(rows)
        return replace(batch, logits_indices=np.array(indices, np.int32))

    def computed(self, step: Step, logits: Tensor) -> Tensor:
        """Record the log probabilities of prompt tokens. Return the rows that sample."""
        if self not in step.kept:
            return logits
        rows = list(islice(step.kept[self], len(logits)))
        token_ids = np.array([row.token_id if row else 0 for row in rows], np.int64)
        nums = [row.num_logprobs if row else None for row in rows]
        found = find_logprobs(logits, to_device(token_ids, logits.device), nums)
        for row, entry in zip(rows, read_logprobs(found, nums) if found else ()):
            if row is not None:
                row.entries.append(entry)
        sampled = np.flatnonzero([row is None for row in rows])
        return logits[to_device(sampled, logits.device)]


def find_entries(seq: Sequence) -> PromptLogprobs | None:
    """Return the entries that a request has so far, or None if it needs no more."""
    if seq.params.prompt_logprobs is None:
        return None
    assert isinstance(seq, Request)
    is_complete = len(seq.prompt_logprobs) == seq.num_prompt_tokens
    return None if is_complete else seq.prompt_logprobs
