"""One prompt and what has been generated for it, as the scheduler, the block manager and the model runner see it.

A sequence is never "in prefill" or "in decode". It has tokens, and of those `num_computed_tokens` have their K/V in the
cache; every step moves the second number towards the first:

    token_ids        | prompt .............................. | generated ....... |
    K/V in the cache | num_computed_tokens ........ | num_scheduled_tokens |
                                                      `-- computed by this step

A decode is a sequence that is one token behind. The newest token's K/V is never in the cache: its logits come next.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.outputs import Detokenizer


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """The state of one request, or of one of its n samples."""

    __slots__ = (
        "seq_id", "status", "token_ids", "num_prompt_tokens", "params", "is_plain", "seed", "sample_index",
        "stop_token_ids", "min_num_tokens", "max_num_tokens", "finish_reason",
        "num_computed_tokens", "num_scheduled_tokens", "num_cached_tokens", "block_table", "block_hashes", "lane",
        "logprobs", "cumulative_logprobs", "detokenizer", "mailbox",
    )  # fmt: skip

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        seed: int = 0,
        sample_index: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
        max_num_tokens: int | None = None,
    ) -> None:
        self.seq_id = seq_id
        self.status = SequenceStatus.WAITING
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.is_plain = not (params.penalizes or params.min_tokens or params.logprobs is not None)  # a draw, no more
        self.seed = seed
        self.sample_index = sample_index
        self.stop_token_ids = stop_token_ids
        self.min_num_tokens = self.num_prompt_tokens + params.min_tokens
        self.max_num_tokens = max_num_tokens or self.num_prompt_tokens + params.max_tokens
        self.finish_reason: str | None = None

        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_cached_tokens: int | None = None  # set when first admitted; prompt tokens only
        self.block_table: list[int] = []
        self.block_hashes: list[int] = []  # of the full blocks of token_ids, filled in as they are asked for
        self.lane = -1  # while running: a number below max_num_seqs that no other running sequence has

        self.logprobs: list[dict[int, float]] = []  # per generated token, if they are asked for
        self.cumulative_logprobs: list[float] = []
        self.detokenizer: Detokenizer | None = None  # made by the engine when text is needed
        self.mailbox: dict[Sequence, None] = {}  # where the engine leaves word that there is news

    @property
    def generated_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def check_end(self) -> str | None:
        """Whether the newest token is the last one, and why: the rules in the order of their precedence."""
        num_tokens = len(self.token_ids)
        if num_tokens == self.num_prompt_tokens:
            return None
        may_stop = num_tokens > self.min_num_tokens
        has_stop_string = self.detokenizer is not None and self.detokenizer.meets_stop_string(self.token_ids, may_stop)
        if has_stop_string or (self.token_ids[-1] in self.stop_token_ids and may_stop):
            return "stop"
        if num_tokens >= self.max_num_tokens:
            return "length"
        return None
