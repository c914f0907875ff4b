"""The text of a reply is divided in the same way, however it is cut into pieces."""

import json
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.server.chat_completions import find_last_tag
from nanovllm.server.message_parser import MessageParser

THINK, CALL = "<think>", "<tool_call>"


PROPERTIES = {"text": {"type": "string"}, "number": {"type": "integer"}}
TOOL = {"function": {"name": "add", "parameters": {"properties": PROPERTIES}}}


def parse(pieces, parses_reasoning=True, tools=(TOOL,), is_parallel=True, last_tag=""):
    """Return the message that the deltas of a stream add up to, and the deltas."""
    parser = MessageParser(parses_reasoning, list(tools), is_parallel, last_tag)
    message = {}
    deltas = []
    for index, piece in enumerate(pieces, 1):
        delta = parser.feed(piece, is_last=index == len(pieces))
        deltas.append(delta)
        for field in ("content", "reasoning"):
            if field in delta:
                message[field] = message.get(field, "") + delta[field]
        for entry in delta.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if entry["index"] == len(calls):
                assert entry["id"].startswith("call_")
                assert entry["type"] == "function"
                calls.append([entry["function"]["name"], ""])
            assert entry.keys() <= {"index", "id", "type", "function"}
            calls[entry["index"]][1] += entry["function"]["arguments"]
    return message, deltas


def write_call(name="add", arguments='{"a": 1}'):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def write_tags(*lines):
    """A call of add in tags, of which lines can be missing."""
    return "\n".join(["<tool_call>", "<function=add>", *lines, "</function>", "</tool_call>"])


def say(text):
    return {"tool_calls": [["add", json.dumps({"text": text})]]}


TEXT = ["<parameter=text>", "hello", "</parameter>"]
NUMBER = ["<parameter=number>", "1", "</parameter>"]
BOTH = {"tool_calls": [["add", '{"text": "hello", "number": 1}']]}
EXAMPLE = write_tags(*TEXT)

