"""The text of a growing list of tokens, and where a stop string ends it.

A token's text can depend on the tokens before it (leading spaces) and on those after it (bytes of one character), in ways
that only the tokenizer knows. So tokens are decoded together with a few that come before them, and what that adds is
text as soon as it is complete. Every token is decoded a bounded number of times, every character is compared once.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase


class StopNode:
    """A beginning of a stop string, a node of the automaton of Aho and Corasick (1975). The root is the empty one.

    The automaton finds any of several strings in a text that comes piece by piece. After each character the current node is
    the longest beginning that the text ends with; where the text does not go on like it, its `fallback` is the next longest.
    """

    def __init__(self, length: int) -> None:
        self.children: dict[str, StopNode] = {}
        self.fallback: StopNode | None = None  # the root has none
        self.match_length = 0  # of the longest stop string that the node ends with
        self.begun_length = length  # of the longest beginning that the node ends with and that is no whole stop string

    def follow(self, character: str) -> "StopNode":
        node = self
        while character not in node.children and node.fallback is not None:
            node = node.fallback
        return node.children.get(character, node)


@lru_cache(maxsize=8)  # samples of one request, requests of one kind share theirs
def make_stop_nodes(stop_strings: tuple[str, ...]) -> StopNode:
    """The root of the automaton of these strings."""
    root = StopNode(0)
    for stop in stop_strings:
        node = root
        for length, character in enumerate(stop, 1):
            node = node.children.setdefault(character, StopNode(length))
        node.match_length = len(stop)
    queue = [root]
    for node in queue:  # shorter ones first: a fallback is shorter than its node
        for character, child in node.children.items():
            child.fallback = fallback = node.fallback.follow(character) if node.fallback else root
            child.match_length = child.match_length or fallback.match_length
            if not child.children:
                child.begun_length = fallback.begun_length
            queue.append(child)
    return root


class State(NamedTuple):
    """What is known after `num_tokens` tokens. Replaced as a whole, so that an error or Ctrl-C leaves no token half taken.

    token_ids | prompt | ........... | context ...... | pending ............. |
    text      |        | ............................ | num_told .... | held: not in it
    """

    num_tokens: int
    node: StopNode  # the longest beginning of a stop string that `text` ends with
    context: tuple[int, ...] = ()  # tokens whose text is complete, enough of them to decode what follows as in its place
    context_text: str = ""  # the context, decoded on its own
    pending: tuple[int, ...] = ()  # tokens after these, that end within a character or have no text
    num_told: int = 0  # characters of the pending tokens that are in `text`
    held: str = ""  # their last characters, U+FFFD each: bytes that can still become a character
    text: str = ""
    match_start: int | None = None  # where in `text` a stop string starts that nobody has asked about, or
    is_stopped: bool = False  # that ended the text


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
        self.stop_strings = stop_strings
        self.shown = ""  # what `read` returned last, while tokens came
        self.state = State(num_prompt_tokens, make_stop_nodes(stop_strings))  # set back, it forgets the tokens after it

    def read(self, token_ids: list[int], is_last: bool) -> str:
        """What a caller may see: unless `token_ids` are the last ones, without what could still become something else."""
        if is_last and self.state.num_tokens == self.num_prompt_tokens:
            return self._decode(token_ids[self.num_prompt_tokens :])
        state = self._advance(token_ids)
        if is_last and not state.is_stopped:
            text = state.text + state.held
            if "\ufffd" in text:  # only then can the whole differ
                whole = self._decode(token_ids[self.num_prompt_tokens :])
                text = whole if whole.startswith(self.shown) else text
            return text
        end = len(state.text) - state.node.begun_length if state.match_start is None else state.match_start
        self.shown = state.text[:end]  # what begins like a stop string waits
        return self.shown

    def meets_stop_string(self, token_ids: list[int], may_stop: bool) -> bool:
        """Whether a token since the last call completes a stop string; the text then ends before it, and stays so."""
        state = self._advance(token_ids)
        if state.match_start is not None and not state.is_stopped:
            self.state = state._replace(is_stopped=True) if may_stop else state._replace(match_start=None)
        return self.state.is_stopped

    def _advance(self, token_ids: list[int]) -> State:
        """Take the tokens that are new, unless a stop string has ended the text."""
        while self.state.num_tokens < len(token_ids) and not self.state.is_stopped:
            self.state = self._take(self.state, token_ids[self.state.num_tokens])
        return self.state

    def _take(self, state: State, token_id: int) -> State:
        """The state after one more token."""
        num_tokens, node, context, context_text, pending, num_told, held, text, match_start, _ = state
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
        if self.stop_strings:
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
        return State(num_tokens + 1, node, context, context_text, pending, num_told, held, text + fresh, match_start)

    def _search(self, node: StopNode, fresh: str, num_searched: int) -> tuple[StopNode, int | None]:
        """Where the automaton stands after `fresh`, and where the first stop string starts of those that end in it."""
        starts: list[int] = []
        for end, character in enumerate(fresh, num_searched + 1):
            node = node.follow(character)
            if node.match_length:
                starts.append(end - node.match_length)
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
