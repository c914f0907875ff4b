"""What a caller gets back."""

from typing import Literal, TypedDict

FinishReason = Literal["stop", "length", "abort", "error"]
Logprobs = list[dict[int, float] | None] | None  # of each row of logits that asks for them: token id -> log probability


class RequestOutput(TypedDict):
    """A request as it stands: all that was generated so far, not what is new."""

    request_id: int  # each of n samples has one, the first the one that add_request returned
    sample_index: int  # which of the n samples
    prompt_token_ids: list[int]
    token_ids: list[int]  # generated, the stop token included
    text: str  # generated; special tokens and the stop string left out
    finish_reason: FinishReason | None  # None while running; "error": it could not go on, and a warning said why
    logprobs: list[dict[int, float]] | None  # per generated token: the most probable tokens and the chosen one
    cumulative_logprob: float | None  # of the generated tokens together
    num_cached_tokens: int  # prompt tokens whose K/V came from the prefix cache


class Stats(TypedDict):
    """Counters since the engine started, then how things stand. Computed tokens are prefill or decode, reused ones cached."""

    num_prefill_tokens: int
    num_decode_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_waiting: int
    num_running: int
    num_free_blocks: int
    num_blocks: int
    num_draft_tokens: int  # guessed, and computed to see which are right
    num_accepted_tokens: int  # of these, the right ones: they are decode tokens
