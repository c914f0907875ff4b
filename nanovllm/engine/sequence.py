"""One prompt and what has been generated for it, as the scheduler, the block manager and the model runner see it.

A sequence is never "in prefill" or "in decode". It has tokens, and of those `num_computed_tokens` have their K/V in the
cache; every step moves the second number towards the first:

    token_ids        | prompt .............................. | generated ....... |
    K/V in the cache | num_computed_tokens ........ | num_scheduled_tokens |
                                                      `-- computed by this step

A decode is a sequence that is one token behind. The newest token's K/V is never in the cache: its logits come next.
"""

from enum import Enum, auto

from nanovllm.outputs import Detokenizer
from nanovllm.sampling_params import SamplingParams


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """The state of one request. `stop_token_ids` end it, and so does reaching `max_num_tokens` (prompt and generated)."""

    __slots__ = (
        "seq_id", "status", "token_ids", "num_prompt_tokens", "params", "seed", "stop_token_ids", "max_num_tokens",
        "num_computed_tokens", "num_scheduled_tokens", "num_cached_tokens", "block_table", "block_hashes", "lane",
        "finish_reason", "mailbox", "detokenizer",
    )  # fmt: skip

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        seed: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
        max_num_tokens: int | None = None,
    ) -> None:
        self.seq_id = seq_id
        self.status = SequenceStatus.WAITING
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.seed = seed
        self.stop_token_ids = stop_token_ids
        self.max_num_tokens = max_num_tokens or self.num_prompt_tokens + params.max_tokens
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_cached_tokens: int | None = None  # set when first admitted; prompt tokens only
        self.block_table: list[int] = []
        self.block_hashes: list[int] = []  # of the full blocks of token_ids, filled in as they are asked for
        self.lane = -1  # while running: a number below max_num_seqs that no other running sequence has
        self.finish_reason: str | None = None
        self.mailbox: dict[Sequence, None] = {}  # who gets the news; this and the next are the front end's
        self.detokenizer: Detokenizer | None = None

    @property
    def generated_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED
