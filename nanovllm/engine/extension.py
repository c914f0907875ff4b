"""The fixed points of a step at which an optional feature may act.

A feature is a subclass of Extension. It overrides the points that it needs and calls no `super()`,
so features need not know each other. LLM makes the list of features. The scheduler and the model
runner call the points of the list, as those of one extension:

    begin_step
        limit_prefix, may_start, admitted    for a waiting sequence
        limit_tokens, scheduled              for scheduled tokens, except a decode within a block
        releasing                            for a running sequence that is preempted
    planned                                  the step can still be extended, within its budget
    prepared                                 the batch can still be changed
    computed                                 logits, before any of them is sampled
    sampled                                  in reverse order, as nested calls return
    recorded                                 the tokens are appended
    releasing, finished, reset               also between steps
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from nanovllm.batch import Batch
from nanovllm.engine.block_manager import Block
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import FinishReason


class Extension:
    """An optional feature, or a list of features. A point calls those of the list, in order."""

    features: tuple["Extension", ...] = ()
    scheduler: Any  # the Scheduler, which sets this. Any, because it imports this module

    def __init__(self, features: Iterable["Extension"] = ()) -> None:
        self.features = tuple(features)

    def reset(self) -> None:
        """The queues and the KV cache are empty. Also called when the scheduler is made."""
        for each in self.features:
            each.reset()

    def begin_step(self) -> None:
        """A step begins. Drop what an interrupted one has left."""
        for each in self.features:
            each.begin_step()

    def limit_prefix(self, seq: Sequence, prefix: list[Block]) -> list[Block]:
        """Return the cached blocks that a waiting sequence can reuse, of those that were found."""
        for each in self.features:
            prefix = each.limit_prefix(seq, prefix)
        return prefix

    def may_start(self, seq: Sequence) -> bool:
        """Return whether a waiting sequence may be admitted in this step."""
        return all([each.may_start(seq) for each in self.features])  # all of them are asked

    def admitted(self, seq: Sequence) -> None:
        """A sequence has its blocks and its lane."""
        for each in self.features:
            each.admitted(seq)

    def limit_tokens(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many of the tokens that fit into the step are scheduled.

        The scheduler's fast path, a decode within a block, skips this point.
        """
        for each in self.features:
            num_tokens = each.limit_tokens(seq, num_tokens)
        return num_tokens

    def scheduled(self, seq: Sequence) -> None:
        """The tokens of a chunk are chosen, and the blocks that they make full are cached.

        Sequences that are admitted later in this step can share these blocks. A decode within a
        block skips this point, like limit_tokens.
        """
        for each in self.features:
            each.scheduled(seq)

    def releasing(self, seq: Sequence) -> None:
        """A sequence, preempted or with a finish_reason, is about to lose its blocks and lane."""
        for each in self.features:
            each.releasing(seq)

    def planned(self, seqs: list[Sequence]) -> None:
        """The policy has planned the step. The rest of its budget can still be used."""
        for each in self.features:
            each.planned(seqs)

    def prepared(self, seqs: list[Sequence], batch: Batch) -> Batch:
        """Return the batch that the model receives. Its arrays are numpy's, on the host."""
        for each in self.features:
            batch = each.prepared(seqs, batch)
        return batch

    def computed(self, batch: Batch, logits: Tensor) -> Tensor:
        """Return the rows of `logits` that are sampled.

        If a batch has very many rows, they come in parts. With several ranks this runs in rank 0's
        thread, which finishes the step of a call that was interrupted.
        """
        for each in self.features:
            logits = each.computed(batch, logits)
        return logits

    def sampled(self, seqs: list[Sequence], token_ids: list[list[int]]) -> list[list[int]]:
        """Return the valid ones of the tokens that were sampled for each sequence."""
        for each in reversed(self.features):
            token_ids = each.sampled(seqs, token_ids)
        return token_ids

    def recorded(self, seqs: list[Sequence]) -> None:
        """The valid tokens are appended, and sequences that have ended are finished."""
        for each in self.features:
            each.recorded(seqs)

    def finished(self, seq: Sequence, reason: FinishReason) -> None:
        """A sequence has ended, within a step or between two."""
        for each in self.features:
            each.finished(seq, reason)

    def describe_settings(self) -> dict[str, Any]:
        """Describe for a trace what does not change from step to step."""
        return merge([each.describe_settings() for each in self.features])

    def describe_step(self) -> dict[str, Any]:
        """Describe for a trace the current step."""
        return merge([each.describe_step() for each in self.features])

    def describe_sequence(self, seq: Sequence) -> dict[str, Any]:
        """Describe for a trace what the current step does with a sequence."""
        return merge([each.describe_sequence(seq) for each in self.features])


def merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}
