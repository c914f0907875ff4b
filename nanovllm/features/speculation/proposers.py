"""What proposes draft tokens: a lookup in the sequence's own tokens, or the model's MTP head."""

from collections.abc import Callable
from dataclasses import replace
from typing import cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch.batch import make_batch
from nanovllm.batch.packing import copy_to
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.sampler import Sampler, make_sampling_batch
from nanovllm.models.mtp import DraftingLM
from nanovllm.worker.executor import Executor


class Proposer:
    """Proposes draft tokens for sequences that decode."""

    first_rate: float  # acceptance rate of a sequence that has not proposed yet

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[list[int]]:
        """Return for each sequence at most as many draft tokens as its limit."""
        raise NotImplementedError


class PromptLookup:
    """Proposes what followed the latest occurrence of the newest tokens (Saxena 2023).

        token_ids | the cat sat on the mat . the cat      "sat on the mat" may follow again

    This works for code, quotations, and answers that repeat the question. `token_ids` is the
    sequence's own list. Each token is read once, so a proposal costs O(1) on average.
    """

    SIZES = (3, 2)  # lengths of the n-grams, the longest first

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.num_read = 0
        # n-gram -> end of its latest occurrence that is followed by a token
        self.ends: dict[tuple[int, ...], int] = {}

    def propose(self, num_tokens: int) -> list[int]:
        token_ids = self.token_ids
        for end in range(self.num_read, len(token_ids)):
            for size in self.SIZES:
                self.ends[tuple(token_ids[max(0, end - size) : end])] = end
        self.num_read = len(token_ids)
        for size in self.SIZES:
            end = self.ends.get(tuple(token_ids[-size:]), 0)
            if end:
                found = token_ids[end : end + num_tokens]
                # An occurrence that overlaps the newest tokens is repeated.
                return (found * num_tokens)[:num_tokens]
        return []


class PromptLookupProposer(Proposer):
    """Looks up each sequence's newest tokens. This takes no time, compared with a step."""

    first_rate = 0.5

    def __init__(self) -> None:
        self.make_lookup: Callable[[list[int]], PromptLookup] = PromptLookup
        self.lookups = WeakKeyDictionary[Sequence, PromptLookup]()

    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[list[int]]:
        drafts: list[list[int]] = []
        for seq, limit in zip(seqs, limits):
            if seq not in self.lookups:
                self.lookups[seq] = self.make_lookup(seq.token_ids)
            drafts.append(self.lookups[seq].propose(limit))
        return drafts


class MTPProposer(Proposer):
    """Runs the model's MTP head, once for each token of the longest draft.

    A draft token is sampled with the noise of its position, as the token that it predicts will be.
    At any temperature the two are therefore equal if their logits are similar.
    """

    first_rate = 0.8

    def __init__(self, executor: Executor, sampler: Sampler, blocks: BlockManager) -> None:
        self.executor = executor
        self.sampler = sampler
        self.blocks = blocks

    @torch.inference_mode()
    def propose(self, seqs: list[Sequence], limits: list[int]) -> list[list[int]]:
        counts = {seq: self._reserve(seq, limit) for seq, limit in zip(seqs, limits)}
        longest_first = sorted(seqs, key=counts.__getitem__, reverse=True)
        tokens: Tensor | None = None
        hidden: Tensor | None = None
        sampled: list[Tensor] = []
        for distance in range(max(limits)):
            active = [seq for seq in longest_first if counts[seq] > distance]
            if not active:
                break
            tokens, hidden = self._run(active, distance, tokens, hidden)
            sampled.append(tokens)
        for seq in seqs:
            self.blocks.release(seq, len(seq.token_ids))
        # The only host synchronization.
        newest = iter(torch.cat(sampled).tolist())
        drafts: dict[Sequence, list[int]] = {seq: [] for seq in seqs}
        for distance in range(len(sampled)):
            for seq in longest_first[: len(sampled[distance])]:
                drafts[seq].append(next(newest))
        return [drafts[seq] for seq in seqs]

    def _reserve(self, seq: Sequence, limit: int) -> int:
        """Take free blocks for the K/V of a draft. Return the number of tokens that have room.

        The head computes the newest token and the draft, but for the draft's last token.
        """
        num_tokens = len(seq.token_ids)
        seq.token_ids += [0] * (limit - 1)
        while not self.blocks.grow(seq):
            seq.token_ids.pop()
        num_reserved = len(seq.token_ids) - num_tokens
        del seq.token_ids[num_tokens:]
        return min(limit, 1 + num_reserved)

    def _run(
        self, seqs: list[Sequence], distance: int, tokens: Tensor | None, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Sample the draft tokens at `distance` from the newest tokens.

        `tokens` and `hidden` are what the draft tokens before them have returned, perhaps with
        rows of other sequences at the end. None: they are the first ones.
        """
        worker = self.executor.worker
        width = max([len(seq.block_table) for seq in seqs])
        block_tables = np.zeros((len(seqs), width), np.int32)
        for row, seq in enumerate(seqs):
            block_tables[row, : len(seq.block_table)] = seq.block_table
        context_lens = [len(seq.token_ids) + distance for seq in seqs]
        newest = [seq.token_ids[-1] for seq in seqs]
        batch = copy_to(
            make_batch([1] * len(seqs), context_lens, block_tables, worker.block_size, newest),
            worker.device,
        )
        if tokens is not None and hidden is not None:
            batch = replace(batch, input_ids=tokens[: len(seqs)])
            hidden = hidden[: len(seqs)]
        hidden = cast(DraftingLM, worker.model).draft(batch, worker.kv_caches, hidden)
        logits = worker.model.compute_logits(hidden)
        sampling = make_sampling_batch(seqs, context_lens, logits.shape[1], worker.device)
        # -1 of logits that are NaN is no token.
        return self.sampler(logits, sampling).clamp(min=0).int(), hidden
