"""What one step does. The scheduler plans it, and everything else in the step receives it.

vLLM calls it SchedulerOutput. Its columns are parallel lists with one entry per sequence:

    seqs         |  A  |  B  |  C  |
    num_tokens   |  3  |  1  |  2  |    tokens that the step computes
    num_logits   |  1  |  1  |  0  |    rows of logits, for the last of these tokens

A sequence samples one token, so it has one row. It has more with a draft, and none if the step does
not reach its last token. What lasts longer than a step is in sequence.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, TypeVar

from nanovllm.engine.sequence import Sequence

Value = TypeVar("Value")


class Row(NamedTuple):
    """A row that a feature asks for: logits or hidden states of the token at `position`."""

    seq: Sequence
    position: int


@dataclass(eq=False)
class Step:
    """One step. It is plain data, without tensors."""

    seqs: list[Sequence] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_logits: list[int] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[Sequence, int, int]]:
        return zip(self.seqs, self.num_tokens, self.num_logits)

    def add(self, seq: Sequence, num_tokens: int, num_logits: int) -> None:
        self.seqs.append(seq)
        self.num_tokens.append(num_tokens)
        self.num_logits.append(num_logits)

    def is_decode(self, index: int) -> bool:
        """Return whether a sequence computes its newest generated token, and perhaps a draft.

        All of these tokens get logits. Other tokens of a prefill or a recomputation get none.
        """
        seq = self.seqs[index]
        has_all_logits = self.num_tokens[index] == self.num_logits[index]
        return has_all_logits and seq.num_computed_tokens >= seq.num_prompt_tokens

    def list_rows(self) -> tuple[list[Sequence], list[int]]:
        """Return the sequence of each row of logits, and the position of the token it samples."""
        rows: list[Sequence] = []
        positions: list[int] = []
        for seq, num_logits in zip(self.seqs, self.num_logits):
            end = len(seq.token_ids)
            if num_logits == 1:
                rows.append(seq)
                positions.append(end)
            else:
                rows += [seq] * num_logits
                positions += range(end - num_logits + 1, end + 1)
        return rows, positions

    def split(self, values: list[Value]) -> list[list[Value]]:
        """Split values, one per row of logits, into one list per sequence."""
        ends = accumulate(self.num_logits)
        return [values[end - count : end] for end, count in zip(ends, self.num_logits)]

    def drop_ended(self) -> list[int]:
        """Drop the sequences that have ended since the step was planned.

        Return the rows of logits that are left.
        """
        rest = Step()
        rows: list[int] = []
        end = 0
        for seq, num_tokens, num_logits in self:
            end += num_logits
            if seq.finish_reason is None:
                rest.add(seq, num_tokens, num_logits)
                rows += range(end - num_logits, end)
        self.seqs = rest.seqs
        self.num_tokens = rest.num_tokens
        self.num_logits = rest.num_logits
        return rows
