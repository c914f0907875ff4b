"""The fixed points of a step at which an optional feature may act. The scheduler calls them.

Each point does nothing here. A feature overrides those that it needs and calls no `super()`, so
features need not know each other. LLM makes the list of extensions:

    begin_step
        limit_prefix, may_start, admitted    for a waiting sequence
        limit_tokens                         for a chunk
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
    """An optional feature."""

    scheduler: Any  # the Scheduler that calls it, which sets this

    def reset(self) -> None:
        """The queues and the KV cache are empty. Also called when the scheduler is made."""

    def begin_step(self) -> None:
        """A step begins. Drop what an interrupted one has left."""

    def limit_prefix(self, seq: Sequence, prefix: list[Block]) -> list[Block]:
        """Return the cached blocks that a waiting sequence can reuse, of those that were found."""
        return prefix

    def may_start(self, seq: Sequence) -> bool:
        """Return whether a waiting sequence may be admitted in this step."""
        return True

    def admitted(self, seq: Sequence) -> None:
        """A sequence has its blocks and its lane."""

    def limit_tokens(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many of the tokens that fit into the step are scheduled."""
        return num_tokens

    def releasing(self, seq: Sequence) -> None:
        """A sequence, preempted or with a finish_reason, is about to lose its blocks and lane."""

    def planned(self, seqs: list[Sequence]) -> None:
        """The policy has planned the step. The rest of its budget can still be used."""

    def prepared(self, seqs: list[Sequence], batch: Batch) -> Batch:
        """Return the batch that the model receives, on the host."""
        return batch

    def computed(self, batch: Batch, logits: Tensor) -> Tensor:
        """Return the rows of `logits` that are sampled.

        If a batch has very many rows, they come in parts. With several ranks this runs in rank 0's
        thread, which finishes the step of a call that was interrupted.
        """
        return logits

    def sampled(self, seqs: list[Sequence], token_ids: list[list[int]]) -> list[list[int]]:
        """Return the valid ones of the tokens that were sampled for each sequence."""
        return token_ids

    def recorded(self, seqs: list[Sequence]) -> None:
        """The valid tokens are appended, and sequences that have ended are finished."""

    def finished(self, seq: Sequence, reason: FinishReason) -> None:
        """A sequence has ended, within a step or between two."""

    def describe_settings(self) -> dict[str, Any]:
        """Describe for a trace what does not change from step to step."""
        return {}

    def describe_step(self) -> dict[str, Any]:
        """Describe the current step for a trace."""
        return {}

    def describe_sequence(self, seq: Sequence) -> dict[str, Any]:
        """Describe for a trace what the current step does with a sequence."""
        return {}


class Extensions(Extension):
    """A list of extensions, as one."""

    def __init__(self, extensions: Iterable[Extension] = ()) -> None:
        self.extensions = list(extensions)

    def reset(self) -> None:
        for each in self.extensions:
            each.reset()

    def begin_step(self) -> None:
        for each in self.extensions:
            each.begin_step()

    def limit_prefix(self, seq: Sequence, prefix: list[Block]) -> list[Block]:
        for each in self.extensions:
            prefix = each.limit_prefix(seq, prefix)
        return prefix

    def may_start(self, seq: Sequence) -> bool:
        return all([each.may_start(seq) for each in self.extensions])

    def admitted(self, seq: Sequence) -> None:
        for each in self.extensions:
            each.admitted(seq)

    def limit_tokens(self, seq: Sequence, num_tokens: int) -> int:
        for each in self.extensions:
            num_tokens = each.limit_tokens(seq, num_tokens)
        return num_tokens

    def releasing(self, seq: Sequence) -> None:
        for each in self.extensions:
            each.releasing(seq)

    def planned(self, seqs: list[Sequence]) -> None:
        for each in self.extensions:
            each.planned(seqs)

    def prepared(self, seqs: list[Sequence], batch: Batch) -> Batch:
        for each in self.extensions:
            batch = each.prepared(seqs, batch)
        return batch

    def computed(self, batch: Batch, logits: Tensor) -> Tensor:
        for each in self.extensions:
            logits = each.computed(batch, logits)
        return logits

    def sampled(self, seqs: list[Sequence], token_ids: list[list[int]]) -> list[list[int]]:
        for each in reversed(self.extensions):
            token_ids = each.sampled(seqs, token_ids)
        return token_ids

    def recorded(self, seqs: list[Sequence]) -> None:
        for each in self.extensions:
            each.recorded(seqs)

    def finished(self, seq: Sequence, reason: FinishReason) -> None:
        for each in self.extensions:
            each.finished(seq, reason)
