"""The rows of a step: hidden states and logits, those that are sampled and those of features.

    tokens of a step       | 4  5  6  7 |     5 and 6 are wanted, and the row of 7 is sampled
    rows                        0  1  2       a row can have several owners

The rows of a sequence are those of its last tokens in the step, because kernels need not compute
other tokens in the last layer. Logits are computed for the rows that need them.
"""

from collections.abc import Callable, Iterable
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

    def hand_out(
        self, hidden: Tensor, start: int, compute_logits: Callable[[Tensor | None], Tensor]
    ) -> Tensor:
        """Give each feature its rows of `hidden`, a part that begins with row number `start`.

        compute_logits(indices) returns the logits of some rows of `hidden`, or of all of them for
        None. Return the logits that are sampled.
        """
        if not self.wanted:
            return compute_logits(None)
        part = range(start, start + len(hidden))
        wanted = [each for each in self.wanted if each[2] in part]
        sampled = [index for index in self.sampled if index in part]
        scored = [index for feature, _, index in wanted if not feature.wants_hidden]
        with_logits = sorted({*sampled, *scored})
        logits = compute_logits(to_index([index - start for index in with_logits], hidden))
        place_of = {index: place for place, index in enumerate(with_logits)}
        for feature, group in groupby(wanted, key=itemgetter(0)):
            _, rows, indices = zip(*group)
            if feature.wants_hidden:
                values = hidden[to_index([index - start for index in indices], hidden)]
            else:
                values = logits[to_index(map(place_of.__getitem__, indices), hidden)]
            feature.receive_rows(list(rows), values)
        return logits[to_index(map(place_of.__getitem__, sampled), hidden)]


def to_index(numbers: Iterable[int], like: Tensor) -> Tensor:
    return to_device(np.array([*numbers], np.int64), like.device)
