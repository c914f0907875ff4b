r"""Converts grammars in the EBNF of llama.cpp and vLLM (GBNF) into llguidance's variant of Lark.

    root ::= "[" item ("," item)* "]"
    item ::= [a-z]+ | root

EBNF describes characters, while llguidance divides a text into lexemes, each as long as possible.
This matches the same texts if no lexeme begins another one. A grammar without recursion therefore
becomes one lexeme. In others, a lexeme is a character. Many lexemes take time, so a sequence whose
texts show where they end, such as "\"" [^"]* "\"", is a lexeme as well.

See https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md.
"""

import operator
import re
from functools import reduce
from typing import NamedTuple

from nanovllm.features.structured_outputs.patterns import ESCAPE, RANGE, convert_class, decode
from nanovllm.utils.checks import invalid, show

TOKEN = re.compile(
    rf"""(?xs)
    (?P<space> \s+ | \#[^\r\n]* )
    | (?P<head> [\w-]+ ) \s* ::=
    | (?P<name> [\w-]+ )
    | " (?P<literal> (?: {ESCAPE} | [^"\\] )* ) "
    | \[ (?P<negation> \^? ) (?P<members> (?: {ESCAPE} | [^\]\\] )+ ) \]
    | (?P<count> \{{ \s* 0*[1-9][0-9]* \s* \}} )
    | (?P<repeat> [*+?] | \{{ \s* [0-9]+ \s* (?: , \s* [0-9]* \s* )? \}} )
    | (?P<open> \( )
    | (?P<close> \) )
    | (?P<or> \| )
    | (?P<dot> \. )
    | (?P<end> \Z )
    | (?P<character> . )
    """
)
CHAR = re.compile(rf"(?s){ESCAPE}|.")
# Sets of characters are ints with a bit for each character of ASCII, and one for all others.
OTHER = 128
ALL = (2 << OTHER) - 1
MAX_CHARS = 100_000  # of a grammar, for which the conversion takes a second or two


class Part(NamedTuple):
    """A part of a rule, in Lark."""

    lexeme: str  # within a lexeme: the name of another one
    rule: str  # within a rule
    first: int = 0  # what a text begins with, or nothing unless each text shows where it ends
    repeated: int = 0  # the same for what it repeats


EMPTY = Part('""', '""')
OPEN = Part('""', "")  # a rule that is being read. No lexeme of a recursive rule is used


def convert_ebnf(grammar: str) -> str:
    """Return a grammar in Lark. Raises ValueError that names the line at fault."""
    if len(grammar) > MAX_CHARS:
        problem = f"must have at most {MAX_CHARS} characters, not {len(grammar)}: use Lark"
        raise invalid("EBNF", problem)
    converter = Converter(grammar)
    try:
        return converter.convert()
    except (ValueError, RecursionError) as error:
        line = grammar.count("\n", 0, converter.token.start()) + 1
        raise invalid("EBNF", f"line {line}: {error}", separator=", ") from error


