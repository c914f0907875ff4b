"""Grammars in EBNF match the texts that their characters say, whatever lexemes they become."""

import itertools
import random

import pytest

pytest.importorskip("llguidance")

from grammar_helpers import match

from nanovllm.features.structured_outputs.ebnf import ALL, Converter, convert_ebnf

ARITHMETIC = r"""
root ::= (expr "=" ws num)+
expr ::= term ([-+*/] ws term)*
term ::= num | "(" ws expr ")" ws
num ::= [0-9]+ ws
ws ::= [ \t\n]*
"""
JSON = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [1-9] [0-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
# Grammars, texts that match, and texts that do not.
CASES = {
    'root ::= body "."\nbody ::= [a-z .]*': (["a. b.", "."], ["a. b"]),
    "root ::= many last\nmany ::= [0-9]+\nlast ::= [0-9]": (["12", "123"], ["1"]),
    'root ::= key [a-z]+\nkey ::= "a" | "ab"': (["ab", "abc", "ac"], ["a"]),
    'root ::= .* "</end>"': (["a\n<</end>", "</end></end>"], ["a"]),
    ARITHMETIC: (["(1 + 23) * 4 =\n 92 ", "1=1 \n\t2=2"], ["(1=1", "1="]),
    JSON: (['{"a": [1, -2.5e7, {"\\u00e9\\"": true}], "": null}\n '], ["{1: 2}", '{"a": "\x01"}']),
    r'root ::= "\u0436ab" [\u00e0-\u00ff] "\U0001F600" "\x41\t\"\\"': (['жabé😀A\t"\\'], ["жab"]),
    r'root ::= [\]\-\[\\a-]+ "[]" [^^]': (["]-[\\a[]b"], ["b[]b", "a[]^"]),
    r"root ::= [^<&&>] [^!--/] [a~~b] [+--]": (["a0~-", "|.b,"], ["&0~-", "a%~-", "a0~*"]),
    r'root ::= "é"{2} [é-ï]{1,} "."{0,2} ("a" | "" | )': (["ééé", "ééïï..a"], ["éé", "ééé..."]),
    'root::=a b|# comment "x"\n\n"c"\r\na ::= "a"  # "y"\nb ::=\n  (\n"b"\n)?': (
        ["a", "ab", "c"],
        ["x"],
    ),
    'root ::= start Foo foo a-b a_b 1st\nstart ::= "1"\nFoo ::= "2"\nfoo ::= "3"\na-b ::= "4"'
    '\na_b ::= "5"\n1st ::= "6" root?': (["123456"], ["1234562"]),
    'root ::= root "a" | ""': (["", "aaa"], ["b"]),
}


@pytest.mark.parametrize("recursion", ["", ' | "RR" root "RR"'])
@pytest.mark.parametrize("grammar", CASES)
def test_grammars(grammar, recursion):
    valid, invalid = CASES[grammar]
    wrapped = f"{grammar}\n".replace("root ::=", f"root ::= inner{recursion}\ninner ::=", 1)
    expected = [True] * len(valid) + [False] * len(invalid)
    for text in (grammar, wrapped):
        assert match(convert_ebnf(text), valid + invalid) == expected


@pytest.mark.parametrize(
    "grammar, problem",
    [
        ("root ::= (", "line 1: unexpected end"),
        ('root ::= "a"\n\nb ::= foo', "line 3: rule 'foo' is missing"),
        ('b ::= "a"', "line 1: rule 'root' is missing"),
        ('root ::= "a"\nroot ::= "b"', "line 2: rule 'root' comes a second time"),
        ('root ::= "a" | * "b"', r"line 1: unexpected repeat '\*'"),
        (r'root ::= "\d"', "line 1: unexpected character '\"'"),
        ("root ::= [b-a]", "line 1: range b-a is out of order"),
        (r'root ::= "\ud800"', "line 1: .* is not a character"),
        ("root ::= " + "(" * 9999, "maximum recursion depth"),
        ('root ::= "' + "a" * 100_000 + '"', "must have at most 100000 characters.*: use Lark"),
    ],
)
def test_an_error_names_the_line(grammar, problem):
    with pytest.raises(ValueError, match=f"EBNF.*{problem}"):
        convert_ebnf(grammar)


def write_random_part(rng, depth=0):
    kinds = ["class", "literal", "name", "repeat", "sequence", "choice"]
    kind = rng.choice(kinds[: 2 if depth > 2 else None])
    if kind == "class":
        return rng.choice(["[a]", "[b]", "[ab]", "[^a]", "[c]", '["]', '[^"]'])
    if kind == "literal":
        text = "".join(rng.choices('abc"', k=rng.randint(0, 3)))
        return '"' + text.replace('"', '\\"') + '"'
    if kind == "name":
        return rng.choice(["root", "x", "y"])
    if kind == "repeat":
        return write_random_part(rng, depth + 1) + rng.choice(["*", "+", "?", "{2}"])
    parts = [write_random_part(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    return f"({(' | ' if kind == 'choice' else ' ').join(parts)})"


def convert_to_characters(grammar):
    """Convert a grammar so that each lexeme is a character."""
    converter = Converter(grammar)
    converter.shared = ALL
    converter.is_recursive = True
    return converter.convert()


@pytest.mark.parametrize("start", range(0, 120, 20))
def test_lexemes_match_what_their_characters_match(start):
    for seed in range(start, start + 20):
        rng = random.Random(seed)
        root, x, y = [write_random_part(rng) for _ in range(3)]
        if rng.random() < 0.5:  # what becomes a lexeme
            root = f'"\\"" ({root})* "\\"" root?'
        grammar = f"root ::= {root}\nx ::= {x}\ny ::= {y}"
        texts = ["".join(chars) for k in range(4) for chars in itertools.product('abc"', repeat=k)]
        texts += ["".join(rng.choices('abc"', k=6)) for _ in range(30)]
        expected = match(convert_to_characters(grammar), texts)
        assert match(convert_ebnf(grammar), texts) == expected, (seed, grammar)
