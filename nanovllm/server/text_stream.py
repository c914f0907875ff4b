"""Text that arrives in parts, for a parser that reads it as if it were there already.

A parser is a generator. It yields where it needs more text, and is resumed when more has arrived.
What it finds therefore does not depend on the parts.
"""

import re
from collections.abc import Generator
from functools import cache
from typing import TypeVar

T = TypeVar("T")
# Yields for more text, and then returns a T.
Waiting = Generator[None, None, T]

SPACES = re.compile(r"\s*")
MAX_TAG = 20  # characters, more than a tag has


class TextStream:
    """The text that a parser has not taken yet. Positions are those in this text."""

    def __init__(self) -> None:
        self.text = ""
        self.is_last = False  # whether no more text follows
        self.num_taken = 0  # characters

    def take(self, num_chars: int) -> str:
        """Remove and return the first characters."""
        taken = self.text[:num_chars]
        self.text = self.text[num_chars:]
        self.num_taken += num_chars
        return taken

    def search(self, tags: tuple[str, ...], start: int) -> tuple[int, str]:
        """Return the position of the first of `tags`, and the tag.

        Without one, the tag is "", and the position is the end of the text that cannot be part of a
        tag.
        """
        match = _compile(tags).search(self.text, start)
        if match is not None:
            return match.start(), match[0]
        tail = self.text.rfind("<", start)  # only the first character of a tag is one
        if tail >= 0 and self.may_begin(tags, tail):
            return tail, ""
        return len(self.text), ""

    def find(self, tags: tuple[str, ...], start: int) -> Waiting[tuple[int, str]]:
        """Wait for one of `tags`, and return its position and the tag.

        At the end of the text, the tag is "".
        """
        while True:
            start, tag = self.search(tags, start)
            if tag or self.is_last:
                return start, tag
            yield

    def skip(
        self, start: int, tags: tuple[str, ...], spaces: re.Pattern[str] = SPACES
    ) -> Waiting[tuple[int, str | None]]:
        """Skip spaces. Return the position after them, and which of `tags` comes there.

        The tag is "" at the end of the text, and None if something else comes.
        """
        while True:
            match = spaces.match(self.text, start)
            assert match is not None  # no spaces are spaces
            start = match.end()
            for tag in tags:
                if self.text.startswith(tag, start):
                    return start, tag
            if not self.may_begin(tags, start):
                return start, None if start < len(self.text) else ""
            yield

    def may_begin(self, tags: tuple[str, ...], start: int) -> bool:
        """Whether more text can turn the text from `start` into one of `tags`."""
        rest = self.text[start : start + MAX_TAG]
        return not self.is_last and any(tag.startswith(rest) for tag in tags)


@cache
def _compile(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Compile a pattern of any of `tags`. Without tags, it never matches."""
    return re.compile("|".join(map(re.escape, tags)) or "(?!)")
