"""The text of one sample: what can be released of it, its end, and the text of each token."""

from nanovllm.text.detokenizer import Detokenizer


class GeneratedText:
    """The text of generated tokens. Each method takes all of them, and decodes those that are new.

    Released text is append-only. Text is released when its last character is complete. With stop
    strings of up to N characters, the last N - 1 characters are withheld, because they may be the
    start of one. The final text is what `tokenizer.decode` returns for prompt and generated tokens,
    without the prompt's part, unless this contradicts released text. That can happen with invalid
    UTF-8: a tokenizer with byte fallback turns a whole run of byte tokens into U+FFFD if one byte
    is invalid. Released text is then kept.

    An interrupt at any place is harmless. Decoding goes on where it was, and `roll_back` removes
    the traces of tokens that are not committed.
    """

    def __init__(self, detokenizer: Detokenizer, stop_strings: tuple[str, ...] = ()) -> None:
        self.detokenizer = detokenizer
        self.stop_strings = stop_strings
        self.num_withheld = max(map(len, stop_strings), default=1) - 1
        self.state = detokenizer.first
        self.pieces: list[str] = []  # the text that each token completes
        self.stopped: str | None = None  # the text before a stop string that has ended it

    def push(self, token_ids: list[int]) -> None:
        """Decode the tokens that are new."""
        for token_id in token_ids[self.state.num_tokens :]:
            state = self.detokenizer.extend(self.state, token_id)
            # The state comes last. If an interrupt falls before it, the piece is written again.
            self.pieces[self.state.num_tokens :] = [state.text[len(self.state.text) :]]
            self.state = state

    def roll_back(self, num_tokens: int) -> None:
        """Forget all tokens but the first ones, which are decoded again when they are needed."""
        if self.state.num_tokens > num_tokens:
            self.stopped = None
            del self.pieces[num_tokens:]
            self.state = self.detokenizer.first

    def meets_stop_string(self, token_ids: list[int], may_stop: bool) -> bool:
        """Return whether the newest token completes a stop string. The text ends before it.

        Call it after each token. If the text may not stop yet, its new characters count as
        searched.
        """
        self.push(token_ids[:-1])
        num_searched = len(self.state.complete_text)
        self.push(token_ids)
        text = self.state.complete_text
        found = [
            text.find(string, max(0, num_searched - len(string) + 1))
            for string in self.stop_strings
        ]
        starts = [start for start in found if start >= 0]
        if not may_stop or not starts:
            return False
        self.stopped = text[: min(starts)]
        return True

    def read(self, token_ids: list[int], is_last: bool) -> str:
        """Return all text that can be released. `is_last` if no tokens follow.

        At the end, `token_ids` can leave out a stop token, which may have been decoded.
        """
        if self.stopped is not None:
            return self.stopped
        if is_last:
            known = "".join(self.pieces[: len(token_ids)])
            whole = self.detokenizer.decode_all(token_ids)
            if whole is not None and whole.startswith(known):
                return whole
            self.roll_back(len(token_ids))
            return "".join(self.list_pieces(token_ids, is_last))
        self.push(token_ids)
        text = self.state.text
        return text[: max(0, len(text) - self.num_withheld)]

    def list_pieces(self, token_ids: list[int], is_last: bool) -> list[str]:
        """Return the text that each token completes, also that of a stop string or a stop token."""
        self.push(token_ids)
        pieces = self.pieces[: len(token_ids)]
        if is_last and pieces:
            pieces[-1] += self.state.pending_text
        return pieces
