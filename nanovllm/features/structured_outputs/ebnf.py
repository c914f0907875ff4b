r"""Converts grammars in the EBNF of llama.cpp and vLLM (GBNF) into llguidance's variant of Lark.

    root ::= "[" item ("," item)* "]"
    item ::= [a-z]+ | root

EBNF describes characters, while llguidance divides a text into lexemes, each as long as possible.
This matches the same texts if no lexeme begins another one. A grammar without recursion therefore
becomes one lexeme. In others, a lexeme is a character. Many lexemes take time, so a sequence whose
texts show where they end, such as "\"" [^"]* "\"", is a lexeme as well.

See https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md.
"""

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import chain

from nanovllm.utils.checks import invalid, naming, show

ESCAPE = r'\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[nrt"\\\[\]-])'
TOKEN = re.compile(
    rf"""(?xs)
    (?P<space> \s+ | \#[^\r\n]* )
    | (?P<head> [\w-]+ ) \s* ::=
    | (?P<name> [\w-]+ )
    | " (?P<literal> (?: {ESCAPE} | [^"\\] )* ) "
    | \[ (?P<negation> \^? ) (?P<members> (?: {ESCAPE} | [^\]\\] )+ ) \]
    | (?P<repeat> [*+?] | \{{ \s* [0-9]+ \s* (?: , \s* [0-9]* \s* )? \}} )
    | (?P<sign> . )
    | (?P<end> \Z )
    """
)
CHAR = f"(?s:{ESCAPE}|.)"
RANGE = re.compile(f"({CHAR})(?:-({CHAR}))?")
CONTROLS = {r"\n": "\n", r"\r": "\r", r"\t": "\t"}
# What a text can begin with: the characters of ASCII, and one that stands for all others.
Chars = frozenset[int]
OTHER = 128
ALL = Chars(range(OTHER + 1))
NONE = Chars()
EMPTY = '""'
MAX_CHARS = 100_000  # of a grammar, for which the conversion takes a second or two


@dataclass(eq=False)
class Node:
    """A part of a rule."""

    kind: str  # "class", "name", "sequence", "choice" or "repeat"
    text: str = ""  # a class in Lark, the name of a rule, or a repetition such as {1,2}
    parts: list["Node"] = field(default_factory=list)
    chars: Chars = NONE  # of a class
    rules: dict[str, Chars] = field(default_factory=dict)  # of a name: what rules begin with

    @cached_property
    def first(self) -> Chars:
        """What a text begins with. Nothing unless each text shows where it ends.

        It does if each of its characters can belong to only one part.
        """
        if self.kind == "class":
            return self.chars
        if self.kind == "name":
            return self.rules.get(self.text, NONE)
        if self.kind == "repeat":
            is_fixed = re.fullmatch(r"\{0*([1-9]\d*)(,0*\1)?\}", self.text)
            return self.parts[0].first if is_fixed else NONE
        if self.kind == "sequence":
            return self.firsts[0] if all(self.firsts[:-1]) else NONE
        firsts = [part.first for part in self.parts]
        union = NONE.union(*firsts)
        return union if all(firsts) and len(union) == sum(map(len, firsts)) else NONE

    @cached_property
    def firsts(self) -> list[Chars]:
        """The same for each part of a sequence, then nothing.

        What follows a part can show where its repetition ends.
        """
        firsts = [NONE]
        for part in reversed(self.parts):
            first = part.first
            if part.kind == "repeat" and not first:
                repeated = part.parts[0].first
                is_clear = repeated and firsts[-1] and repeated.isdisjoint(firsts[-1])
                first = repeated | firsts[-1] if is_clear else NONE
            firsts.append(first)
        return firsts[::-1]


ANY = Node("class", r"/[\x{0}-\x{10FFFF}]/", chars=ALL)


def convert_ebnf(grammar: str) -> str:
    """Return a grammar in Lark. Raises ValueError that names the line at fault."""
    if len(grammar) > MAX_CHARS:
        raise invalid(
            "EBNF", f"must have at most {MAX_CHARS} characters, not {len(grammar)}: use Lark"
        )
    with naming("EBNF", RecursionError):
        return Writer(Parser(grammar)).write()


