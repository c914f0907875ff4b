"""Patterns mean in grammars what they mean in ECMAScript. Node, where there is one, confirms it."""

import json
import shutil
import string
import subprocess

import pytest

pytest.importorskip("llguidance")

from grammar_helpers import match

from nanovllm.features.structured_outputs.patterns import convert_pattern

DIGITS = set(string.digits)
WORD = {*string.ascii_letters, *DIGITS, "_"}
LINES = set("\n\r\u2028\u2029")
SPACE = (
    LINES | set("\t\v\f \xa0\u1680\u202f\u205f\u3000\ufeff") | set(map(chr, range(0x2000, 0x200B)))
)
# Letters, digits and spaces that engines disagree on.
OTHERS = set("\x80\x85\xaa\xb2\xe9\u017f\u0661\u180e\u200b\u200d\u212a\u2167\ufe4f\uff11")
ALL = {*map(chr, range(1, 128)), *SPACE, *OTHERS, "\U0001d7d8", "\U0001f600"}

CHARACTERS = {
    r"\d": DIGITS,
    r"\D": ALL - DIGITS,
    r"\w": WORD,
    r"\W": ALL - WORD,
    r"\s": SPACE,
    r"\S": ALL - SPACE,
    ".": ALL - LINES,
    r"[\s\S]": ALL,
    "[^]": ALL,
    "[]": set(),
    r"[^\d\s]": ALL - DIGITS - SPACE,
    r"[^\W_]": WORD - {"_"},
    r"[\D5]": ALL - DIGITS | {"5"},
    "[^<&&>]": ALL - set("<&>"),
    "[a&&b]": set("ab&"),
    "[^!--/]": ALL - set("!\"#$%&'()*+,-/"),
    "[+--]": set("+,-"),
    "[a~~b]": set("ab~"),
    "[a[b]": set("a[b"),
    "[[:alpha:]": set("[:alph"),
    r"[\w-.]": WORD | set("-."),
    r"[a-\d]": DIGITS | set("a-"),
    "[a-]": set("a-"),
    "[a-c-e]": set("abc-e"),
    "[.*+?^${}()|/#]": set(".*+?^${}()|/#"),
    r"[\b]": {"\b"},
    r"[\]\\\-\[\/]": set("]\\-[/"),
    r"[\x41\u0042\t]": set("AB\t"),
    r"\ud83d\ude00": {"\U0001f600"},
    r"[a\uD83D\uDE00-\ud83d\ude02]": {"a", "\U0001f600"},
    r"[\0-!#-\[\]-~]": set(map(chr, range(1, 127))) - set('"\\'),
    r'[^"\n\\]': ALL - set('"\n\\'),
    r"[\u{1F600}-\u{1F64F}]": {"\U0001f600"},
    r"\p{Lu}": {*string.ascii_uppercase, "\u212a"},
    r"[^\P{Nd}]": DIGITS | set("\u0661\uff11\U0001d7d8"),
    r"\/|\-|\@|\_|\<|\>|\.|\ |\"|\'|\~": set("/-@_<>. \"'~"),
    "]|}|{|/": set("]}{/"),
}
TEXTS = {
    "a{2}": (["aa"], ["a", "a{2}"]),
    "a{1,}?b": (["ab", "aab"], ["b"]),
    "x{a}": (["x{a}"], ["xa"]),
    "{}": (["{}"], [""]),
    "(a|b)*c|d": (["abc", "d"], ["ad"]),
    "(?:a)(?<stop>b*)c": (["abbc", "ac"], ["ab"]),
    "": ([""], ["a"]),
    r"\0[\0]": (["\0\0"], ["00"]),
    "a//b": (["a//b"], ["a"]),
    "a\nb": (["a\nb"], ["a b"]),
    "é+": (["é", "éé"], ["e"]),
}
# As in Python.
OTHER_TEXTS = {
    "(?P<stop>a*)b": (["ab"], ["a"]),
    "(?i)straße": (["STRAßE", "straße"], ["strasse"]),
    "(?s).": (["\n"], ["aa"]),
}
# The whole text need not match. Anchors can stand in any group at either end.
SEARCHES = {
    "b": (["b", "abc"], ["a"]),
    "^b|c$": (["ba", "ac"], ["abcd"]),
    "^(a|b$)": (["ac", "b"], ["bc"]),
    "(^a|b)c$": (["ac", "xbc"], ["xac", "bcd"]),
    "(?:^|-)a(?:-|$)": (["a", "x-a-y"], ["xa", "ax"]),
    "^a*$|^$": (["", "aa"], ["b"]),
}
JAVASCRIPT = """
const compile = pattern => {
  try { return new RegExp(pattern, "u"); } catch { return new RegExp(pattern); }
};
const cases = JSON.parse(require("fs").readFileSync(0, "utf8"));
const match = ([pattern, valid, invalid]) =>
  [...valid, ...invalid].map(text => compile(pattern).test(text));
console.log(JSON.stringify(cases.map(match)));
"""


