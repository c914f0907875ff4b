"""The scheduling state of one prompt and of the tokens that are generated for it.

A sequence is never "in prefill" or "in decode". It has tokens, and `num_computed_tokens` of them
have their K/V in the cache. A step that schedules the sequence moves this number towards the number
of tokens:

    token_ids        | prompt .............................. | generated ....... |
    K/V in the cache | num_computed_tokens ........ | num_tokens of a step |

A sequence decodes if only its newest generated token has no K/V. Between steps the K/V of the
newest token are not in the cache, because the newest token is the input of the next step.

While a step is in flight, its tokens are sampled and not read yet. Each sequence that it samples
has one pending token, the last of `token_ids`, written as ~row: -1 for row 0 of the logits, -2 for
row 1.
The next step is planned with it. K/V, positions, blocks and budgets depend on how many tokens there
are, so a pending token counts. Hashes, ends and text depend on which tokens these are, so they wait
until it is known.
"""

from dataclasses import dataclass

from nanovllm.engine.outputs import FinishReason
from nanovllm.sampling_params import SamplingParams


@dataclass(eq=False)
class Sequence:
    """The scheduling state of one request, or of one of its n samples."""

    seq_id: int
    token_ids: list[int]  # prompt tokens, then generated tokens
    params: SamplingParams
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    max_model_len: int = 2**31
    ends_with_prompt: bool = False  # the token that it samples is dropped

    def __post_init__(self) -> None:
        params = self.params
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.min_num_tokens = self.num_prompt_tokens + params.min_tokens
        # The limit on prompt and generated tokens together.
        max_new_tokens = 0 if self.ends_with_prompt else params.max_tokens
        self.max_num_tokens = min(self.max_model_len, self.num_prompt_tokens + max_new_tokens)
        self.finish_reason: FinishReason | None = None
        self.restart()

    def restart(self) -> None:
        """Return to the state before the first step. Tokens, parameters and seed stay."""
        self.num_cached_tokens: int | None = None  # prompt tokens that the first admission found
        self.num_computed_tokens = 0
        self.num_admitted_tokens = 0  # tokens when it was last admitted
        self.block_table: list[int] = []  # logical block -> physical block
        self.block_hashes: list[int] = []  # hashes of full blocks, computed when first needed
        self.lane = -1  # while it runs: its row in the model runner's block tables, 0 or more

    @property
    def has_pending_token(self) -> bool:
        """Whether the newest token is sampled, but not read yet."""
        return self.token_ids[-1] < 0

    @property
    def num_known_tokens(self) -> int:
        num_tokens = len(self.token_ids)
        return num_tokens - 1 if self.has_pending_token else num_tokens

    def check_end(self) -> FinishReason | None:
        """Return why the newest token ends the sequence, or None if it does not.

        A stop token counts only after the first `min_tokens` generated ones. It comes before the
        end by length.
        """
        num_tokens = len(self.token_ids)
        if self.token_ids[-1] in self.stop_token_ids and num_tokens > self.min_num_tokens:
            return "stop"
        return "length" if num_tokens >= self.max_num_tokens else None
