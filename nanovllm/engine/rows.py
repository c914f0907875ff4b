"""The rows of logits of a step: those that are sampled, and those that features ask for.

    tokens of a step       | 4  5  6  7 |     5 and 6 are wanted, and the row of 7 is sampled
    rows of logits              0  1  2       a row can have several owners

The rows of a sequence are those of its last tokens in the step, because kernels need not compute
other tokens in the last layer.
"""

from itertools import accumulate, groupby
from operator import itemgetter

import numpy as np
from torch import Tensor

from nanovllm.batch.packing import to_device
from nanovllm.engine.feature import Feature
from nanovllm.engine.step import Row, Step


class Rows:
    """The rows of one step, in the order of its sequences."""

    def __init__(self, step: Step, features: list[Feature]) -> None:
        """`features` are those that may want rows."""
        self.counts = list(step.num_logits)  # rows of each sequence
        self.wanted: list[tuple[Feature, Row, int]] = []  # with the number of the row
        self.sampled: list[int] = []  # numbers of rows, if any others are wanted
        wanted = [(feature, row) for feature in features for row in feature.wanted_rows(step)]
        if not wanted:
            return
        places = {seq: place for place, seq in enumerate(step.seqs)}
        token_ends = [seq.num_computed_tokens + num for seq, num, _ in step]
        for _, (seq, position) in wanted:
            place = places[seq]
            self.counts[place] = max(self.counts[place], token_ends[place] - position)
        row_ends = list(accumulate(self.counts))
        for feature, row in wanted:
            place = places[row.seq]
            distance = token_ends[place] - row.position
            self.wanted.append((feature, row, row_ends[place] - distance))
        for num_logits, end in zip(step.num_logits, row_ends):
            self.sampled += range(end - num_logits, end)

    def hand_out(self, logits: Tensor, start: int) -> Tensor:
        """Give each feature its rows of `logits`, a part that begins with row number `start`.

        Return the rows that are sampled.
        """
        if not self.wanted:
            return logits
        part = range(start, start + len(logits))
        for feature, group in groupby(self.wanted, key=itemgetter(0)):
            own = [(row, index) for _, row, index in group if index in part]
            if own:
                rows, indices = zip(*own)
                feature.receive_rows(list(rows), take(logits, indices, start))
        return take(logits, [index for index in self.sampled if index in part], start)


def take(logits: Tensor, indices: list[int] | tuple[int, ...], start: int) -> Tensor:
    return logits[to_device(np.array(indices, np.int64) - start, logits.device)]
