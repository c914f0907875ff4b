"""Incremental detokenization and stop strings.

The text of a token can depend on the tokens before it (leading spaces) and after it (the bytes of
one character). Only the tokenizer knows how. New tokens are therefore decoded together with a few
tokens before them, and their text is released when its last character is complete. Every token is
decoded a bounded number of times, whatever the length of the text.

tokenizers.decoders.DecodeStream is similar, for tokenizers in Rust, but is not used. While bytes
are not valid UTF-8, it releases nothing and decodes all of them again for each token. It raises for
tokens that cannot be decoded.
"""

from transformers import PreTrainedTokenizerBase

Tokens = tuple[int, ...]


class Detokenizer:
    """The text of one sequence's generated tokens, decoded incrementally.

    Streamed text is append-only. Text is released when its last character is complete. With stop
    strings of up to N characters, the last N - 1 characters are held back. The final text is
    `tokenizer.decode(generated token ids)`, unless this contradicts released text. That can happen
    with invalid UTF-8: a tokenizer with byte fallback turns a whole run of byte tokens into U+FFFD
    if one byte is invalid. Released text is then kept. A token that the tokenizer cannot decode
    becomes U+FFFD.

    token_ids | prompt | ............ | context | pending |     `text` ends where the context ends

    Instances are copied shallowly, so no attribute is mutated in place.
    """

    MAX_CONTEXT = 8  # tokens; a longer context is reduced to the tokens of the newest text
    MAX_PENDING = 32  # tokens, far more than a character has; then their text is released as it is

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_prompt_tokens: int,
        stop_strings: tuple[str, ...] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_strings = stop_strings
        self.num_prompt_tokens = num_prompt_tokens
        self.num_decoded_tokens = num_prompt_tokens
        self.text = ""
        # The context is decoded with new tokens. `context_text` is its text when decoded alone.
        # Pending tokens end within a character (with U+FFFD) or have no text.
        self.window: tuple[Tokens, str, Tokens] = ((), "", ())  # context, context_text, pending
        # With stop strings, the last characters of the text may be the start of one.
        self.num_withheld = max(map(len, stop_strings), default=1) - 1
        self.num_searched = 0  # characters already searched for stop strings
        self.end: int | None = None  # where the stop string that ended the text begins

    def read(self, token_ids: list[int], is_last: bool) -> str:
        """Return the text that can be released. `is_last` if no tokens follow.

        With stop strings, `meets_stop_string` must have been called for each new token.
        """
        if is_last and self.end is None:
            whole = self._decode(token_ids[self.num_prompt_tokens :])
            if whole is not None and whole.startswith(self.text):
                return whole
        if not self.stop_strings:
            self._advance(token_ids)
        if is_last or self.end is not None:
            return (self.text + self._find_new_text(*self.window))[: self.end]
        num_released = max(0, len(self.text) - self.num_withheld)
        return self.text[:num_released]

    def meets_stop_string(self, token_ids: list[int], may_stop: bool) -> bool:
        """Return whether the newest token completes a stop string. The text ends before it.

        Call it after each token. An interrupted call can miss a stop string, so Request calls it on
        a copy.
        """
        num_searched = self.num_searched
        self._advance(token_ids)
        text = self.text
        _, _, pending = self.window
        if pending:
            # A token can end a stop string and begin a character that is incomplete.
            text += self._find_new_text(*self.window).rstrip("\ufffd")
        self.num_searched = len(text)
        if may_stop and self.end is None:
            starts: list[int] = []
            for stop in self.stop_strings:
                first = max(0, num_searched - len(stop) + 1)
                starts.append(text.find(stop, first))
            self.end = min((start for start in starts if start >= 0), default=None)
        return self.end is not None

    def _advance(self, token_ids: list[int]) -> None:
        for token_id in token_ids[self.num_decoded_tokens :]:
            new_text, window = self._take(token_id, *self.window)
            # One statement, so that a KeyboardInterrupt comes before or after all of it.
            self.num_decoded_tokens, self.text, self.window = (
                self.num_decoded_tokens + 1,
                self.text + new_text,
                window,
            )

    def _take(
        self, token_id: int, context: Tokens, context_text: str, pending: Tokens
    ) -> tuple[str, tuple[Tokens, str, Tokens]]:
        """Return the text that one more token releases, and the window after it."""
        text = self._decode((*context, *pending, token_id))
        if text is None:
            # The token becomes U+FFFD, and its neighbors are decoded as if it did not exist.
            new_text = self._find_new_text(context, context_text, pending)
            still_pending = () if new_text else pending
            return new_text + "\ufffd", (context, context_text, still_pending)
        pending = (*pending, token_id)
        if context and text.endswith("\ufffd"):
            # The first bytes of a character can turn those of the context to U+FFFD as well.
            context = ()
            context_text = ""
            text = self._decode(pending) or ""
        new_text = text[len(context_text) :]
        is_incomplete = not new_text or new_text.endswith("\ufffd")
        if is_incomplete and len(pending) <= self.MAX_PENDING:
            return "", (context, context_text, pending)
        if len(context + pending) > self.MAX_CONTEXT:
            context = ()
            text = self._decode(pending) or ""
        return new_text, (context + pending, text, ())

    def _find_new_text(self, context: Tokens, context_text: str, pending: Tokens) -> str:
        """Return the text of `pending` after the context."""
        return (self._decode(context + pending) or "")[len(context_text) :]

    def _decode(self, token_ids: list[int] | Tokens) -> str | None:
        """Return the text of `token_ids`, or None if the tokenizer cannot decode them."""
        try:
            text = self.tokenizer.decode(
                list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        except Exception:  # depends on the tokenizer
            return None
        return str(text)