ADD = ["add", '{"a": 1}']
FIND = ["find", "{}"]
TAGS = r'{"a": "}} <tool_call>\"</tool_call>\\", "</tool_call>": [{}]}'
# A value that has a call.
NESTED = (
    "Say <tool_call>\n<function=f>\n<parameter=number>\n1\n</parameter>\n</function>\n</tool_call>"
)
CLOSING = "a </parameter> b </function> c </tool_call> d"
QUOTED_END = "END = '</function></tool_call>'\nmore()"
UNREADABLE = '<tool_call>{"name": <name>}</tool_call>'
CASES = {
    "plain": ("  1 < 2 ", {"content": "  1 < 2 "}),
    "only spaces": (" \n", {"content": " \n"}),
    "reasoning": ("<think>\nSo.\n</think>\n\nYes.", {"reasoning": "\nSo.\n", "content": "Yes."}),
    "spaces before reasoning": ("\n <think>So</think>Yes", {"reasoning": "So", "content": "Yes"}),
    "no end": ("<think>So <b", {"reasoning": "So <b"}),
    "no reasoning": ("<think>\n\n</think>Yes", {"content": "Yes"}),
    "spaces, another order and more keys": (
        '<tool_call>{ "id": {"b": 2}, "arguments" : {"a": 1 } , "name" : "add"\n } </tool_call>',
        {"tool_calls": [ADD]},
    ),
    "tags in strings": (
        write_call(arguments=TAGS) + write_call(),
        {"tool_calls": [["add", TAGS], ADD]},
    ),
    "null arguments": (write_call("find", "null"), {"tool_calls": [FIND]}),
    "no arguments": ('<tool_call>{"name": "find"}</tool_call>', {"tool_calls": [FIND]}),
    "words around calls": (
        f"\nHi{write_call()}\n{write_call('find', '{}')} \n bye ",
        {"content": "\nHi\n \n bye ", "tool_calls": [ADD, FIND]},
    ),
    "spaces around calls": (f" {write_call()} \n{write_call()} ", {"tool_calls": [ADD, ADD]}),
    "spaces before calls": (f"Hi \n{write_call()} ", {"content": "Hi", "tool_calls": [ADD]}),
    "tags instead of JSON": (
        '<tool_call>\n<function=add>\n<parameter=text>\n1\n"2\n</parameter>\n'
        "<parameter=number>\n1\n</parameter>\n<parameter=other>[2, {}]</parameter>"
        '<parameter=word>\n{"\n</parameter></function></tool_call>\n' + write_call(),
        {
            "tool_calls": [
                [
                    "add",
                    r'{"text": "1\n\"2", "number": 1, "other": [2, {}], "word": "{\""}',
                ],
                ADD,
            ]
        },
    ),
    "a call in reasoning that is cut": (
        '<think>So <tool_call>{"name": "f", "arguments": {"s": "a</think>Yes',
        {
            "reasoning": 'So <tool_call>{"name": "f", "arguments": {"s": "a',
            "content": "Yes",
        },
    ),
    "a call before the end of reasoning": (
        f"<think>So{write_call()}\n</think>\nYes</think>",
        {"reasoning": "So", "tool_calls": [ADD], "content": "Yes</think>"},
    ),
    "reasoning that goes on behind a call": (
        f"<think>I could do {write_call()} but no.</think>No.",
        {"reasoning": "I could do  but no.", "tool_calls": [ADD], "content": "No."},
    ),
    "calls in reasoning without an end": (
        f"<think>So{write_call()} or {write_call()}\nDone. ",
        {"reasoning": "So", "tool_calls": [ADD, ADD], "content": "or \nDone. "},
    ),
    "no parameters": (
        "<tool_call><function=find>\n</function>\n</tool_call>",
        {"tool_calls": [FIND]},
    ),
    "a parameter that is given twice": (write_tags(*TEXT, *TEXT), say("hello")),
    "two objects in a block": (
        '<tool_call>[{"name": "add", "arguments": {"a": 1}},\n'
        '{"arguments": {}, "name": "find"}]</tool_call>',
        {"tool_calls": [ADD, FIND]},
    ),
    "words about calls": (
        f"<tool_call>no<tool_call> or <tool_call><function> or <tool_call>{write_call()}",
        {
            "content": "<tool_call>no<tool_call> or <tool_call><function> or <tool_call>",
            "tool_calls": [ADD],
        },
    ),
    # What a value quotes is never a call.
    "a call in a value": (write_tags("<parameter=text>", NESTED, "</parameter>"), say(NESTED)),
    "four calls in a value": (
        write_tags("<parameter=text>", f"{NESTED}\n{write_call()}" * 4, "</parameter>"),
        say(f"{NESTED}\n{write_call()}" * 4),
    ),
    "a value with the end of a function": (
        write_tags("<parameter=text>", QUOTED_END, "</parameter>", *NUMBER),
        {"tool_calls": [["add", json.dumps({"text": QUOTED_END, "number": 1})]]},
    ),
    "a value with the start of a function": (
        write_tags("<parameter=text>", "<function=add> <function=", "</parameter>"),
        say("<function=add> <function="),
    ),
    "a value with closing tags": (
        write_tags("<parameter=text>", CLOSING, "</parameter>") + "Done.",
        {**say(CLOSING), "content": "Done."},
    ),
    "a value with opening and closing tags": (
        write_tags("<parameter=text>", "r'<parameter=a>(.*)</parameter>'\nx", "</parameter>"),
        say("r'<parameter=a>(.*)</parameter>'\nx"),
    ),
    "a value that is cut at three tags in a row": (
        write_tags("<parameter=text>", "a</parameter></function></tool_call>", "</parameter>"),
        {**say("a"), "content": "</parameter>\n</function>\n</tool_call>"},
    ),
    "a value with what is almost a tag": (
        write_tags("<parameter=text>", "</parameter></ parameter><parameter=text>", "</parameter>"),
        say("</parameter></ parameter><parameter=text>"),
    ),
    "a value that goes on behind what is almost an end": (
        write_tags("<parameter=text>", "a</ parameter></function></tool_call>", "</parameter>"),
        say("a</ parameter></function></tool_call>"),
    ),
    "reasoning behind a call that cannot be read": (
        f"<think>Is it {UNREADABLE} or {EXAMPLE}?</think>No. {EXAMPLE}",
        {"reasoning": f"Is it {UNREADABLE} or {EXAMPLE}?", "content": f"No. {EXAMPLE}"},
    ),
}


