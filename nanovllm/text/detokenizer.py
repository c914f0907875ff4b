"""Incremental detokenization.

The text of a token can depend on the tokens before it (leading spaces) and after it (the bytes of
one character). Only the tokenizer knows how. New tokens are therefore decoded together with a few
tokens before them, and their text is complete when its last character is. Every token is decoded a
bounded number of times, whatever the length of the text.

tokenizers.decoders.DecodeStream is similar, for tokenizers in Rust, but is not used. While bytes
are not valid UTF-8, it releases nothing and decodes all of them again for each token. It raises for
tokens that cannot be decoded.
"""

from functools import partial
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from nanovllm.text.foreign_code import ForeignError, call_foreign

Tokens = tuple[int, ...]


class State(NamedTuple):
    """What is decoded so far of the tokens after a prompt."""

    num_tokens: int = 0
    text: str = ""  # up to the last complete character
    context: Tokens = ()  # the newest tokens of the text, decoded together with those after it
    context_text: str = ""  # their text when they are decoded alone
    pending: Tokens = ()  # tokens that end within a character (with U+FFFD), or have no text
    pending_text: str = ""  # their text after the context, without `prompt_text`
    prompt_text: str = ""  # what the pending tokens had as text before the first new token

    @property
    def complete_text(self) -> str:
        """All complete characters. A token can have some, and begin one that is incomplete."""
        return self.text + self.pending_text.rstrip("\ufffd")


class Detokenizer:
    """Decodes the tokens after one prompt. It does not change, so samples share it.

    The text continues the prompt. The last tokens of the prompt are therefore decoded, too, and
    their text is left out. A character that the prompt begins and a new token completes belongs to
    the text. A token that the tokenizer cannot decode becomes U+FFFD.

    prompt ............. | new tokens ................ |
       | context | pending |                               the state `first`
                           | text ................. |
                                     | context | pending | the newest state
    """

    MAX_CONTEXT = 8  # tokens; a longer context is reduced to the tokens of the newest text
    MAX_PENDING = 32  # tokens, far more than a character has; then their text is taken as it is

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        prompt_token_ids: list[int],
        hidden_ids: frozenset[int] | None = None,
    ) -> None:
        """Without a tokenizer, all text is empty.

        `hidden_ids` are the special tokens without text, by default all of them.
        """
        self.tokenizer = tokenizer
        self.hidden_ids = hidden_ids
        self.first = State()
        if tokenizer is not None:
            self.first = self._read_prompt(prompt_token_ids)

    def _read_prompt(self, token_ids: list[int]) -> State:
        """Return the state at the end of a prompt.

        The context has text if the end of the prompt has any, because some tokenizers strip the
        first space of what they decode. It does not begin within a character. The end is bounded,
        because each token is decoded alone.
        """
        for size in (self.MAX_CONTEXT, 64, 512):
            state = State()
            for token_id in token_ids[-size:]:
                state = self.extend(state, token_id)
            has_start = state.text[:1] not in ("", "\ufffd")
            if has_start or size >= len(token_ids):
                break
        if not state.pending_text:  # no character is incomplete
            state = state._replace(context=state.context + state.pending, pending=())
        # Its text is left out.
        return state._replace(
            num_tokens=0, text="", pending_text="", prompt_text=state.pending_text
        )

    def extend(self, state: State, token_id: int) -> State:
        """Return the state after one more token."""
        num_tokens, text, context, context_text, pending, pending_text, prompt_text = state
        num_tokens += 1
        recent_text = self._decode((*context, *pending, token_id))
        if recent_text is None:
            # The token becomes U+FFFD, and its neighbors are decoded as if it did not exist.
            text += pending_text + "\ufffd"
            if pending_text:
                return State(num_tokens, text, context, context_text)
            return state._replace(num_tokens=num_tokens, text=text)
        pending = (*pending, token_id)
        if not recent_text.startswith(context_text):
            # The first bytes of a character can turn those of the context to U+FFFD as well.
            context = ()
            context_text = ""
            recent_text = self._decode(pending) or ""
        new_text = recent_text[len(context_text) :]
        is_incomplete = not new_text or new_text.endswith("\ufffd")
        new_text = _remove_start(new_text, prompt_text)
        if is_incomplete and len(pending) <= self.MAX_PENDING:
            return State(num_tokens, text, context, context_text, pending, new_text, prompt_text)
        if len(context + pending) > self.MAX_CONTEXT:
            context = ()
            recent_text = self._decode(pending) or ""
        return State(num_tokens, text + new_text, context + pending, recent_text)

    def decode_all(self, token_ids: list[int]) -> str | None:
        """Return the text of all new tokens, decoded at once, or None if that is impossible."""
        first = self.first
        text = self._decode([*first.context, *first.pending, *token_ids])
        if text is None or not text.startswith(first.context_text):
            return None
        return _remove_start(text[len(first.context_text) :], first.prompt_text)

    def _decode(self, token_ids: list[int] | Tokens) -> str | None:
        """Return the text of `token_ids`, or None if the tokenizer cannot decode them."""
        if self.tokenizer is None:
            return ""
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


def _remove_start(text: str, start: str) -> str:
    """Remove the longest common prefix of `text` and `start`.

    It is all of `start`, unless new tokens complete the last character of the prompt.
    """
    while not text.startswith(start):
        start = start[:-1]
    return text[len(start) :]