def match_all(pattern, texts):
    return match(f"start: /(?:{convert_pattern(pattern)})/", texts)


@pytest.mark.parametrize("pattern", CHARACTERS)
def test_characters(pattern):
    texts = sorted(ALL)
    matching = {text for text, matches in zip(texts, match_all(pattern, texts)) if matches}
    assert matching == CHARACTERS[pattern]


@pytest.mark.parametrize("pattern, texts", [*TEXTS.items(), *OTHER_TEXTS.items()])
def test_texts(pattern, texts):
    valid, invalid = texts
    assert match_all(pattern, valid + invalid) == [True] * len(valid) + [False] * len(invalid)


def list_cases():
    """Return (pattern, valid texts, invalid texts) for patterns that match a part of a text."""
    for pattern, characters in CHARACTERS.items():
        yield pattern, sorted(characters), sorted(ALL - characters)
    for pattern, (valid, invalid) in TEXTS.items():
        yield f"^(?:{pattern})$", valid, invalid
    for pattern, (valid, invalid) in SEARCHES.items():
        yield pattern, valid, invalid


@pytest.mark.parametrize("pattern, valid, invalid", [*list_cases()])
def test_patterns_of_schemas(pattern, valid, invalid):
    schema = {"type": "string", "pattern": convert_pattern(pattern)}
    # The grammar has no escapes such as \u007f.
    valid = [text for text in valid if min(text, default=" ") >= " " and text != "\x7f"]
    texts = [json.dumps(text, ensure_ascii=False) for text in valid + invalid]
    results = match(f"start: %json {json.dumps(schema)}", texts)
    assert results == [True] * len(valid) + [False] * len(invalid)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_node_agrees():
    cases = list(list_cases())
    program = shutil.which("node")
    output = subprocess.run(
        [program, "-e", JAVASCRIPT],
        input=json.dumps(cases),
        capture_output=True,
        check=True,
        text=True,
    )
    for (pattern, valid, invalid), results in zip(cases, json.loads(output.stdout)):
        assert results == [True] * len(valid) + [False] * len(invalid), pattern


@pytest.mark.parametrize(
    "pattern, problem",
    [
        ("(?=a)b", r"'\(\?=a\)b' at position 0 is invalid there, or no grammar holds it"),
        (r"\bword", "position 0"),
        (r"(a)\1", "position 3"),
        ("(?>a)", "position 0"),
        ("a{,3}", "'{,3}' at position 1"),
        ("a*+", r"'\+' at position 2"),
        ("(^a)?b", r"'\?' at position 4"),
        ("a^b", r"'\^' at position 1"),
        ("(a$|b)c", "'c' at position 6"),
        ("[z-a]", "range z-a is out of order"),
        ("(a", "a group is unclosed"),
        ("a)", r"'\)' at position 1"),
        (r"\ud83d", "is not a character"),
        (r"\q", "position 0"),
        ("a\\", "position 1"),
    ],
)
def test_the_error_of_a_pattern_begins_with_it(pattern, problem):
    with pytest.raises(ValueError, match=problem) as caught:
        convert_pattern(pattern)
    assert str(caught.value).startswith(f"pattern {pattern!r}: ")