# Blocks that begin as calls and cannot be read. They are text, and so is a call behind them.
UNREADABLE_BLOCKS = [
    UNREADABLE,
    r'<tool_call>{"name": "add", "arguments": {"text": "C:\path\n"}}</tool_call>',
    '<tool_call>{"arguments": {"a": NaN}, "name": "add"}</tool_call>',
    '<tool_call>{"name": null, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
    '<tool_call>["add", {}]</tool_call>',
    "<tool_call>[]</tool_call>",
    "<tool_call>{}</tool_call>",
    write_call().removesuffix("</tool_call>"),
    write_call()[:-15],
    write_call(arguments='{"a": "'),
    write_tags(*TEXT).replace("=add", "=add 1"),
    write_tags(*TEXT).replace("=add", '="add"'),
    write_tags("add"),
    write_tags(*TEXT[:2]),
    write_tags(*TEXT[:2], *NUMBER),
    write_tags(*TEXT, "</function>", "<function=add>", *NUMBER),
    write_tags("<parameter=text>", NESTED),
]
TEXTS = [
    "Write <function=find></function> for that.",
    EXAMPLE.removeprefix("<tool_call>"),
    "See <function=add>",
    "</tool_call> <tool_call",
    # Blocks that max_tokens cuts.
    EXAMPLE.partition("<parameter")[0],
    EXAMPLE.partition("lo")[0],
    EXAMPLE.partition("</parameter>")[0] + "</para",
    EXAMPLE.partition("</function>")[0],
    write_tags("<parameter=text>", NESTED).partition("\n</function>\n</tool_call>\n")[0],
    *UNREADABLE_BLOCKS,
    *[block + EXAMPLE for block in UNREADABLE_BLOCKS],
]
CASES |= {text: (text, {"content": text}) for text in TEXTS}


@pytest.mark.parametrize("name", CASES)
def test_every_cut_gives_the_same_message(name):
    text, expected = CASES[name]
    assert parse([text])[0] == expected
    for cut in range(min(len(text), 200)):
        assert parse([text[:cut], text[cut:]])[0] == expected, text[:cut]
    assert parse(text)[0] == expected


def test_no_depth_of_values_raises():
    for depth in range(800, 1100, 3):
        value = "[" * depth + "]" * depth
        parse([f"<tool_call><function=add><parameter=a>{value}</parameter></function></tool_call>"])
        parse([f"<tool_call><function=add>{value}</function></tool_call>"])


def cut(data, text):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]


FRAGMENTS = """
<think> </think> <tool_call> </tool_call> " \\ { } {"a":" x < </tool 1 , word
<function=add> <function=f> </function> <parameter=text> <parameter=number> </parameter>
""".split()
FRAGMENTS += [write_call(), write_call()[:-14], " ", "\n", '{"name": "add", "arguments": ', EXAMPLE]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=12).map("".join), st.data())
def test_a_stream_adds_up_to_the_whole_reply(text, data):
    whole, (delta,) = parse([text])
    assert parse(text)[0] == whole
    assert parse(cut(data, text))[0] == whole
    indices = [entry["index"] for entry in delta.get("tool_calls", [])]
    assert indices == list(range(len(indices))), "one entry for each call"
    without_reasoning, _ = parse([text], parses_reasoning=False)
    if "tool_calls" not in without_reasoning:
        assert without_reasoning.get("content", "") == text, "nothing is lost"


