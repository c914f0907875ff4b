r"""Converts patterns of ECMAScript, which JSON Schema uses, into the syntax of Rust's regexes.

The two differ in what \d, \w, \s and . match, in escapes, and within classes: Rust reads &&, --,
~~ and [ there as operators. A character is a code point, as with ECMAScript's flag u. What
ECMAScript reads only without this flag is accepted, too, and so are Python's named groups, (?i),
(?s), \A and \Z.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from nanovllm.utils.checks import invalid, show

# What \d, \w and \s match.
SETS = {
    "d": "[0-9]",
    "w": "[0-9A-Za-z_]",
    "s": r"[\x{9}-\x{D}\x{20}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}"
    r"\x{3000}\x{FEFF}]",
}
ANYTHING = r"[\x{0}-\x{10FFFF}]"
NOTHING = r"[^\x{0}-\x{10FFFF}]"
DOT = r"[^\x{A}\x{D}\x{2028}\x{2029}]"
CONTROLS = {"0": "\0", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
ESCAPE = re.compile(
    r"""(?xs) \\ (?:
    u (?P<pair> [dD][89abAB]HH \\u [dD][c-fC-F]HH)
    | (?! u\{?0*[dD][89a-fA-F]HH(?!H))  # half of a pair
      (?: x (?P<byte> HH) | u (?P<unit> HHHH) | u\{ 0* (?P<point> H{1,5} | 10HHHH) \} )
    | c (?P<letter> [a-zA-Z])
    | (?P<control> [bfnrtv] | 0(?![0-9]))
    | (?P<set> [dwsDWS])
    | (?P<property> [pP] \{ [\w=]+ \})
    | (?P<itself> [^0-9a-zA-Z])
    )""".replace("H", "[0-9a-fA-F]")
)
# Groups lose their names, because llguidance reads a group called "stop" as a lookahead.
GROUP = re.compile(r"\((?:\?P?<(?!\d)\w+>|\?(?P<flags>[is]*(?:-[is]+)?)(?P<end>[:)])|(?!\?))")
QUANTIFIER = re.compile(r"(?:[*+?]|\{(?P<low>[0-9]+)(?:,(?P<high>[0-9]*))?\})\??")
UNSUPPORTED = {
    r"\(\?<?[=!]": "a lookaround, which no grammar can hold",
    r"\\[bB]": "a word boundary, which no grammar can hold",
    r"\\(?:[1-9]|k<)|\(\?P=": "a backreference, which no grammar can hold",
    r"\(\?": "a group or flag that is not ECMAScript's",
    r"\{,": "a repetition without its first number: write {0,",
}


@dataclass
class Group:
    """An open group, or the whole pattern."""

    is_first: bool  # nothing comes before it
    is_dot_all: bool  # a dot matches all characters
    has_start: bool = False  # ^
    has_end: bool = False  # $
    # In the current alternative:
    is_empty: bool = True
    is_ended: bool = False


def convert_pattern(pattern: str) -> str:
    """Return a regex for Rust that matches the same strings. It can stand between slashes, too.

    Raises ValueError for a pattern that is invalid or that no grammar can hold.
    """
    return PatternReader(pattern).convert()


class PatternReader:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.position = 0
        self.groups = [Group(is_first=True, is_dot_all=False)]
        self.can_repeat = False  # what has been read last

    def convert(self) -> str:
        """Convert the whole pattern."""
        parts: list[str] = []
        while self.position < len(self.pattern):
            parts.append(self._read_part())
        if len(self.groups) > 1:
            raise self._invalid("an unclosed group")
        return "".join(parts)

    def _read_part(self) -> str:
        group = self.groups[-1]
        could_repeat = self.can_repeat
        self.can_repeat = False
        if match := self._take(QUANTIFIER):
            low, high = match["low"], match["high"]
            if not could_repeat or (high and int(low) > int(high)):
                raise self._invalid(f"{match[0]!r}, which cannot repeat what comes before it")
            return match[0]
        if self._take(r"\|"):
            group.is_empty = True
            group.is_ended = False
            return "|"
        if self._take(r"\)"):
            return self._close_group()
        if self._take(r"\$|\\[Zz]"):
            group.is_ended = group.has_end = True
            return "$"
        if group.is_ended:
            raise self._invalid("'$' before other parts, which no text matches")
        if self._take(r"\^|\\A"):
            if not (group.is_first and group.is_empty):
                raise self._invalid("'^' after other parts, which no text matches")
            group.has_start = True
            return "^"
        if match := self._take(GROUP):
            return self._open_group(match)
        for construct, meaning in UNSUPPORTED.items():
            if match := self._take(construct):
                raise self._invalid(f"{match[0]!r}, {meaning}")
        group.is_empty = False
        self.can_repeat = True
        if self._take(r"\."):
            return ANYTHING if group.is_dot_all else DOT
        if self._take(r"\["):
            return self._read_class()
        return _quote(self._read_atom())

    def _open_group(self, match: re.Match[str]) -> str:
        group = self.groups[-1]
        flags = match["flags"] or ""
        on, _, off = flags.partition("-")
        is_dot_all = "s" in on or (group.is_dot_all and "s" not in off)
        if match["end"] == ")":  # flags for the rest of the group
            group.is_dot_all = is_dot_all
            return match[0]
        self.groups.append(Group(group.is_first and group.is_empty, is_dot_all))
        return f"(?{flags}:"

    def _close_group(self) -> str:
        closed = self.groups.pop()
        if not self.groups:
            raise self._invalid("')' without '('")
        group = self.groups[-1]
        group.is_empty = False
        group.has_start |= closed.has_start
        group.has_end |= closed.has_end
        group.is_ended |= closed.has_end
        self.can_repeat = not (closed.has_start or closed.has_end)
        return ")"

    def _read_class(self) -> str:
        is_negated = self._take(r"\^") is not None
        if self._take(r"\]"):
            return ANYTHING if is_negated else NOTHING
        # No range or negation includes NUL, because llguidance would allow \" and \\ in a string of
        # JSON for a class that has all control characters.
        members = [r"^\x{0}"] if is_negated else []
        while not self._take(r"\]"):
            first = self._read_atom()
            if not self._take(r"-(?!\])"):
                members.append(_quote(first))
                continue
            last = self._read_atom()
            is_range = len(first) == len(last) == 1
            if is_range and first > last:
                raise self._invalid(f"a class whose range {first}-{last} is out of order")
            if is_range:
                first = max(first, "\x01")
            # Beside a set such as \w, the sign is a character.
            members += [_quote(first), "-" if is_range else r"\-", _quote(last)]
        return f"[{''.join(members)}]"

    def _read_atom(self) -> str:
        """Read a character, or an escape that stands for one or for a set."""
        if self.position == len(self.pattern):
            raise self._invalid("an unclosed class")
        char = self.pattern[self.position]
        if char != "\\":
            self.position += 1
            return char
        match = self._take(ESCAPE)
        if match is None:
            raise self._invalid(f"an unknown escape {self.pattern[self.position :][:6]!r}")
        kind = str(match.lastgroup)
        text = match[kind]
        if kind == "set":
            members = SETS[text.lower()]
            return members if text.islower() else f"[^{members}]"
        if kind == "property":
            if not _is_known(match[0]):
                raise self._invalid(f"an unknown property {match[0]!r}")
            return match[0]
        if kind in ("byte", "unit", "point"):
            return chr(int(text, 16))
        if kind == "pair":
            return bytes.fromhex(text.replace(r"\u", "")).decode("utf-16-be")
        if kind == "letter":
            return chr(ord(text) % 32)
        return CONTROLS.get(text, text)

    def _take(self, expected: str | re.Pattern[str]) -> re.Match[str] | None:
        """Read what matches a regular expression, if it comes next."""
        match = re.compile(expected).match(self.pattern, self.position)
        if match is not None:
            self.position = match.end()
        return match

    def _invalid(self, problem: str) -> Exception:
        return invalid(f"pattern {show(self.pattern)}", f"has {problem}")


@lru_cache
def _is_known(text: str) -> bool:
    """Return whether a class such as \\p{Lu} is one of Rust's regexes."""
    from llguidance import LLMatcher

    return not LLMatcher.validate_grammar(f"start: /{text}/")


def _quote(atom: str) -> str:
    """Return a set as it is, and a character so that it has no other meaning."""
    if len(atom) > 1 or atom.isalnum():
        return atom
    return rf"\x{{{ord(atom):X}}}"
