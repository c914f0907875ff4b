"""The fixed points of a step at which an optional feature may act.

A feature is a subclass of Feature, and one object in the list of an engine. It overrides the points
that it needs. The scheduler, the model runner and the engine call each point for the features that
override it, in order, and know none of them by name:

    prepare                                  the parameters of prompts, before they are queued
    begin_step
        limit_prefix, may_start, admitted    for a waiting sequence
        limit_tokens, scheduled              for tokens, except decodes that enter or fill no block
        releasing                            for a running sequence that is preempted
    planned                                  the step can still be extended, within its budget
    wanted_rows                              rows of logits or hidden states
    prepared                                 the batch can still be changed
    computed                                 logits, before any of them is sampled
    receive_rows                             the rows that it wanted
    processed                                logits of requests that change them
    sampled                                  tokens, the last feature first
    advanced                                 the step's tokens count as computed
    recorded                                 the sampled tokens are appended
    releasing, finished, reset               can also come between steps
    weights_changed                          only comes between steps

If steps overlap, `advanced` of a step comes before its `sampled` and `recorded`, and between these
the next step is planned. A feature that cannot work in this way sets `can_overlap` to False.

State of a running sequence is kept in a dict by sequence, which `finished` and `reset` clean. What
may end a request is a Constraint.
"""

import weakref
from collections.abc import Collection
from typing import Any, ClassVar

from torch import Tensor

from nanovllm.batch.batch import Batch
from nanovllm.engine.block_manager import Block
from nanovllm.engine.outputs import FinishReason
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Row, Step
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import invalid

Facts = dict[str, Any]  # names and values that JSON can hold, for a trace
NEEDS_LLM = "no feature of this engine serves it: use nanovllm.LLM, which has all features"


class Constraint:
    """What may end a request. Each sample has a copy, which has consumed its generated tokens."""

    def restart(self, token_ids: list[int]) -> None:
        """Consume these generated tokens, and no others."""

    def consume(self, token_id: int) -> FinishReason | None:
        """Consume a new token. Return why it ends the request, or None if it does not."""
        return None

    def explain_error(self) -> str | None:
        """Return why it ended the request with "error", or None if it did not."""
        return None


class Feature:
    """An optional feature. Each point does nothing unless a subclass overrides it."""

    # A name in `needs` of Config, ModelSpec or SamplingParams.
    serves: ClassVar[str] = ""
    can_overlap: ClassVar[bool] = True
    wants_hidden: ClassVar[bool] = False  # its rows are hidden states instead of logits
    scheduler: Any  # the Scheduler, which imports this module

    def start(self, engine: Any) -> bool:
        """Prepare for an LLMEngine without requests. Return whether it uses this feature."""
        # A weak reference avoids a cycle, so an engine is freed with its last reference.
        self.scheduler = weakref.proxy(engine.scheduler)
        self.reset()
        return True

    def reset(self) -> None:
        """The KV cache is empty and no sequence runs. Unfinished sequences are waiting."""

    def prepare(self, params: SamplingParams, num_samples: int) -> dict[str, Any]:
        """Return fields for the `num_samples` requests of prompts that share `params`.

        Raises ValueError for parameters that cannot be served.
        """
        return {}

    def begin_step(self) -> None:
        """A step begins. Drop what an interrupted one has left."""

    def limit_prefix(self, seq: Sequence, prefix: list[Block]) -> list[Block]:
        """Return the cached blocks that a waiting sequence reuses.

        They are the first ones of `prefix`, which was found, or `prefix` and blocks behind it.
        """
        return prefix

    def may_start(self, seq: Sequence) -> bool:
        """Return whether a waiting sequence may be admitted in this step.

        Each feature is asked, also after a refusal, so that it can prepare what it waits for.
        """
        return True

    def admitted(self, seq: Sequence) -> None:
        """A sequence has its blocks and its lane."""

    def limit_tokens(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many of the tokens that fit into the step are scheduled."""
        return num_tokens

    def scheduled(self, seq: Sequence, end: int) -> None:
        """The tokens of a sequence up to position `end` are scheduled.

        The blocks that they make full are cached, so sequences that are admitted later in this step
        can share them.
        """

    def releasing(self, seq: Sequence) -> None:
        """A sequence, preempted or with a finish_reason, is about to lose its blocks and lane."""

    def planned(self, step: Step) -> None:
        """The policy has planned the step. The rest of its budget can still be used."""

    def wanted_rows(self, step: Step) -> list[Row]:
        """Return the rows that the feature wants, of tokens that the step computes."""
        return []

    def prepared(self, step: Step, batch: Batch) -> Batch:
        """Return the batch that the model receives. Its arrays are numpy's, on the host."""
        return batch

    def computed(self, step: Step, logits: Tensor) -> None:
        """The rows of logits that are sampled, one for each token that the step samples."""

    def receive_rows(self, rows: list[Row], values: Tensor) -> None:
        """Receive rows of `wanted_rows`, all of them or in parts, with their logits.

        With `wants_hidden` they come with their hidden states, after the model's last norm.

        With several ranks this runs in rank 0's thread, which finishes the step of a call that was
        interrupted.
        """

    def processed(self, rows: list[Sequence], logits: Tensor) -> Tensor:
        """Return changed logits, if a row's parameters change them. Penalties come after this."""
        return logits

    def sampled(self, step: Step, token_ids: list[list[int]]) -> list[list[int]]:
        """Return the valid ones of the tokens that were sampled for each sequence."""
        return token_ids

    def advanced(self, step: Step) -> None:
        """The tokens of the step count as computed."""

    def recorded(self, step: Step) -> None:
        """The valid tokens are appended, and sequences that have ended are finished."""

    def finished(self, seq: Sequence, reason: FinishReason) -> None:
        """A sequence has ended, within a step or between two."""

    def weights_changed(self, is_original: bool) -> None:
        """The model is about to get other weights, or has those of the checkpoint again."""

    def exit(self) -> None:
        """The engine ends, or has not started. A second call has no effect."""

    def stats(self) -> dict[str, int]:
        """Return counters, by their names in Stats."""
        return {}

    def describe_settings(self) -> Facts:
        """Return facts for a trace that are the same in all steps."""
        return {}

    def describe(self, step: Step) -> tuple[Facts, dict[Sequence, Facts]]:
        """Return facts about a step and its sequences, before its result, for a trace."""
        return {}, {}


class Features(list[Feature]):
    """The features of an engine, in order. `features.planned` are those that override this point.

    Most features override few points, so a step enters no default that does nothing.
    """

    def __getattr__(self, point: str) -> list[Feature]:
        default = getattr(Feature, point)
        overriding = [each for each in self if getattr(type(each), point) is not default]
        setattr(self, point, overriding)  # so that this is called once for a point
        return overriding

    def append(self, feature: Feature) -> None:
        vars(self).clear()
        super().append(feature)


def check_served(needs: list[str], features: Collection[Feature]) -> None:
    """Raise ValueError for a need that none of `features` serves."""
    served = [feature.serves for feature in features]
    for name in needs:
        if name not in served:
            raise invalid(name, NEEDS_LLM)
