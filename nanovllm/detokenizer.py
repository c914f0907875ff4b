"""The text of a growing list of tokens, and where a stop string ends it.

A token's text can depend on the tokens before it (leading spaces) and on those after it (bytes of one character), in ways
that only the tokenizer knows. So tokens are decoded together with a few that come before them, and what that adds is
text as soon as it is complete. Every token is decoded a bounded number of times, however long the text is.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

Window = tuple[tuple[int, ...], str, tuple[int, ...], int]


class Detokenizer:
    """The text of one sequence's generated tokens, read as often as the caller likes.

    While tokens come, the text only grows, by complete characters, each shown with the token that completes it, or later where
    a stop string could still take it back. In the end it is `tokenizer.decode(generated token ids)`, unless that contradicts
    what was shown. It can where bytes are not UTF-8: in a tokenizer that falls back to bytes, one wrong byte turns every
    character of its run of byte tokens to U+FFFD. Then what was shown stays, and the tokens after it are decoded on their own.
    A token that the tokenizer cannot decode is U+FFFD, too.

    token_ids | prompt | ........... | context ...... | pending ............. |
    text      |        | ............................ | num_told .... | held: not in it
    """

    MAX_CONTEXT = 8  # tokens; then only those that brought the newest text are kept
    MAX_PENDING = 32  # tokens, far more than a character has; then the first and the last ones stand for all

    def __init__(self, tokenizer: PreTrainedTokenizerBase, num_prompt_tokens: int, stop_strings: tuple[str, ...] = ()) -> None:
        self.tokenizer, self.stop_strings = tokenizer, stop_strings
        self.num_prompt_tokens = self.num_tokens = num_prompt_tokens  # the second: tokens taken so far
        self.num_unsafe = max(map(len, stop_strings), default=1) - 1  # last characters that may begin a stop string
        self.text = ""  # complete characters
        self.held = ""  # U+FFFD for each byte of the pending tokens that may still become part of a character
        # Context: tokens whose text is complete, enough to decode what follows as in its place; and what they are decoded alone.
        # Pending: tokens that end within a character or have no text; and how many of their characters are in `text`.
        self.window: Window = ((), "", (), 0)
        self.end: int | None = None  # where in `text` a stop string starts that ended it

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
            return (self.text + self.held)[: self.end]
        return self.text[: max(0, len(self.text) - self.num_unsafe)]

    def meets_stop_string(self, token_ids: list[int], may_stop: bool) -> bool:
        """Whether a token since the last call completes a stop string; the text then ends before it, and stays so.

        If Ctrl-C comes within, what it would have found is lost: ask a copy, as Request does.
        """
        num_known = len(self.text)
        self._advance(token_ids)
        if may_stop and self.end is None:
            starts = [self.text.find(stop, max(0, num_known - len(stop) + 1)) for stop in self.stop_strings]
            self.end = min((start for start in starts if start >= 0), default=None)
        return self.end is not None

    def _advance(self, token_ids: list[int]) -> None:
        """Take the tokens that are new, one by one, each as a whole, wherever Ctrl-C comes."""
        for token_id in token_ids[self.num_tokens :]:
            fresh, held, window = self._take(token_id)
            self.num_tokens, self.text, self.held, self.window = self.num_tokens + 1, self.text + fresh, held, window

    def _take(self, token_id: int) -> tuple[str, str, Window]:
        """The characters that one more token completes, what is then held, and the window."""
        context, context_text, pending, num_told = self.window
        window_text = self._decode((*context, *pending, token_id))
        if window_text is None:  # what follows is decoded as if this token were not there; a character ends with it
            return self.held + "\ufffd", "", (context, context_text, (), 0) if self.held else self.window
        pending = (*pending, token_id)
        new = window_text[len(context_text) :]
        # The first bytes of a character turn the whole run of bytes that they continue to one U+FFFD for each.
        if not window_text.startswith(context_text) or context_text[-1:] == new[-1:] == "\ufffd":
            context, context_text = (), ""
            new = window_text = self._decode(pending) or ""
        end = max(len(new.rstrip("\ufffd")), len(new) - 3)  # more than three are not all the beginning of one character
        if len(new) < num_told + len(self.held):  # three became one: the character U+FFFD itself
            end = len(new)
        fresh, held = new[num_told:end], new[end:]
        if held or not new:
            if len(pending) > self.MAX_PENDING:  # the first keep a run of bytes from being UTF-8, the last may begin a character
                pending = tuple(each for each in pending if self._decode((each, each)))  # special tokens have no text, even twice
                pending = pending[:4] + pending[4:][-12:]
                end = len(self._decode(context + pending) or "") - len(context_text) - len(held)
            return fresh, held, (context, context_text, pending, end)
        if len(context + pending) > self.MAX_CONTEXT:
            return fresh, "", (pending, self._decode(pending) or "", (), 0)
        return fresh, "", (context + pending, window_text, (), 0)

    def _decode(self, token_ids: Sequence[int]) -> str | None:
        """None if the tokenizer cannot."""
        try:
            return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))
        except Exception:  # whatever somebody's tokenizer raises
            return None
