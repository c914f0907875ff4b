"""Changes to the logits that a sequence's own tokens ask for: penalties, and no stop token before min_tokens.

Counts of the generated tokens live on the device, a row per lane, and each new token is added to them once. A row belongs
to a sequence, so that one that was preempted is counted anew from its tokens, wherever it runs next: generated tokens
stay generated. Nothing is allocated before the first sequence asks for a penalty.
"""

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch import to_device
from nanovllm.engine.sequence import Sequence


class Penalties:
    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.shape = (max_num_seqs, vocab_size)
        self.device = device
        self.counts: Tensor | None = None  # int32 [max_num_seqs, vocab_size], of generated tokens
        self.in_prompt: Tensor | None = None  # bool, the same shape
        self.counted: list[tuple[Sequence | None, int]] = [(None, 0)] * max_num_seqs  # whose row, and up to which token

    def apply(self, logits: Tensor, seqs: list[Sequence]) -> Tensor:
        """`logits` [num_rows, vocab_size], a row for each of `seqs`, as their params want them; not changed in place."""
        penalized = [row for row, seq in enumerate(seqs) if seq.params.penalizes]
        if penalized:
            rows = to_device(np.array(penalized), self.device)
            changed = self._penalize(logits[rows].float(), [seqs[row] for row in penalized])
            logits = logits.float().index_copy(0, rows, changed)
        barred = [
            (row, token_id)
            for row, seq in enumerate(seqs)
            if len(seq.token_ids) < seq.min_num_tokens
            for token_id in seq.stop_token_ids
        ]
        if barred:
            rows, token_ids = to_device(np.array(barred), self.device).T
            logits = logits.index_put((rows, token_ids), logits.new_full((), -torch.inf))
        return logits

    def _penalize(self, logits: Tensor, seqs: list[Sequence]) -> Tensor:
        self._count(seqs)
        lanes = to_device(np.array([seq.lane for seq in seqs]), self.device)
        counts = self.counts[lanes]
        generated = counts > 0
        repeated = generated | self.in_prompt[lanes]
        params = [seq.params for seq in seqs]
        penalties = [(p.presence_penalty, p.frequency_penalty, p.repetition_penalty) for p in params]
        numbers = to_device(np.array(penalties, np.float32), self.device)
        presence, frequency, repetition = numbers.T.unsqueeze(-1)  # each [num_rows, 1]
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        return torch.where(repeated, scaled, logits) - counts * frequency - generated * presence

    def _count(self, seqs: list[Sequence]) -> None:
        """Bring the counts of `seqs` up to date."""
        if self.counts is None:
            self.in_prompt = torch.zeros(self.shape, dtype=torch.bool, device=self.device)
            self.counts = torch.zeros(self.shape, dtype=torch.int32, device=self.device)
        new: list[tuple[int, int]] = []  # lane, token id
        for seq in seqs:
            owner, num_counted = self.counted[seq.lane]
            self.counted[seq.lane] = (None, 0)  # if this is interrupted, the row is counted anew
            if owner is not seq:
                num_counted = seq.num_prompt_tokens
                self.counts[seq.lane] = 0
                self.in_prompt[seq.lane] = False
                self.in_prompt[seq.lane].index_fill_(0, to_device(np.array(seq.token_ids[:num_counted]), self.device), True)
            new += [(seq.lane, token_id) for token_id in seq.token_ids[num_counted:]]
        if new:
            lanes, token_ids = to_device(np.array(new), self.device).T
            self.counts.index_put_((lanes, token_ids), torch.ones_like(lanes, dtype=torch.int32), accumulate=True)
        for seq in seqs:
            self.counted[seq.lane] = (seq, len(seq.token_ids))
