r"""Converts grammars in the EBNF of llama.cpp and vLLM (GBNF) into llguidance's variant of Lark.

    root ::= "[" item ("," item)* "]"
    item ::= [a-z]+ | root

EBNF describes characters, while llguidance divides a text into lexemes, each as long as possible.
This matches the same texts if no lexeme begins another one. A grammar without recursion therefore
becomes one lexeme. In others, a lexeme is a character. Many lexemes take time, so a sequence whose
characters show where it ends, such as "\"" [^"]* "\"", is a lexeme as well.

See https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md.
"""

import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import chain

from nanovllm.utils.checks import invalid, show

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
    """
)
CHAR = f"(?s:{ESCAPE}|.)"
RANGE = re.compile(f"({CHAR})(?:-({CHAR}))?")
CONTROLS = {r"\n": "\n", r"\r": "\r", r"\t": "\t"}
# The characters of ASCII, and one that stands for all others.
OTHER = 128
ALL = frozenset(range(OTHER + 1))
NONE: frozenset[int] = frozenset()
EMPTY = '""'
MAX_PASSES = 4


@dataclass(eq=False)
class Node:
    """A part of a rule."""

    kind: str  # "chars", "name", "sequence", "choice" or "repeat"
    text: str = ""  # a class of a regex, the name of a rule, or a repetition such as {1,2}
    parts: list["Node"] = field(default_factory=list)
    chars: frozenset[int] = NONE  # of ALL, which a class has

    @cached_property
    def first(self) -> frozenset[int]:
        """What a text of this node begins with. Nothing if the text might not show where it ends.

        It shows this if each character can belong to one part only.
        """
        if self.kind == "chars":
            return self.chars
        if self.kind == "repeat":
            is_fixed = re.fullmatch(r"\{0*([1-9]\d*)(,0*\1)?\}", self.text)
            return self.parts[0].first if is_fixed else NONE
        if self.kind == "sequence":
            return self.firsts[0] if all(self.firsts) else NONE
        firsts = [part.first for part in self.parts]
        union = NONE.union(*firsts)
        is_clear = all(firsts) and len(union) == sum(map(len, firsts))
        return union if is_clear else NONE

    @cached_property
    def firsts(self) -> list[frozenset[int]]:
        """The same for each part of a sequence. What follows can show where a repetition ends."""
        following = NONE
        firsts = [following]
        for part in reversed(self.parts):
            first = part.first
            if part.kind == "repeat" and not first:
                repeated = part.parts[0].first
                is_clear = repeated and following and not repeated & following
                first = repeated | following if is_clear else NONE
            firsts.append(first)
            following = first
        firsts.reverse()
        return firsts[:-1] or firsts


ANY = Node("chars", r"/[\x{0}-\x{10FFFF}]/", chars=ALL)


def convert_ebnf(grammar: str) -> str:
    """Return a grammar in Lark. Raises ValueError that names the line at fault."""
    parser = Parser(grammar)
    sorter = TopologicalSorter(parser.uses)
    with suppress(CycleError):
        sorter.prepare()
    regular: dict[str, Node] = {}
    while names := sorter.get_ready():  # rules that use only earlier ones
        for name in names:
            regular[name] = parser.rules[name]
            for node in parser.nodes[name]:
                node.parts.append(parser.rules[name])
        sorter.done(*names)
    return Writer(parser.rules, regular).write()


class Parser:
    """Reads the rules of a grammar."""

    def __init__(self, grammar: str) -> None:
        self.grammar = grammar
        self.tokens = TOKEN.finditer(grammar)
        self.rules: dict[str, Node] = {}
        self.uses: dict[str, set[str]] = {}  # the names that come in each rule
        self.nodes: dict[str, list[Node]] = {}  # for each name, what stands for it
        self.starts = {"root": 0}  # where each name comes first
        self._advance()
        while self.kind == "head":
            name = self.text
            if name in self.rules:
                raise self._invalid(f"rule {name!r} comes a second time")
            self.used = self.uses[name] = set[str]()
            self.nodes.setdefault(name, [])
            self._advance()
            self.rules[name] = self._read_choice()
        if self.kind != "end":
            raise self._invalid(f"unexpected {show(self.text)}")
        for name, start in self.starts.items():
            if name not in self.rules:
                self.start = start
                raise self._invalid(f"rule {name!r} is missing")

    def _read_choice(self) -> Node:
        parts = [self._read_sequence()]
        while self.kind == "|":
            self._advance()
            parts.append(self._read_sequence())
        return Node("choice", parts=parts)

    def _read_sequence(self) -> Node:
        parts: list[Node] = []
        while True:
            if self.kind == "literal":
                chars = [self._make_class(char) for char in re.findall(CHAR, self.text)]
                parts.append(Node("sequence", parts=chars))
            elif self.kind == "members":
                parts.append(self._make_class(self.text, self.is_negated))
            elif self.kind == ".":
                parts.append(ANY)
            elif self.kind == "name":
                node = Node("name", self.text)
                self.used.add(self.text)
                self.starts.setdefault(self.text, self.start)
                self.nodes.setdefault(self.text, []).append(node)
                parts.append(node)
            elif self.kind == "repeat" and parts:
                parts[-1] = Node("repeat", "".join(self.text.split()), [parts[-1]])
            elif self.kind == "(":
                self._advance()
                parts.append(self._read_choice())
                if self.kind != ")":
                    raise self._invalid("expected ')'")
            else:
                return Node("sequence", parts=parts)
            self._advance()

    def _make_class(self, members: str, is_negated: bool = False) -> Node:
        text = ""
        chars: set[int] = set()
        for first, last in RANGE.findall(members):
            low = self._decode(first)
            high = self._decode(last or first)
            if low > high:
                raise self._invalid(f"range {first}-{last} is out of order")
            text += rf"\x{{{low:X}}}-\x{{{high:X}}}"
            chars.update(range(min(low, OTHER), min(high, OTHER) + 1))
        if is_negated:
            return Node("chars", f"/[^{text}]/", chars=ALL - chars | {OTHER})
        return Node("chars", f"/[{text}]/", chars=frozenset(chars))

    def _decode(self, char: str) -> int:
        """Return the code point of a character or an escape."""
        point = int(char[2:], 16) if len(char) > 2 else ord(CONTROLS.get(char, char[-1]))
        if point > 0x10FFFF or 0xD800 <= point < 0xE000:
            raise self._invalid(f"{show(char)} is not a character")
        return point

    def _advance(self) -> None:
        """Go to the next token."""
        match = next(self.tokens, None)
        while match is not None and match.lastgroup == "space":
            match = next(self.tokens, None)
        if match is None:
            self.kind = self.text = "end"
            self.start = len(self.grammar)
            return
        self.kind = str(match.lastgroup)
        self.text = match[self.kind]
        self.is_negated = match["negation"] == "^"
        self.start = match.start()
        if self.kind == "sign":
            self.kind = self.text

    def _invalid(self, problem: str) -> Exception:
        line = self.grammar.count("\n", 0, self.start) + 1
        return invalid("EBNF", f"line {line}: {problem}", separator=", ")


class Writer:
    """Writes rules in Lark. Rule 2 becomes r2. T2 is its text as a part of a lexeme."""

    def __init__(self, rules: dict[str, Node], regular: dict[str, Node]) -> None:
        self.rules = rules
        self.regular = regular  # rules without recursion
        self.ids = {name: index for index, name in enumerate(rules)}
        self.shared = NONE  # characters that begin several lexemes

    def write(self) -> str:
        """Write the grammar."""
        terminals = self._write_rules(self.regular, "T")
        if "root" in self.regular:
            return f"start: T{self.ids['root']}{terminals}"
        for num_passes in range(MAX_PASSES + 1):
            if num_passes == MAX_PASSES:
                self.shared = ALL
            self.firsts: dict[str, frozenset[int]] = {}  # of all lexemes
            self.sequences: dict[str, str] = {}  # the lexemes with names
            rules = self._write_rules(self.rules, "r")
            counts = Counter(chain.from_iterable(self.firsts.values()))
            self.shared |= {char for char, num_lexemes in counts.items() if num_lexemes > 1}
            if all(self.shared.isdisjoint(self.firsts[text]) for text in self.sequences):
                break
        sequences = "".join([f"\n{name}: {text}" for text, name in self.sequences.items()])
        return f"start: r{self.ids['root']}{terminals}{sequences}{rules}"

    def _write_rules(self, rules: dict[str, Node], prefix: str) -> str:
        texts = [
            f"\n{prefix}{self.ids[name]}: {self._write(rules[name], prefix)}" for name in rules
        ]
        return "".join(texts)

    def _write(self, node: Node, prefix: str) -> str:
        if node.kind == "name":
            return f"{prefix}{self.ids[node.text]}"
        if node.kind == "chars":
            if prefix == "r":
                self.firsts[node.text] = node.first
            return node.text
        if node.kind == "sequence" and prefix == "r":
            texts = self._divide(node)
        else:
            texts = [self._write(part, prefix) for part in node.parts]
        separator = " | " if node.kind == "choice" else " "
        return f"({separator.join(texts) or EMPTY}){node.text}"

    def _divide(self, node: Node) -> list[str]:
        """Write a sequence with as few lexemes as possible."""
        texts: list[str] = []
        firsts = [*node.firsts, NONE]
        start = 0
        while start < len(node.parts):
            end = start + 1
            first = firsts[start]
            if first and first.isdisjoint(self.shared):
                end = firsts.index(NONE, start)
            if end - start > 1:
                text = " ".join([self._write(part, "T") for part in node.parts[start:end]])
                self.firsts[text] = first
                texts.append(self.sequences.setdefault(text, f"S{len(self.sequences)}"))
            else:
                texts.append(self._write(node.parts[start], "r"))
            start = end
        return texts
