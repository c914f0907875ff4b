"""The text of a growing list of tokens, and where a stop string ends it.

A token's text can depend on the tokens before it (leading spaces) and on those after it (bytes of one character), in ways
that only the tokenizer knows. So tokens are decoded together with a few that come before them, and what that adds is
text as soon as its last character is complete. Every token is decoded a bounded number of times, however long the text is.
"""

from transformers import PreTrainedTokenizerBase

Window = tuple[tuple[int, ...], str, tuple[int, ...]]


class Detokenizer:
    """The text of one sequence's generated tokens, read as often as the caller likes.

    While tokens come, the text only grows: with the token that completes a character, or later where a stop string could still
    take it back. In the end it is `tokenizer.decode(generated token ids)`, unless that contradicts what was shown. It can where
    bytes are not UTF-8: in a tokenizer that falls back to bytes, one wrong byte turns every character of its run of byte tokens
    to U+FFFD. Then what was shown stays. A token that the tokenizer cannot decode is U+FFFD, too.

    token_ids | prompt | ............ | context | pending |     `text` ends with the context's
    """

    MAX_CONTEXT = 8  # tokens; then only those that brought the newest text are kept
    MAX_PENDING = 32  # tokens, far more than a character has; then they are text as they are

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_prompt_tokens: int,
        stop_strings: tuple[str, ...] = (),
    ) -> None:
        self.tokenizer, self.stop_strings = tokenizer, stop_strings
        self.num_prompt_tokens = self.num_tokens = (
            num_prompt_tokens  # the second: tokens taken so far
        )
        self.num_unsafe = (
            max(map(len, stop_strings), default=1) - 1
        )  # last characters that may begin a stop string
        self.text = ""
        # Context: the last tokens in `text`, enough to decode what follows as in its place; and what they are decoded alone.
        # Pending: tokens that end within a character (with U+FFFD) or have no text.
        self.window: Window = ((), "", ())
        self.num_searched = 0  # characters in which stop strings were looked for
        self.end: int | None = None  # where in the text a stop string starts that ended it

    def read(self, token_ids: list[int], is_last: bool) -> str:
        """What a caller may see: unless `token_ids` are the last ones, without what could still become something else.

        With stop strings, these are only looked for in `meets_stop_string`; until then new tokens are not shown.
        """
        if is_last and self.end is None:
            whole = self._decode(token_ids[self.num_prompt_tokens :])
            if whole is not None and whole.startswith(self.text):
                return whole
        if not self.stop_strings:
            self._advance(token_ids)
        if is_last or self.end is not None:
            return (self.text + self._find_new(*self.window))[: self.end]
        return self.text[: max(0, len(self.text) - self.num_unsafe)]

    def meets_stop_string(self, token_ids: list[int], may_stop: bool) -> bool:
        """Whether the newest token completes a stop string; the text then ends before it, and stays so.

        Ask after each token. If Ctrl-C comes within, what it would have found is lost: ask a copy, as Request does.
        """
        num_searched = self.num_searched
        self._advance(token_ids)
        text = self.text
        if self.window[
            2
        ]:  # a token can end a stop string and begin a character that is not complete
            text += self._find_new(*self.window).rstrip("\ufffd")
        self.num_searched = len(text)
        if may_stop and self.end is None:
            starts = [
                text.find(stop, max(0, num_searched - len(stop) + 1)) for stop in self.stop_strings
            ]
            self.end = min((start for start in starts if start >= 0), default=None)
        return self.end is not None

    def _advance(self, token_ids: list[int]) -> None:
        """Take the tokens that are new, one by one, each as a whole, wherever Ctrl-C comes."""
        for token_id in token_ids[self.num_tokens :]:
            new, window = self._take(token_id, *self.window)
            self.num_tokens, self.text, self.window = self.num_tokens + 1, self.text + new, window

    def _take(
        self, token_id: int, context: tuple[int, ...], context_text: str, pending: tuple[int, ...]
    ) -> tuple[str, Window]:
        """The text that one more token completes, and the window behind it."""
        text = self._decode((*context, *pending, token_id))
        if (
            text is None
        ):  # what follows is decoded as if this token were not there; a character ends with it
            new = self._find_new(context, context_text, pending)
            return new + "\ufffd", (context, context_text, () if new else pending)
        pending = (*pending, token_id)
        if context and text.endswith(
            "\ufffd"
        ):  # a character's first bytes may turn those of the context to U+FFFD as well
            context, context_text, text = (), "", self._decode(pending) or ""
        new = text[len(context_text) :]
        if len(pending) <= self.MAX_PENDING and (not new or new.endswith("\ufffd")):
            return "", (context, context_text, pending)
        if len(context + pending) > self.MAX_CONTEXT:
            context, text = (), self._decode(pending) or ""
        return new, (context + pending, text, ())

    def _find_new(
        self, context: tuple[int, ...], context_text: str, pending: tuple[int, ...]
    ) -> str:
        """What `pending` adds."""
        return (self._decode(context + pending) or "")[len(context_text) :]

    def _decode(self, token_ids: list[int] | tuple[int, ...]) -> str | None:
        """None if the tokenizer cannot."""
        try:
            return str(
                self.tokenizer.decode(
                    list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
                )
            )
        except Exception:  # whatever somebody's tokenizer raises
            return None
