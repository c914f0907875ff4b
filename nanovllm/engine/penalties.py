"""Changes to the logits that a sequence's own tokens ask for: penalties, and no stop token before min_tokens.

Counts of the generated tokens live on the device, a row for each lane whose sequences have asked for a penalty, and each new
token is added to them once. So do the tokens themselves: penalties change the logits of these, a few of the vocabulary.
`counted` says whose tokens are in a row: the lane's next sequence starts it afresh, and so does one that was preempted, wherever
it runs next. Generated tokens stay generated.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.batch import to_device
from nanovllm.engine.sequence import Sequence


class Penalties:
    def __init__(self, vocab_size: int, max_model_len: int, device: torch.device) -> None:
        self.device = device
        self.rows: dict[int, int] = {}  # lane -> row
        # [num_rows, vocab_size] of generated tokens; [num_rows, max_model_len] of all, padded with the first.
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.token_ids = self.counts.new_zeros(0, max_model_len)
        self.counted: dict[int, tuple[Sequence, int]] = {}  # row -> its sequence, and up to which token

    def apply(self, logits: Tensor, seqs: list[Sequence]) -> Tensor:
        """`logits` [num_rows, vocab_size], a row for each of `seqs`, as their params want them; not changed in place."""
        penalized = [row for row, seq in enumerate(seqs) if seq.params.penalizes]
        if penalized:
            rows = to_device(np.array(penalized), self.device)[:, None]
            logits = self._penalize(logits.float(), rows, [seqs[row] for row in penalized])
        early = [(row, seq.stop_token_ids) for row, seq in enumerate(seqs) if len(seq.token_ids) < seq.min_num_tokens]
        barred = [(row, token_id) for row, stop_token_ids in early for token_id in stop_token_ids]
        if barred:
            rows, token_ids = to_device(np.array(barred), self.device).T
            logits = logits.index_put((rows, token_ids), logits.new_full((), -torch.inf))
        return logits

    def _penalize(self, logits: Tensor, rows: Tensor, seqs: list[Sequence]) -> Tensor:
        """A token that occurs several times is computed, and written, as many times: each writes the same value."""
        counted = to_device(np.array(self._count(seqs)), self.device)
        token_ids = self.token_ids[counted, : max(len(seq.token_ids) for seq in seqs)].long()  # [num_seqs, longest]
        counts = self.counts[counted[:, None], token_ids]
        params = [seq.params for seq in seqs]
        penalties = [(p.presence_penalty, p.frequency_penalty, p.repetition_penalty) for p in params]
        numbers = to_device(np.array(penalties, np.float32), self.device)
        presence, frequency, repetition = numbers.T.unsqueeze(-1)  # each [num_rows, 1]
        repeated = logits[rows, token_ids]
        scaled = torch.where(repeated > 0, repeated / repetition, repeated * repetition)
        return logits.index_put((rows, token_ids), scaled - counts * frequency - (counts > 0) * presence)

    def _count(self, seqs: list[Sequence]) -> list[int]:
        """Bring the counts of `seqs` up to date. Returns their rows."""
        rows = [self.rows.setdefault(seq.lane, len(self.rows)) for seq in seqs]
        if len(self.rows) > len(self.counts):
            num_new = max(len(self.rows), 2 * len(self.counts)) - len(self.counts)  # doubled, so that growing costs O(1) a row
            self.counts, self.token_ids = (F.pad(each, (0, 0, 0, num_new)) for each in (self.counts, self.token_ids))
        new: list[tuple[int, int, int]] = []  # row, position, token id
        for row, seq in zip(rows, seqs):
            owner, num_counted = self.counted.pop(row, (None, 0))  # if this is interrupted, the row is counted anew
            if owner is not seq:
                num_counted = seq.num_prompt_tokens
                self.counts[row] = 0
                self.token_ids[row] = seq.token_ids[0]
                prompt = np.array(seq.token_ids[:num_counted], np.int32)
                self.token_ids[row, :num_counted] = to_device(prompt, self.device)
            new += [(row, i, seq.token_ids[i]) for i in range(num_counted, len(seq.token_ids))]
        if new:
            new_rows, positions, token_ids = to_device(np.array(new), self.device).T
            self.token_ids.index_put_((new_rows, positions), token_ids.int())
            self.counts.index_put_((new_rows, token_ids), torch.ones_like(new_rows, dtype=torch.int32), accumulate=True)
        self.counted.update({row: (seq, len(seq.token_ids)) for row, seq in zip(rows, seqs)})
        return rows