class Parser:
    """Reads the rules of a grammar."""

    def __init__(self, grammar: str) -> None:
        tokens = TOKEN.finditer(grammar)
        self.tokens = (token for token in tokens if token.lastgroup != "space")
        self.rules: dict[str, Node] = {}
        self.uses: dict[str, dict[str, re.Match[str]]] = {}  # of rules, in each rule
        self.firsts: dict[str, Chars] = {}  # of rules without recursion
        self.token = next(self.tokens)
        while self.token.lastgroup == "head":
            name = self.token["head"]
            if name in self.rules:
                raise self._invalid(f"rule {name!r} comes a second time")
            self.used = self.uses[name] = dict[str, re.Match[str]]()
            self._advance()
            self.rules[name] = self._read_choice()
        if self.token.lastgroup != "end":
            raise self._invalid(f"unexpected {show(self.token[0])}")
        for used in [{"root": self.token}, *self.uses.values()]:
            for name, self.token in used.items():
                if name not in self.rules:
                    raise self._invalid(f"rule {name!r} is missing")
        sorter = TopologicalSorter(self.uses)
        with suppress(CycleError):
            sorter.prepare()
        while names := sorter.get_ready():  # rules that use only earlier ones
            for name in names:
                self.firsts[name] = self.rules[name].first
            sorter.done(*names)

    def _read_choice(self) -> Node:
        parts = [self._read_sequence()]
        while self.token[0] == "|":
            self._advance()
            parts.append(self._read_sequence())
        return Node("choice", parts=parts)

    def _read_sequence(self) -> Node:
        parts: list[Node] = []
        while True:
            kind = str(self.token.lastgroup)
            text = self.token[kind]
            if kind == "literal":
                chars = [self._make_class(char) for char in re.findall(CHAR, text)]
                parts.append(Node("sequence", parts=chars))
            elif kind == "members":
                parts.append(self._make_class(text, self.token["negation"]))
            elif kind == "name":
                parts.append(Node("name", text, rules=self.firsts))
                self.used.setdefault(text, self.token)
            elif kind == "repeat" and parts:
                parts[-1] = Node("repeat", "".join(text.split()), [parts[-1]])
            elif text == ".":
                parts.append(ANY)
            elif text == "(":
                self._advance()
                parts.append(self._read_choice())
                if self.token[0] != ")":
                    raise self._invalid("expected ')'")
            else:
                return Node("sequence", parts=parts)
            self._advance()

    def _make_class(self, members: str, negation: str = "") -> Node:
        text = ""
        chars: set[int] = set()
        for first, last in RANGE.findall(members):
            low = self._decode(first)
            high = self._decode(last or first)
            if low > high:
                raise self._invalid(f"range {first}-{last} is out of order")
            text += rf"\x{{{low:X}}}-\x{{{high:X}}}"
            chars.update(range(min(low, OTHER), min(high, OTHER) + 1))
        known = ALL - chars | {OTHER} if negation else Chars(chars)
        return Node("class", f"/[{negation}{text}]/", chars=known)

    def _decode(self, char: str) -> int:
        """Return the code point of a character or an escape."""
        point = int(char[2:], 16) if len(char) > 2 else ord(CONTROLS.get(char, char[-1]))
        if point > 0x10FFFF or 0xD800 <= point < 0xE000:
            raise self._invalid(f"{show(char)} is not a character")
        return point

    def _advance(self) -> None:
        self.token = next(self.tokens)

    def _invalid(self, problem: str) -> Exception:
        line = self.token.string.count("\n", 0, self.token.start()) + 1
        return invalid("EBNF", f"line {line}: {problem}", separator=", ")


class Writer:
    """Writes rules in Lark. Rule 2 is r2. If it has no recursion, it is T2 within lexemes."""

    def __init__(self, parser: Parser) -> None:
        self.rules = parser.rules
        self.regular = parser.firsts
        self.ids = {name: index for index, name in enumerate(self.rules)}
        self.shared = NONE  # characters that several lexemes begin with

    def write(self) -> str:
        """Write the grammar."""
        root = self.ids["root"]
        terminals = self._write_rules("T", self.regular)
        if "root" in self.regular:
            return "\n".join([f"start: T{root}", *terminals])
        for added in (NONE, NONE, NONE, ALL):  # in the end, all lexemes are characters
            self.shared |= added
            self.firsts: dict[str, Chars] = {}  # of lexemes
            self.sequences: dict[str, str] = {}  # lexemes, and their names
            rules = self._write_rules("r", self.rules)
            counts = Counter(chain.from_iterable(self.firsts.values()))
            self.shared |= {char for char, num_lexemes in counts.items() if num_lexemes > 1}
            if all(self.shared.isdisjoint(self.firsts[text]) for text in self.sequences):
                break
        sequences = [f"{name}: {text}" for text, name in self.sequences.items()]
        return "\n".join([f"start: r{root}", *terminals, *sequences, *rules])

    def _write_rules(self, prefix: str, names: Iterable[str]) -> list[str]:
        return [
            f"{prefix}{self.ids[name]}: {self._write(prefix, self.rules[name])}" for name in names
        ]

    def _write(self, prefix: str, node: Node) -> str:
        if node.kind == "name":
            return f"{prefix}{self.ids[node.text]}"
        if node.kind == "class":
            if prefix == "r":
                self.firsts[node.text] = node.chars
            return node.text
        if node.kind == "sequence" and prefix == "r":
            texts = self._divide(node)
        else:
            texts = [self._write(prefix, part) for part in node.parts]
        separator = " | " if node.kind == "choice" else " "
        return f"({separator.join(texts) or EMPTY}){node.text}"

    def _divide(self, node: Node) -> list[str]:
        """Write a sequence with as few lexemes as possible."""
        texts: list[str] = []
        start = 0
        while start < len(node.parts):
            end = start + 1
            first = node.firsts[start]
            if first and first.isdisjoint(self.shared):
                end = node.firsts.index(NONE, start)
            parts = node.parts[start:end]
            if len(parts) == 1:
                texts.append(self._write("r", parts[0]))
            else:
                text = " ".join([self._write("T", part) for part in parts])
                self.firsts[text] = first
                texts.append(self.sequences.setdefault(text, f"S{len(self.sequences)}"))
            start = end
        return texts
