"""What a caller gets back, and the text in it."""

from typing import Literal, TypedDict

from transformers import PreTrainedTokenizerBase

FinishReason = Literal["stop", "length", "abort", "error"]


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


class Detokenizer:
    """The text of a growing list of tokens, each decoded a bounded number of times, and where a stop string ends it.

    A token's text can depend on the tokens before it (leading spaces) and after it (bytes of one character). So a window
    of the last tokens is decoded at a time, of which the first `num_told` characters are in `text` already:

        token_ids | prompt | ... told ... | window .................... |
        text                              | num_told ..... | new ... U+FFFD: bytes of a character that is not complete
    """

    WINDOW = 16  # tokens that are kept in the window when it moves on

    def __init__(self, tokenizer: PreTrainedTokenizerBase, num_prompt_tokens: int, stop_strings: tuple[str, ...] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop_strings = stop_strings
        self.text = ""
        self.is_cut = False  # a stop string was met: no text follows
        self.num_searched = 0  # characters of `text` known to hold no stop string
        self.window_start = num_prompt_tokens
        self.num_told = 0

    def read(self, token_ids: list[int], is_last: bool) -> str:
        """What a caller may see: unless `token_ids` are the last ones, without what could still become something else."""
        self._update(token_ids, is_last)
        if is_last or not self.stop_strings:
            return self.text
        begun = (n for stop in self.stop_strings for n in range(1, len(stop)) if self.text.endswith(stop[:n]))
        return self.text[: len(self.text) - max(begun, default=0)]

    def meets_stop_string(self, token_ids: list[int], may_stop: bool) -> bool:
        """Whether the newest token completes a stop string; `text` then ends before it. To be asked after every token."""
        if not self.stop_strings:
            return False
        self._update(token_ids)
        if may_stop:
            found = (self.text.find(stop, max(0, self.num_searched - len(stop) + 1)) for stop in self.stop_strings)
            if starts := [start for start in found if start >= 0]:
                self.text, self.is_cut = self.text[: min(starts)], True
        self.num_searched = len(self.text)
        return self.is_cut

    def _update(self, token_ids: list[int], is_last: bool = False) -> None:
        if self.is_cut:
            return
        told = self._decode(token_ids, complete=is_last)
        self.text += told[self.num_told :]
        self.num_told = len(told)
        if len(token_ids) - self.window_start > 2 * self.WINDOW:
            self.window_start = len(token_ids) - self.WINDOW
            self.num_told = len(self._decode(token_ids, complete=is_last))

    def _decode(self, token_ids: list[int], complete: bool) -> str:
        text = self.tokenizer.decode(
            token_ids[self.window_start :], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        if complete:
            return text
        end = len(text.rstrip("\ufffd"))
        return text[: max(end, len(text) - 3)]  # more than three in a row are no beginning of a character
