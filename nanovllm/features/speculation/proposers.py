"""What proposes draft tokens: a lookup in the sequence's own tokens, or the model's MTP head."""

from collections.abc import Callable
from dataclasses import replace
from typing import cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch.batch import make_batch
from nanovllm.batch.packing import copy_to, to_device
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.sampler import Sampler, make_sampling_batch
from nanovllm.models.mtp import DraftingLM
from nanovllm.worker.executor import Executor


class Proposer:
    """Proposes draft tokens for sequences that decode."""

    first_rate: float  # acceptance rate of a sequence that has not proposed yet

    def propose(self, seqs: list[Sequence], num_tokens: int) -> list[list[int]]:
        """Return a draft of at most `num_tokens` for each sequence."""
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

    def propose(self, seqs: list[Sequence], num_tokens: int) -> list[list[int]]:
        for seq in seqs:
            if seq not in self.lookups:
                self.lookups[seq] = self.make_lookup(seq.token_ids)
        return [self.lookups[seq].propose(num_tokens) for seq in seqs]


class MTPProposer(Proposer):
    """Runs the model's MTP head, once for each token of the longest draft.

    A draft token is sampled with the noise of its position, as the token that it predicts will be.
    At any temperature the two are therefore equal if their logits are similar.
    """

    first_rate = 0.9

    def __init__(self, executor: Executor, sampler: Sampler, blocks: BlockManager) -> None:
        self.executor = executor
        self.sampler = sampler
        self.blocks = blocks

    @torch.inference_mode()
    def propose(self, seqs: list[Sequence], num_tokens: int) -> list[list[int]]:
        """As Proposer.propose. A sequence without room for K/V of all these tokens has no draft."""
        worker = self.executor.worker
        model = cast(DraftingLM, worker.model)
        ready = [seq for seq in seqs if self._reserve(seq, num_tokens)]
        if not ready:
            return [[] for _ in seqs]
        block_size = worker.block_size
        block_tables = np.zeros((len(ready), worker.block_table_width), np.int32)
        for row, seq in enumerate(ready):
            block_tables[row, : len(seq.block_table)] = seq.block_table
        lens = [len(seq.token_ids) for seq in ready]
        newest = [seq.token_ids[-1] for seq in ready]
        # The slots of the newest tokens and of the draft tokens after them, but for the last one.
        ends = [num + num_tokens - 1 for num in lens]
        whole = make_batch([num_tokens] * len(ready), ends, block_tables, block_size)
        columns = whole.slot_mapping.reshape(len(ready), num_tokens).T.copy()
        slots = to_device(columns, worker.device)  # [num_tokens, num_seqs]
        first = make_batch([1] * len(ready), lens, block_tables, block_size, newest)
        batch = copy_to(first, worker.device)
        tokens: list[Tensor] = []
        hidden: Tensor | None = None  # None: that of the model
        for distance in range(num_tokens):
            if distance > 0:
                batch = replace(
                    batch,
                    input_ids=tokens[-1],
                    positions=batch.positions + 1,
                    slot_mapping=slots[distance],
                    context_lens=batch.context_lens + 1,
                    max_seqlen_k=batch.max_seqlen_k + 1,
                )
            hidden = model.draft(batch, worker.kv_caches, hidden)
            logits = model.compute_logits(hidden)
            positions = [num + distance for num in lens]
            sampling = make_sampling_batch(ready, positions, logits.shape[1], worker.device)
            # -1, of logits that are NaN, is no token.
            tokens.append(self.sampler(logits, sampling).clamp(min=0).int())
        drafts = dict(zip(ready, torch.stack(tokens, dim=1).tolist()))
        for seq in ready:
            self.blocks.release(seq, len(seq.token_ids))
        return [drafts.get(seq, []) for seq in seqs]

    def _reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Take free blocks for the K/V of a draft, except for its last token. Return if there are.

        The head computes the newest token and then the draft.
        """
        end = len(seq.token_ids)
        seq.token_ids += [0] * (num_tokens - 1)
        has_room = len(seq.token_ids) <= seq.max_model_len and self.blocks.grow(seq)
        del seq.token_ids[end:]
        return has_room
