"""Text that arrives in parts, for a parser that reads it as if it were there already.

A parser is a generator. It yields where it needs more text, and is resumed when more has arrived.
What it finds therefore does not depend on the parts.
"""

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
# Yields for more text, and then returns a T.
Waiting = Generator[None, None, T]

SPACES = re.compile(r"\s*")


class TextStream:
    """The text that a parser has not taken yet. Positions are those in this text."""

    def __init__(self) -> None:
        self.text = ""
        self.is_last = False  # whether no more text follows

    def take(self, num_chars: int) -> str:
        """Remove and return the first characters."""
        taken = self.text[:num_chars]
        self.text = self.text[num_chars:]
        return taken

    def search(self, tags: tuple[str, ...], start: int) -> tuple[int, str]:
        """Return the position of the first of `tags`, and the tag.

        Without one, the tag is "", and the position is the end of the text that cannot be part of a
        tag.
        """
        match = re.compile("|".join(tags)).search(self.text, start) if tags else None
        if match is not None:
            return match.start(), match[0]
        tail = self.text.rfind("<", start)  # only the first character of a tag is one
        if tail >= 0 and self._may_begin(tags, tail):
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

    def skip(self, start: int, tags: tuple[str, ...]) -> Waiting[tuple[int, str]]:
        """Skip spaces. Return the position after them, and which of `tags` comes there, or ""."""
        while True:
            match = SPACES.match(self.text, start)
            assert match is not None  # no spaces are spaces
            start = match.end()
            for tag in tags:
                if self.text.startswith(tag, start):
                    return start, tag
            if not self._may_begin(tags, start):
                return start, ""
            yield

    def _may_begin(self, tags: tuple[str, ...], start: int) -> bool:
        """Return whether more text can turn the text from `start` into one of `tags`."""
        longest = max(map(len, tags), default=0)
        rest = self.text[start : start + longest]
        return not self.is_last and any(tag.startswith(rest) for tag in tags)
