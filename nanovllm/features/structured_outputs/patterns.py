r"""Converts patterns of ECMAScript, which JSON Schema uses, into the syntax of Rust's regexes.

The two differ in what \d, \w, \s and . match, in escapes, and within classes: Rust reads &&, --,
~~ and [ there as operators. A character is a code point, as with ECMAScript's flag u. What
ECMAScript reads only without this flag is accepted, too, and so are Python's named groups, and (?i)
and (?s) at the start.
"""

import re
from collections.abc import Iterator

from nanovllm.utils.checks import naming, show

ANYTHING = r"[\x{0}-\x{10FFFF}]"
NOTHING = r"[^\x{0}-\x{10FFFF}]"
DOT = r"[^\x{A}\x{D}\x{2028}\x{2029}]"
# What an escape matches: the class of a set, or a character.
ESCAPES = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
    r"\s": r"[[\s\x{FEFF}]--\x{85}]",
    r"\S": r"[\S\x{85}--\x{FEFF}]",
    r"\0": "\0",
    r"\b": "\b",
    r"\f": "\f",
    r"\n": "\n",
    r"\r": "\r",
    r"\t": "\t",
    r"\v": "\v",
}
SET = r"\\(?:[dswDSW]|[pP]\{[\w=]+\})"
SURROGATES = r"u[dD][89abAB]HH\\u[dD][c-fC-F]HH"
ESCAPE = (
    rf"\\(?:xHH|{SURROGATES}|uHHHH|u\{{H+\}}|UHHHHHHHH|[bfnrtv]|0(?![0-9])|[^0-9a-zA-Z])"
).replace("H", "[0-9a-fA-F]")
ATOM = rf"(?:{SET}|{ESCAPE}|[^\\])"
RANGE = re.compile(f"(?s)({ATOM})(?:(-)({ATOM}))?")
TOKEN = re.compile(
    rf"""(?xs)
    (?P<flags> \A\(\?[is]+\) )
    | (?P<open> \( (?: \?: | \?P?<\w+> | (?!\?) ) )
    | (?P<close> \) )
    | (?P<sign> [\^$|] )
    | (?P<repeat> (?: [*+?] | \{{[0-9]+(?:,[0-9]*)?\}} ) \?? )
    | (?P<dot> \. )
    | \[ (?P<negation> \^? ) (?P<members> (?: {SET} | {ESCAPE} | [^\]\\] )* ) \]
    | (?P<atom> (?! \\b | [(\[] | \{{, ) {ATOM} )  # in Python, {{,3}} repeats
    | (?P<other> .{{1,9}} )
    """
)
# What a group consists of, and what may come after each: "|" (also the start), the anchors, "a" for
# what can be repeated, "*" for its repetition. A grammar holds no "^" after text, and nothing after
# "$".
MAY_FOLLOW = {"|": "|^$a", "^": "|^$a", "$": "|$", "a": "|$a*", "*": "|$a"}


def convert_pattern(pattern: str) -> str:
    """Return a regex for Rust that matches the same strings. It can stand between slashes, too.

    Raises ValueError for a pattern that no grammar holds, and for most that are invalid. llguidance
    finds the others.
    """
    with naming(f"pattern {show(pattern)}", ValueError):
        return "".join(_convert(pattern))


def _convert(pattern: str) -> Iterator[str]:
    dot = DOT
    groups = [["|"]]  # what each open group has had, in the signs of MAY_FOLLOW
    for token in TOKEN.finditer(pattern):
        text = token[0]
        sign = "a"
        match token.lastgroup:
            case "flags":
                dot = "." if "s" in text else DOT
                yield text
                continue
            case "open":
                # Without a name, because llguidance reads a group called "stop" as a lookahead.
                yield "(?:"
                groups.append(["|"])
                continue
            case "close" if len(groups) > 1:
                inner = groups.pop()
                # A group with anchors stands where these may stand.
                sign = "".join([anchor for anchor in "^$" if anchor in inner]) or "a"
            case "sign":
                sign = text
            case "repeat":
                sign = "*"
            case "dot":
                text = dot
            case "members":
                text = _convert_class(token["members"], token["negation"])
            case "atom":
                text = _quote(_decode(text))
            case _:
                sign = "!"  # follows nothing
        for each in sign:
            if each not in MAY_FOLLOW[groups[-1][-1]]:
                problem = "is invalid there, or no grammar holds it"
                raise ValueError(f"{show(text)} at position {token.start()} {problem}")
            groups[-1].append(each)
        yield text
    if len(groups) > 1:
        raise ValueError("a group is unclosed")


def _convert_class(members: str, negation: str = "") -> str:
    """Return the class [members] or, with the negation "^", [^members]."""
    if not members:
        return ANYTHING if negation else NOTHING
    # No range or negation includes NUL, because llguidance would allow \" and \\ in a string of
    # JSON for a class that has all control characters.
    texts = [r"^\x{0}" if negation else ""]
    for first, dash, last in RANGE.findall(members):
        low = _decode(first)
        high = _decode(last)
        if len(low) == len(high) == 1:
            if low > high:
                raise ValueError(f"range {first}-{last} is out of order")
            low = max(low, "\x01")
        else:  # beside a set such as \w, the sign is a character
            dash = _quote(dash)
        texts += [_quote(low), dash, _quote(high)]
    return f"[{''.join(texts)}]"


def _decode(atom: str) -> str:
    """Return the character that an atom stands for, or the class of a set."""
    if atom in ESCAPES:
        return ESCAPES[atom]
    if len(atom) < 3:
        return atom[-1:]
    if atom[1] in "pP":
        return atom
    point, *low = [int(digits, 16) for digits in re.findall("[0-9a-fA-F]+", atom)]
    if low:  # a surrogate pair
        point = 0x10000 + (point - 0xD800) * 0x400 + low[0] - 0xDC00
    if 0xD800 <= point < 0xE000 or point > 0x10FFFF:
        raise ValueError(f"{atom} is not a character")
    return chr(point)


def _quote(atom: str) -> str:
    """Return a character so that it has no other meaning, and a set as it is."""
    if len(atom) != 1 or atom.isalnum():
        return atom
    return rf"\x{{{ord(atom):X}}}"
