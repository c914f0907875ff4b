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

from transformers import PreTrainedTokenizerBase

Tokens = tuple[int, ...]
# Tokens with complete text, that text, and the tokens after them, which are pending.
Window = tuple[Tokens, str, Tokens]


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

    token_ids | prompt ........ | ............ | context | pending |
                | anchor | tail |                         `text` ends where the context ends

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
        self.num_decoded_tokens = len(prompt_token_ids)
        # The context is decoded with new tokens. `context_text` is its text when decoded alone.
        # Pending tokens end within a character (with U+FFFD) or have no text.
        self.window = self._find_anchor(prompt_token_ids)
        anchor, self.anchor_text, tail = self.window
        self.anchor_start = len(prompt_token_ids) - len(anchor) - len(tail)
        self.tail_text = self._find_new_text(*self.window)
        # The text after the anchor. It begins with complete characters of the tail, if there are
        # any, see `_without_tail`.
        self.text = ""
        # With stop strings, the last characters of the text may be the start of one.
        self.num_withheld = max(map(len, stop_strings), default=1) - 1
        self.num_searched = 0  # characters already searched for stop strings
        self.end: int | None = None  # where the stop string that ended the text begins

    def _find_anchor(self, prompt_token_ids: list[int]) -> Window:
        """The last tokens of a prompt: an anchor, its text, and the tail.

        The anchor has text if the prompt has any, because some tokenizers strip the first space of
        what they decode. It does not begin within a character.
        """
        window: Window = ((), "", ())
        size = self.MAX_CONTEXT
        while True:
            recent = tuple(prompt_token_ids[-size:])
            text = self._decode(recent)
            if text is None:
                return window
            window = self._split_off_tail(recent, text)
            has_start = text != "" and not text.startswith("\ufffd")
            if has_start or size >= len(prompt_token_ids):
                return window
            size *= 4

    def _split_off_tail(self, token_ids: Tokens, text: str) -> Window:
        """Divide tokens where their last complete character ends."""
        if text.endswith("\ufffd"):
            for num_tail in range(1, 1 + min(3, len(token_ids))):  # a character has up to 4 bytes
                anchor = token_ids[:-num_tail]
                anchor_text = self._decode(anchor) or ""
                if not anchor_text.endswith("\ufffd"):
                    return anchor, anchor_text, token_ids[-num_tail:]
        return token_ids, text, ()

    def read(self, token_ids: list[int], is_last: bool) -> str:
        """Decode new tokens, and return all text that can be released.

        `is_last` if no tokens follow. `token_ids` has the prompt, too. With stop strings,
        `meets_stop_string` must have been called for each new token.
        """
        if is_last and self.end is None:
            whole = self._decode(token_ids[self.anchor_start :])
            if whole is not None and whole.startswith(self.anchor_text + self.text):
                return self._without_tail(whole[len(self.anchor_text) :])
        if not self.stop_strings:
            self.push_new(token_ids)
        if is_last or self.end is not None:
            text = (self.text + self._find_new_text(*self.window))[: self.end]
        else:
            num_released = max(0, len(self.text) - self.num_withheld)
            text = self.text[:num_released]
        return self._without_tail(text)

    def _without_tail(self, text: str) -> str:
        """Remove the longest common prefix of the text after the anchor and the tail.

        It is the whole tail, unless new tokens complete its last character. If the text grows, the
        result grows.
        """
        tail = self.tail_text
        while not text.startswith(tail):
            tail = tail[:-1]
        return text[len(tail) :]

    def meets_stop_string(self, token_ids: list[int], may_stop: bool) -> bool:
        """Return whether the newest token completes a stop string. The text ends before it.

        Call it after each token. An interrupted call can miss a stop string, so Request calls it on
        a copy.
        """
        num_searched = self.num_searched
        self.push_new(token_ids)
        text = self.text
        _, _, pending = self.window
        if pending:
            # A token can end a stop string and begin a character that is incomplete.
            text += self._find_new_text(*self.window).rstrip("\ufffd")
        self.num_searched = len(text)
        if may_stop and self.end is None:
            text_start = len(text) - len(self._without_tail(text))
            starts: list[int] = []
            for stop in self.stop_strings:
                first = max(text_start, num_searched - len(stop) + 1)
                starts.append(text.find(stop, first))
            self.end = min((start for start in starts if start >= 0), default=None)
        return self.end is not None

    def push_new(self, token_ids: list[int]) -> None:
        """Decode the tokens that are new."""
        for token_id in token_ids[self.num_decoded_tokens :]:
            new_text, window = self._extend_window(token_id, *self.window)
            # No call and no loop falls between these stores, so no KeyboardInterrupt does, either.
            self.num_decoded_tokens, self.text, self.window = (
                self.num_decoded_tokens + 1,
                self.text + new_text,
                window,
            )

    def _extend_window(
        self, token_id: int, context: Tokens, context_text: str, pending: Tokens
    ) -> tuple[str, Window]:
        """Return the text that one more token releases, and the window after it."""
        text = self._decode((*context, *pending, token_id))
        if text is None:
            # The token becomes U+FFFD, and its neighbors are decoded as if it did not exist.
            new_text = self._find_new_text(context, context_text, pending)
            still_pending = () if new_text else pending
            return new_text + "\ufffd", (context, context_text, still_pending)
        pending = (*pending, token_id)
        if not text.startswith(context_text):
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
        if not pending:
            return ""
        text = self._decode(context + pending) or ""
        if text.startswith(context_text):
            return text[len(context_text) :]
        return self._decode(pending) or ""

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
            return str(decode())
        except Exception as error:  # its type depends on the tokenizer
            try:
                decode()
            except type(error):
                return None
            raise  # an exception of a signal handler, which does not come again
