"""Incremental detokenization and stop strings.

The text of a token can depend on the tokens before it (leading spaces) and after it (the bytes of
one character). Only the tokenizer knows how. New tokens are therefore decoded together with a few
tokens before them, and their text is released when its last character is complete. Every token is
decoded a bounded number of times, whatever the length of the text.

tokenizers.decoders.DecodeStream is similar, for tokenizers in Rust, but is not used. While bytes
are not valid UTF-8, it releases nothing and decodes all of them again for each token. It raises for
tokens that cannot be decoded.
"""

from functools import partial
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from nanovllm.utils.helpers import ForeignError, call_foreign

Tokens = tuple[int, ...]


class State(NamedTuple):
    """What is decoded so far. A single store replaces it, so an interrupt cannot split it."""

    num_tokens: int
    text: str = ""  # the text after the first context
    context: Tokens = ()  # the newest tokens of the text, decoded together with those after it
    context_text: str = ""  # their text when they are decoded alone
    pending: Tokens = ()  # tokens that end within a character (with U+FFFD), or have no text
    pending_text: str = ""  # the text of the pending tokens after the context


class Detokenizer:
    """The text of one sequence's generated tokens, decoded incrementally.

    The text continues the prompt. The last tokens of the prompt are therefore decoded, too, and
    their text is left out. A character that the prompt begins and a generated token completes
    belongs to the text.

    Streamed text is append-only. Text is released when its last character is complete. With stop
    strings of up to N characters, the last N - 1 characters are held back. The final text is what
    `tokenizer.decode` returns for prompt and generated tokens, without the prompt's part, unless
    this contradicts released text. That can happen with invalid UTF-8: a tokenizer with byte
    fallback turns a whole run of byte tokens into U+FFFD if one byte is invalid. Released text is
    then kept. A token that the tokenizer cannot decode becomes U+FFFD.

    token_ids | prompt ............. | generated ................. |
                 | context | pending |                               the first state
                           | text ...................... |
                                               | context | pending | the newest state

    Instances are copied shallowly, so no attribute is mutated in place.
    """

    MAX_CONTEXT = 8  # tokens; a longer context is reduced to the tokens of the newest text
    MAX_PENDING = 32  # tokens, far more than a character has; then their text is released as it is

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_token_ids: list[int],
        stop_strings: tuple[str, ...] = (),
        hidden_ids: frozenset[int] | None = None,
    ) -> None:
        """`hidden_ids` are the special tokens without text, by default all of them."""
        self.tokenizer = tokenizer
        self.hidden_ids = hidden_ids
        self.stop_strings = stop_strings
        self.num_searched = 0  # characters of the text in which stop strings were searched for
        self.stop: int | None = None  # where the stop string that ended the text begins
        # The last characters of the text may be the start of a stop string.
        self.num_withheld = max(map(len, stop_strings), default=1) - 1
        self.state = self._read_prompt(prompt_token_ids)
        self.start = len(prompt_token_ids) - len(self.state.context) - len(self.state.pending)
        self.start_text = self.state.context_text
        # The decoded text begins with complete characters of these pending tokens, if there are
        # any, see `_without_prompt`.
        self.prompt_text = self.state.pending_text

    def _read_prompt(self, prompt_token_ids: list[int]) -> State:
        """Decode the last tokens of a prompt, and leave out their text.

        The context has text if the end of the prompt has any, because some tokenizers strip the
        first space of what they decode. It does not begin within a character. The end is bounded,
        because each token is decoded alone.
        """
        for size in (self.MAX_CONTEXT, 64, 512):
            state = State(0)
            for token_id in prompt_token_ids[-size:]:
                state = self._extend(state, token_id)
            has_start = state.text[:1] not in ("", "\ufffd")
            if has_start or size >= len(prompt_token_ids):
                break
        if not state.pending_text:  # no character is incomplete
            state = state._replace(context=state.context + state.pending, pending=())
        return state._replace(num_tokens=len(prompt_token_ids), text="")

    def read(self, token_ids: list[int], is_last: bool, end: int | None = None) -> str:
        """Decode new tokens, and return all text that can be released.

        `is_last` if no tokens follow. `token_ids` has the prompt, too, and may go on after `end`.
        With stop strings, `meets_stop_string` must have been called for each new token.
        """
        if is_last and self.stop is None:
            whole = self._decode(token_ids[self.start : end])
            if whole is not None and whole.startswith(self.start_text + self.state.text):
                return self._without_prompt(whole[len(self.start_text) :])
        if not self.stop_strings:
            self._push_new(token_ids, end)
        text = self.state.text
        if is_last or self.stop is not None:
            text = (text + self.state.pending_text)[: self.stop]
        else:
            text = text[: max(0, len(text) - self.num_withheld)]
        return self._without_prompt(text)

    def _without_prompt(self, text: str) -> str:
        """Remove the longest common prefix of decoded text and the prompt's pending text.

        It is the whole pending text, unless new tokens complete its last character. If the text
        grows, the result grows.
        """
        pending = self.prompt_text
        while not text.startswith(pending):
            pending = pending[:-1]
        return text[len(pending) :]

    def meets_stop_string(self, token_ids: list[int], may_stop: bool) -> bool:
        """Return whether the newest token completes a stop string. The text ends before it.

        Call it after each token. If the text must not stop yet, its new characters count as
        searched.
        """
        self._push_new(token_ids)
        # A token can end a stop string and begin a character that is incomplete.
        text = self.state.text + self.state.pending_text.rstrip("\ufffd")
        start = len(text) - len(self._without_prompt(text))
        if may_stop and self.stop is None:
            found = [
                text.find(string, max(start, self.num_searched - len(string) + 1))
                for string in self.stop_strings
            ]
            self.stop = min((index for index in found if index >= 0), default=None)
        self.num_searched = len(text)
        return self.stop is not None

    def _push_new(self, token_ids: list[int], end: int | None = None) -> None:
        """Decode the tokens that are new."""
        for token_id in token_ids[self.state.num_tokens : end]:
            self.state = self._extend(self.state, token_id)

    def _extend(self, state: State, token_id: int) -> State:
        """Return the state after one more token."""
        num_tokens, text, context, context_text, pending, pending_text = state
        num_tokens += 1
        recent_text = self._decode((*context, *pending, token_id))
        if recent_text is None:
            # The token becomes U+FFFD, and its neighbors are decoded as if it did not exist.
            still_pending = () if pending_text else pending
            text += pending_text + "\ufffd"
            return State(num_tokens, text, context, context_text, still_pending)
        pending = (*pending, token_id)
        if not recent_text.startswith(context_text):
            # The first bytes of a character can turn those of the context to U+FFFD as well.
            context = ()
            context_text = ""
            recent_text = self._decode(pending) or ""
        new_text = recent_text[len(context_text) :]
        is_incomplete = not new_text or new_text.endswith("\ufffd")
        if is_incomplete and len(pending) <= self.MAX_PENDING:
            return State(num_tokens, text, context, context_text, pending, new_text)
        if len(context + pending) > self.MAX_CONTEXT:
            context = ()
            recent_text = self._decode(pending) or ""
        return State(num_tokens, text + new_text, context + pending, recent_text)

    def _decode(self, token_ids: list[int] | Tokens) -> str | None:
        """Return the text of `token_ids`, or None if the tokenizer cannot decode them."""
        hidden_ids = self.hidden_ids or ()
        decode = partial(
            self.tokenizer.decode,
            [token_id for token_id in token_ids if token_id not in hidden_ids],
            skip_special_tokens=self.hidden_ids is None,
            clean_up_tokenization_spaces=False,
        )
        try:
            return str(call_foreign("the tokenizer cannot decode", decode))
        except ForeignError:
            return None
