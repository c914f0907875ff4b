"""One prompt and what has been generated for it, as the scheduler, the block manager and the model runner see it.

A sequence is never "in prefill" or "in decode". It has tokens, and of those `num_computed_tokens` have their K/V in the
cache; every step moves the second number towards the first:

    token_ids        | prompt .............................. | generated ....... |
    K/V in the cache | num_computed_tokens ........ | num_scheduled_tokens |
                                                      `-- computed by this step

A decode is a sequence that is one token behind. The newest token's K/V is never in the cache: its logits come next. Behind it
a step may compute a `draft`: guesses that become tokens only if they are what is drawn (speculation.py).
Text, log probabilities and callers are not known here: they are engine/request.py's.
"""

from dataclasses import dataclass
from enum import Enum, auto

from nanovllm.engine.drafter import Guesser
from nanovllm.outputs import FinishReason
from nanovllm.sampling_params import SamplingParams


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(eq=False)
class Sequence:
    """The scheduling state of one request, or of one of its n samples."""

    seq_id: int
    token_ids: list[int]  # the prompt's, to which the generated ones are appended
    params: SamplingParams
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    max_num_tokens: int = 2**31  # prompt and generated tokens, if params.max_tokens does not end it sooner

    def __post_init__(self) -> None:
        params, self.token_ids = self.params, list(self.token_ids)
        self.status = SequenceStatus.WAITING
        self.num_prompt_tokens = len(self.token_ids)
        self.needs_logits_processing = bool(params.penalizes or params.min_tokens or params.logprobs is not None)
        self.min_num_tokens = self.num_prompt_tokens + params.min_tokens
        self.max_num_tokens = min(self.max_num_tokens, self.num_prompt_tokens + params.max_tokens)
        self.finish_reason: FinishReason | None = None

        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_cached_tokens: int | None = None  # the prefix hit when it was first admitted; prompt tokens only
        self.block_table: list[int] = []
        self.block_hashes: list[int] = []  # of the full blocks of token_ids, filled in as they are asked for
        self.was_nan = False  # its logits were: it is computed again, without what others have computed
        self.draft: list[int] = []  # guesses that this step computes besides num_scheduled_tokens
        self.guesser: Guesser | None = None  # who makes them, if there is speculation
        self.lane = -1  # while running: a number below num_lanes that no other running sequence has

    @property
    def is_decode(self) -> bool:
        """Whether this step computes nothing but its newest generated token (and a draft)."""
        return self.num_scheduled_tokens == 1 and self.num_computed_tokens >= self.num_prompt_tokens

    def check_end(self) -> FinishReason | None:
        """Whether the newest token is the last one, and why."""
        num_tokens = len(self.token_ids)
        if self.token_ids[-1] in self.stop_token_ids and num_tokens > self.min_num_tokens:
            return "stop"
        return "length" if num_tokens >= self.max_num_tokens else None