@pytest.mark.parametrize(
    "part",
    [
        "<tool_call>",
        "</tool_call>",
        "<tool_call> ",
        "<tool_call><function=add>\n<parameter=text>",
        '<tool_call>{"a',
        '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>',
        "<tool_call><function=add><parameter=text></parameter> </function> ",
        "</think><",
    ],
)
def test_each_character_is_looked_at_a_bounded_number_of_times(part):
    """1 MB of a model that repeats itself, one character at a time."""
    text = "<think>" + part * (125_000 // len(part)) + "!"
    num_chars = 0

    class Counting(MessageParser):
        def _read(self, lexeme):
            nonlocal num_chars
            num_chars += len(lexeme)
            super()._read(lexeme)

    parser = Counting(True, [TOOL], True, "")
    for char in text:
        parser.feed(char, is_last=False)
        assert len(parser.tail) < len("</tool_call>")
    parser.feed("", is_last=True)
    assert num_chars <= 2 * len(text)


def test_text_is_sent_as_soon_as_it_cannot_begin_a_tag():
    _, deltas = parse(["<think>So <", "/b> ", "</think", "> A", " < B"])
    assert [delta.get("reasoning") for delta in deltas] == ["So", " </b>", None, " ", None]
    assert [delta.get("content") for delta in deltas] == [None, None, None, "A", " < B"]


def test_the_prompt_can_begin_the_reasoning():
    text = "So.\n</think>\n\nYes."
    expected = {"reasoning": "So.\n", "content": "Yes."}
    for cut in range(len(text)):
        assert parse([text[:cut], text[cut:]], last_tag=THINK)[0] == expected
    assert parse(["So."], last_tag=THINK)[0] == {"reasoning": "So."}
    for again in ("<think>So.</think>Yes.", "\n<think>So.</think>\nYes."):
        assert parse(again, last_tag=THINK)[0] == {"reasoning": "So.", "content": "Yes."}
    assert parse(["So."], False, [], last_tag=THINK)[0] == {"content": "So."}


@pytest.mark.parametrize(
    "prompt, continued, expected",
    [
        ("assistant\n<think>\n", "", THINK),
        ("<think> ", "", THINK),
        ("<think>\n\n</think>\n\n", "", "</think>"),
        ("What does <think> mean?\nassistant\n", "", ""),
        ("assistant\n<think>So", "<think>So", THINK),
        ("assistant\n<think>So</think>Yes", "<think>So</think>Yes", "</think>"),
        ("assistant\nI mean <think> and", "I mean <think> and", ""),
        ("assistant\n<think>So</think> <think>", "<think>So</think> <think>", "</think>"),
        ("assistant\n<think>\nSo", "So", ""),
    ],
)
def test_the_last_tag_of_a_prompt(prompt, continued, expected):
    vocabulary = Mock()
    vocabulary.name = chr  # a token for each character
    message = {"role": "assistant", "content": continued}
    given = {"messages": [message], "continue_final_message": continued != ""}
    assert find_last_tag(given, [*map(ord, prompt)], vocabulary) == expected


def test_only_requested_tags_are_parsed():
    text = f" <think>So.</think>{write_call()}"
    assert parse(text, False, [])[0] == {"content": text}
    assert parse(text, False)[0] == {
        "content": " <think>So.</think>",
        "tool_calls": [ADD],
    }
    assert parse(text, tools=[])[0] == {"reasoning": "So.", "content": write_call()}


def test_without_parallel_calls_only_the_first_one_is_sent():
    text = write_call() + write_call("sub")
    for pieces in ([text], text):
        assert parse(pieces, is_parallel=False)[0] == {"tool_calls": [ADD]}
