"""Changes to the logits that a sequence's own tokens ask for: penalties, and no stop token before min_tokens.

Counts of the generated tokens live on the device, a row per lane, and each new token is added to them once. So do the tokens
themselves: penalties change the logits of these, a few of the vocabulary. A row belongs to a sequence, so that one that was
preempted is counted anew from its tokens, wherever it runs next: generated tokens stay generated. Nothing is allocated before
the first sequence asks for a penalty.
"""

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch import to_device
from nanovllm.engine.sequence import Sequence


class Penalties:
    def __init__(self, max_num_seqs: int, vocab_size: int, max_model_len: int, device: torch.device) -> None:
        self.sizes = max_num_seqs, vocab_size, max_model_len
        self.device = device
        self.counts: Tensor | None = None  # int32 [max_num_seqs, vocab_size], of generated tokens
        self.token_ids: Tensor | None = None  # int32 [max_num_seqs, max_model_len]; behind the last one, the first again
        self.counted: list[tuple[Sequence | None, int]] = [(None, 0)] * max_num_seqs  # whose row, and up to which token

    def apply(self, logits: Tensor, seqs: list[Sequence]) -> Tensor:
        """`logits` [num_rows, vocab_size], a row for each of `seqs`, as their params want them; not changed in place."""
        penalized = [row for row, seq in enumerate(seqs) if seq.params.penalizes]
        if penalized:
            rows = to_device(np.array(penalized), self.device)[:, None]
            logits = self._penalize(logits.float(), rows, [seqs[row] for row in penalized])
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

    def _penalize(self, logits: Tensor, rows: Tensor, seqs: list[Sequence]) -> Tensor:
        """A token that occurs several times is computed, and written, as many times: always the same."""
        self._count(seqs)
        lanes = to_device(np.array([seq.lane for seq in seqs]), self.device)
        token_ids = self.token_ids[lanes, : max(len(seq.token_ids) for seq in seqs)].long()  # [num_rows, longest]
        counts = self.counts[lanes[:, None], token_ids]
        params = [seq.params for seq in seqs]
        penalties = [(p.presence_penalty, p.frequency_penalty, p.repetition_penalty) for p in params]
        numbers = to_device(np.array(penalties, np.float32), self.device)
        presence, frequency, repetition = numbers.T.unsqueeze(-1)  # each [num_rows, 1]
        repeated = logits[rows, token_ids]
        scaled = torch.where(repeated > 0, repeated / repetition, repeated * repetition)
        return logits.index_put((rows, token_ids), scaled - counts * frequency - (counts > 0) * presence)

    def _count(self, seqs: list[Sequence]) -> None:
        """Bring the counts of `seqs` up to date."""
        if self.counts is None:
            max_num_seqs, vocab_size, max_model_len = self.sizes
            self.token_ids = torch.zeros(max_num_seqs, max_model_len, dtype=torch.int32, device=self.device)
            self.counts = torch.zeros(max_num_seqs, vocab_size, dtype=torch.int32, device=self.device)
        new: list[tuple[int, int, int]] = []  # lane, position, token id
        for seq in seqs:
            owner, num_counted = self.counted[seq.lane]
            self.counted[seq.lane] = (None, 0)  # if this is interrupted, the row is counted anew
            if owner is not seq:
                num_counted = seq.num_prompt_tokens
                self.counts[seq.lane] = 0
                self.token_ids[seq.lane] = seq.token_ids[0]
                prompt = np.array(seq.token_ids[:num_counted], np.int32)
                self.token_ids[seq.lane, :num_counted] = to_device(prompt, self.device)
            new += [(seq.lane, i, seq.token_ids[i]) for i in range(num_counted, len(seq.token_ids))]
        if new:
            lanes, positions, token_ids = to_device(np.array(new), self.device).T
            self.token_ids.index_put_((lanes, positions), token_ids.int())
            self.counts.index_put_((lanes, token_ids), torch.ones_like(lanes, dtype=torch.int32), accumulate=True)
        for seq in seqs:
            self.counted[seq.lane] = (seq, len(seq.token_ids))
