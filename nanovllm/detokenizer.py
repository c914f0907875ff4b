"""The text of a growing list of tokens, and where a stop string ends it.

A token's text can depend on the tokens before it (leading spaces) and on those after it (bytes of one character), in ways
that only the tokenizer knows. So tokens are decoded together with a few that come before them, and what that adds is
text as soon as it is complete. Every token is decoded a bounded number of times, every character is compared once.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase


class StopStrings:
    """Finds any of several strings in a text that comes piece by piece: the automaton of Aho and Corasick (1975).

    A node is a beginning of a stop string, node 0 the empty one. After each character the current node is the longest
    beginning that the text ends with; where the text does not go on like it, its `fallback` is the next longest.
    """

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.fallback = [0]
        self.match_length = [0]  # of the longest stop string that the node ends with
        self.begun_length = [0]  # of the longest beginning that the node ends with and that is no whole stop string
        for stop in stop_strings:
            node = 0
            for length, character in enumerate(stop, 1):
                if character not in self.children[node]:
                    self.children[node][character] = len(self.children)
                    self.children.append({})
                    self.fallback.append(0)
                    self.match_length.append(0)
                    self.begun_length.append(length)
                node = self.children[node][character]
            self.match_length[node] = len(stop)
        queue = list(self.children[0].values())
        for node in queue:  # shorter ones first: a fallback is shorter than its node
            fallback = self.fallback[node]
            self.match_length[node] = self.match_length[node] or self.match_length[fallback]
            if not self.children[node]:
                self.begun_length[node] = self.begun_length[fallback]
            for character, child in self.children[node].items():
                self.fallback[child] = self.follow(fallback, character)
                queue.append(child)

    def follow(self, node: int, character: str) -> int:
        while node and character not in self.children[node]:
            node = self.fallback[node]
        return self.children[node].get(character, 0)


_make_stop_strings = lru_cache(maxsize=8)(StopStrings)  # samples of one request, requests of one kind share theirs


class _State(NamedTuple):
    """What is known after `num_tokens` tokens. Replaced as a whole, so that an error or Ctrl-C leaves no token half taken.

    token_ids | prompt | ........... | context ...... | pending ............. |
    text      |        | ............................ | num_told .... | held: not in it
    """

    num_tokens: int
    context: tuple[int, ...] = ()  # tokens whose text is complete, enough of them to decode what follows as in its place
    context_text: str = ""  # the context, decoded on its own
    pending: tuple[int, ...] = ()  # tokens after these, that end within a character or have no text
    num_told: int = 0  # characters of the pending tokens that are in `text`
    held: str = ""  # their last characters, U+FFFD each: bytes that can still become a character
    text: str = ""
    node: int = 0  # of the stop strings' automaton, at the end of `text`
    match_start: int | None = None  # where in `text` a stop string starts that nobody has asked about


class Detokenizer:
    """The text of one sequence's generated tokens, read as often as the caller likes.

    While tokens come, the text only grows, by complete characters, each shown with the token that completes it. In the end
    it is `tokenizer.decode(generated token ids)`, unless that contradicts what was shown. It can where bytes are not UTF-8:
    in a tokenizer that falls back to bytes, one wrong byte turns every character of its run of byte tokens to U+FFFD. Then
    what was shown stays, and the tokens after it are decoded on their own.
    """

    MAX_CONTEXT = 8  # tokens; then only those that brought the newest text are kept
    MAX_PENDING = 32  # tokens, far more than a character has; then a few of them stand for all

    def __init__(self, tokenizer: PreTrainedTokenizerBase, num_prompt_tokens: int, stop_strings: tuple[str, ...] = ()) -> None:
        self.tokenizer = tokenizer
        self.num_prompt_tokens = num_prompt_tokens
        self.stop_strings = _make_stop_strings(stop_strings) if stop_strings else None
        self.shown = ""  # what `read` returned last, while tokens came
        self.stopped_text: str | None = None  # the text before the stop string, once one is met
        self._state = _State(num_prompt_tokens)

    @property
    def state(self) -> tuple[_State, str | None]:
        """What is known of the tokens read so far. Set back to an earlier value, it forgets those after it."""
        return self._state, self.stopped_text

    @state.setter
    def state(self, state: tuple[_State, str | None]) -> None:
        self._state, self.stopped_text = state

    def read(self, token_ids: list[int], is_last: bool) -> str:
        """What a caller may see: unless `token_ids` are the last ones, without what could still become something else."""
        if self.stopped_text is not None:
            return self.stopped_text
        if is_last and self._state.num_tokens == self.num_prompt_tokens:
            return self._decode(token_ids[self.num_prompt_tokens :])
        state = self._advance(token_ids)
        if is_last:
            text = state.text + state.held
            if "\ufffd" in text:  # only then can the whole differ
                whole = self._decode(token_ids[self.num_prompt_tokens :])
                text = whole if whole.startswith(self.shown) else text
            return text
        text = state.text
        if state.match_start is not None:
            text = text[: state.match_start]
        elif state.node:
            text = text[: len(text) - self.stop_strings.begun_length[state.node]]
        self.shown = text
        return text

    def meets_stop_string(self, token_ids: list[int], may_stop: bool) -> bool:
        """Whether a token since the last call completes a stop string; the text then ends before it, and stays so."""
        if self.stop_strings is None or self.stopped_text is not None:
            return self.stopped_text is not None
        state = self._advance(token_ids)
        if state.match_start is None:
            return False
        if may_stop:
            self.stopped_text = state.text[: state.match_start]
        else:
            self._state = state._replace(match_start=None)
        return may_stop

    def _advance(self, token_ids: list[int]) -> _State:
        for index in range(self._state.num_tokens, len(token_ids)):
            self._state = self._take(self._state, token_ids[index])
        return self._state

    def _take(self, state: _State, token_id: int) -> _State:
        """The state after one more token."""
        num_tokens, context, context_text, pending, num_told, held, text, node, match_start = state
        pending = (*pending, token_id)
        window_text = self._decode(context + pending)
        new = window_text[len(context_text) :]
        # The first bytes of a character turn the whole run of bytes that they continue to one U+FFFD for each.
        if not window_text.startswith(context_text) or context_text[-1:] == new[-1:] == "\ufffd":
            context, context_text = (), ""
            new = window_text = self._decode(pending)
        if len(new) < num_told + len(held):  # three became one: the character U+FFFD itself
            end = len(new)
        else:  # more than three are not all the beginning of one character
            end = max(len(new.rstrip("\ufffd")), len(new) - 3)
        fresh, held = new[num_told:end], new[end:]
        if self.stop_strings is not None and fresh:
            node, start = self._search(node, fresh, len(text))
            match_start = start if match_start is None else match_start
        if held or not new:
            num_told = max(num_told, end)
            if len(pending) > self.MAX_PENDING:
                pending = self._shorten(pending)
                num_told = len(self._decode(context + pending)) - len(context_text) - len(held)
        else:
            context, context_text, num_told = context + pending, window_text, 0
            if len(context) > self.MAX_CONTEXT:
                context, context_text = pending, self._decode(pending)
            pending = ()
        return _State(num_tokens + 1, context, context_text, pending, num_told, held, text + fresh, node, match_start)

    def _search(self, node: int, fresh: str, num_searched: int) -> tuple[int, int | None]:
        """Where the automaton stands after `fresh`, and where the first stop string starts of those that end in it."""
        stop_strings, starts = self.stop_strings, []
        for end, character in enumerate(fresh, num_searched + 1):
            node = stop_strings.follow(node, character)
            if length := stop_strings.match_length[node]:
                starts.append(end - length)
        return node, min(starts, default=None)

    def _shorten(self, pending: tuple[int, ...]) -> tuple[int, ...]:
        """Fewer tokens with the same effect on what follows: of those that have any text, the first and the last ones.

        A special token has no text, not even twice; a space has none where a leading one is stripped, but two have. The first
        bytes keep their run from being UTF-8, the last ones may begin a character.
        """
        pending = tuple(token_id for token_id in pending if self._decode((token_id, token_id)))
        return pending if len(pending) <= 16 else pending[:4] + pending[-12:]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