class Converter:
    """Reads rules and writes them, as often as it takes to find which sequences can be lexemes."""

    def __init__(self, grammar: str) -> None:
        tokens = TOKEN.finditer(grammar)
        self.tokens = [token for token in tokens if token.lastgroup != "space"]
        self.index = 0
        self.heads: dict[str, int] = {}  # the index of each rule
        self.rules: dict[int, Part] = {}  # what they become
        self.is_recursive = False
        self.lexemes: dict[str, tuple[str, int]] = {}  # the name and `first` of each one
        self.shared = 0  # characters that several lexemes begin with

    @property
    def token(self) -> re.Match[str]:
        """The token that is being read."""
        return self.tokens[self.index]

    def convert(self) -> str:
        """Write the grammar."""
        self._find_rules()
        for added in (0, 0, 0, ALL):  # in the end, all lexemes are characters
            self.shared |= added
            before = self.shared
            self.rules.clear()
            root, *_ = [self._read_rule(name) for name in ["root", *self.heads]]
            rules = [f"r{index}: {part.rule}" for index, part in self.rules.items()]
            # The others are parts of these, or no longer needed.
            used = set(re.findall("L[0-9]+", "\n".join(rules)))
            seen = 0
            for name, first in self.lexemes.values():
                if name in used:
                    self.shared |= seen & first
                    seen |= first
            if self.shared == before:
                break
        lexemes = [f"{name}: {text}" for text, (name, _) in self.lexemes.items()]
        if not self.is_recursive:
            return "\n".join([f"start: {root.lexeme}", *lexemes])
        return "\n".join([f"start: {root.rule}", *lexemes, *rules])

    def _find_rules(self) -> None:
        if self.token.lastgroup != "head":
            raise self._unexpected()
        for index, token in enumerate(self.tokens):
            if name := token["head"]:
                self.index = index
                if name in self.heads:
                    raise ValueError(f"rule {name!r} comes a second time")
                self.heads[name] = index

    def _read_rule(self, name: str) -> Part:
        """Return what stands for a rule in other ones. Reads it the first time."""
        if name not in self.heads:
            raise ValueError(f"rule {name!r} is missing")
        index = self.heads[name]
        if index not in self.rules:
            position = self.index
            self.index = index
            self.rules[index] = OPEN
            self.rules[index] = self._read_choice("head", "end")
            self.index = position
        part = self.rules[index]
        self.is_recursive |= part is OPEN
        return Part(part.lexeme, f"r{index}", part.first)

    def _read_choice(self, *ends: str) -> Part:
        """Read alternatives, up to a token of one of the kinds `ends`."""
        choice: list[list[Part]] = [[]]
        while True:
            self.index += 1
            kind = str(self.token.lastgroup)
            text = self.token[kind]
            parts = choice[-1]
            if kind in ends:
                return self._choose([self._join(parts) for parts in choice])
            match kind:
                case "or":
                    choice.append([])
                    continue
                case "literal":
                    part = self._join([self._make_class(char) for char in CHAR.findall(text)])
                case "members":
                    part = self._make_class(text, self.token["negation"])
                case "dot":
                    part = self._make_class("", "^")
                case "name":
                    part = self._read_rule(text)
                case "open":
                    part = self._read_choice("close")
                case "count" | "repeat" if parts:
                    lexeme, rule, first, _ = parts.pop()
                    lexeme = self._name(lexeme + text, first)
                    part = Part(lexeme, f"({rule}){text}", first if kind == "count" else 0, first)
                case _:
                    raise self._unexpected()
            parts.append(part)

    def _choose(self, parts: list[Part]) -> Part:
        lexemes, rules, firsts, _ = zip(*parts)
        union = reduce(operator.or_, firsts)
        is_clear = all(firsts) and union == sum(firsts)  # they have nothing in common
        first = union if is_clear else 0
        return Part(self._name(" | ".join(lexemes), first), f"({' | '.join(rules)})", first)

    def _join(self, parts: list[Part]) -> Part:
        """Make a sequence with as few lexemes as possible."""
        if not parts:
            return EMPTY
        lexemes, rules, *_ = zip(*parts)
        firsts = [0]
        for part in reversed(parts):
            follow = firsts[-1]
            # What follows a repetition can show where it ends.
            is_clear = part.repeated and follow and not part.repeated & follow
            firsts.append(part.repeated | follow if is_clear else part.first)
        firsts.reverse()
        items: list[str] = []
        start = 0
        while start < len(parts):
            end = start + 1
            item = rules[start]
            if firsts[start] and not firsts[start] & self.shared:
                end = firsts.index(0, start)
                item = self._name(" ".join(lexemes[start:end]), firsts[start])
            items.append(item)
            start = end
        first = firsts[0] if all(firsts[:-1]) else 0
        return Part(self._name(" ".join(lexemes), first), " ".join(items), first)

    def _make_class(self, members: str, negation: str = "") -> Part:
        chars = 0
        for first, _, last in RANGE.findall(members):
            low, high = (min(ord(decode(char)), OTHER) for char in (first, last or first))
            chars |= (2 << high) - (1 << low)
        if negation:
            chars = ALL & ~chars | 1 << OTHER
        lexeme = self._name(f"/{convert_class(members, negation)}/", chars)
        return Part(lexeme, lexeme, chars)

    def _name(self, lexeme: str, first: int) -> str:
        name, _ = self.lexemes.setdefault(lexeme, (f"L{len(self.lexemes)}", first))
        return name

    def _unexpected(self) -> Exception:
        return ValueError(f"unexpected {self.token.lastgroup} {show(self.token[0])}")
