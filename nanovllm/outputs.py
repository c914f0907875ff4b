"""What a caller gets back, and the text in it."""

from typing import TypedDict

from transformers import PreTrainedTokenizerBase


class RequestOutput(TypedDict):
    """A request as it stands: all that was generated so far, not what is new."""

    request_id: int
    prompt_token_ids: list[int]
    token_ids: list[int]  # generated, the stop token included
    text: str  # generated, special tokens left out
    finish_reason: str | None  # None while running, then "stop", "length" or "abort"
    logprobs: list[dict[int, float]] | None
    cumulative_logprob: float | None
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


class Detokenizer:
    """Text of a growing list of tokens, each token decoded a bounded number of times.

    What a token adds can depend on the tokens before it (leading spaces) and on those after it (bytes of one character).
    So the new tokens are decoded together with the ones before, and the text of these is taken off:

        token_ids | ... told | told, context | new ...
                             ^ context_start ^ told_end
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.text = ""
        self.context_start = 0
        self.told_end = 0

    def update(self, token_ids: list[int], is_last: bool) -> str:
        """The text of `token_ids`; unless they are the last ones, without a character whose bytes are not all there."""
        context = self._decode(token_ids[self.context_start : self.told_end])
        extended = self._decode(token_ids[self.context_start :])
        if len(extended) > len(context) and (is_last or not extended.endswith("\ufffd")):
            self.text += extended[len(context) :]
            self.context_start, self.told_end = self.told_end, len(token_ids)
        return self.text

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)
