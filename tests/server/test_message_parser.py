"""The text of a reply is divided in the same way, however it is cut into pieces."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.server.message_parser import MessageParser

THINK, CALL = "<think>", "<tool_call>"


DEEP = {"type": "string"}
for _ in range(2000):
    DEEP = {"anyOf": [DEEP]}
PROPERTIES = {
    "deep": DEEP,
    "text": {"type": "string"},
    "optional": {"anyOf": [{"type": "null"}, {"type": "string"}]},
    "list": {"type": ["string", "array"]},
    "choice": {"enum": ["1", 2]},
    "number": {"type": "integer"},
    "invalid": {"type": 5},
}
TOOL = {"function": {"name": "add", "parameters": {"properties": PROPERTIES}}}


def parse(pieces, parses_reasoning=True, tools=(TOOL,), is_parallel=True, prompt=""):
    """Return the message that the deltas of a stream add up to, and the deltas."""
    parser = MessageParser(parses_reasoning, list(tools), is_parallel, prompt)
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


ADD = ["add", '{"a": 1}']
FIND = ["find", "{}"]
NESTED = '{"a": {"b": [{}]}, "c": "}} \\"</tool_call", "d": {}}'
TAGS = r'{"a": "<tool_call>\"</tool_call>\\", "</tool_call>": [{}]}'
CASES = {
    "plain": ("  1 < 2 ", {"content": "1 < 2 "}),
    "reasoning": ("<think>\nSo.\n</think>\n\nYes.", {"reasoning": "\nSo.\n", "content": "Yes."}),
    "no end": ("<think>So <b", {"reasoning": "So <b"}),
    "no reasoning": ("<think></think>Yes", {"content": "Yes"}),
    "late": ("Say <think>x</think>", {"content": "Say <think>x</think>"}),
    "one call": (write_call(), {"tool_calls": [ADD]}),
    "calls": (
        f"<think>So.</think>\n\nI add:\n{write_call()}\n{write_call('sub', '{}')}\n",
        {"reasoning": "So.", "content": "I add:\n", "tool_calls": [ADD, ["sub", "{}"]]},
    ),
    "nested": (write_call(arguments=NESTED), {"tool_calls": [["add", NESTED]]}),
    "spaces": (
        '<tool_call>{ "name" : "add" , "arguments" : {"a": 1 } \n } </tool_call>',
        {"tool_calls": [["add", '{"a": 1 }']]},
    ),
    "other order": (
        '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>',
        {"tool_calls": [ADD]},
    ),
    "more keys": (
        '<tool_call>{"name": "add", "arguments": {"a": 1}, "id": {"b": 2}}</tool_call>',
        {"tool_calls": [ADD]},
    ),
    "more before": (
        '<tool_call>{"id": 3, "name": "add", "arguments": {"a": 1}}}</tool_call>',
        {"tool_calls": [ADD]},
    ),
    "tags in strings": (
        write_call(arguments=TAGS) + write_call(),
        {"tool_calls": [["add", TAGS], ADD]},
    ),
    "open string": (
        write_call(arguments='{"a": "') + write_call(),
        {"tool_calls": [["add", '{"a": "}\n'], ADD]},
    ),
    "JSON in a string": (
        r'<tool_call>{"name": "add", "arguments": "{\"a\": 1}"}</tool_call>',
        {"tool_calls": [ADD]},
    ),
    "no arguments": (write_call("find", "null"), {"tool_calls": [FIND]}),
    "words around calls": (
        f"\nHi{write_call()}\n{write_call('find', '{}')} \n bye ",
        {"content": "Hi\n \n bye ", "tool_calls": [ADD, FIND]},
    ),
    "words after a call": (
        f"{write_call()}\n Done. {write_call()}\n",
        {"content": "Done. ", "tool_calls": [ADD, ADD]},
    ),
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
    "texts that are JSON": (
        "<tool_call><function=add>"
        + "".join(
            f"<parameter={name}>\n{text}\n</parameter>\n"
            for name, text in [
                ("optional", "true"),
                ("list", "[]"),
                ("choice", "1"),
                ("number", "NaN"),
                ("invalid", "null"),
            ]
        )
        + "</function></tool_call>",
        {
            "tool_calls": [
                [
                    "add",
                    '{"optional": "true", "list": "[]", "choice": "1", "number": "NaN",'
                    ' "invalid": null}',
                ]
            ]
        },
    ),
    "NaN": (
        '<tool_call>{"arguments": {"a": NaN}, "name": "add"}</tool_call>',
        {"content": '<tool_call>{"arguments": {"a": NaN}, "name": "add"}</tool_call>'},
    ),
    "no parameters": (
        "<tool_call><function=find></function></tool_call>",
        {"tool_calls": [FIND]},
    ),
    "no end of tags": (
        "<tool_call><function=find></tool_call>",
        {"content": "<tool_call><function=find></tool_call>"},
    ),
    "a call ends reasoning": (
        f"<think>So {write_call()} Yes.",
        {"reasoning": "So ", "tool_calls": [ADD], "content": "Yes."},
    ),
    "null": (
        '<tool_call>{"name": null, "arguments": {}}</tool_call>',
        {"content": '<tool_call>{"name": null, "arguments": {}}</tool_call>'},
    ),
    "no closing tag": (
        write_call().removesuffix("</tool_call>")
        + "<tool_call>no<tool_call>{}"
        + write_call("find", "{}"),
        {"tool_calls": [ADD, FIND], "content": "<tool_call>no<tool_call>{}"},
    ),
    "cut off": (write_call()[:-15], {"tool_calls": [["add", '{"a": 1']]}),
    "no call": ("<tool_call>add(1)</tool_call>!", {"content": "<tool_call>add(1)</tool_call>!"}),
    "no name": ('<tool_call>{"name": "add"', {"content": '<tool_call>{"name": "add"'}),
    "deep": (f"<tool_call>{'[' * 10**5}", {"content": f"<tool_call>{'[' * 10**5}"}),
    "not tags": (
        "a <tool_ca> </think> <</tool_call>",
        {"content": "a <tool_ca> </think> <</tool_call>"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_cut_gives_the_same_message(name):
    text, expected = CASES[name]
    assert parse([text])[0] == expected
    for cut in range(min(len(text), 200)):
        assert parse([text[:cut], text[cut:]])[0] == expected, text[:cut]
    if len(text) < 1000:
        assert parse(text)[0] == expected


def test_no_depth_of_values_raises():
    for depth in range(800, 1100, 3):
        value = "[" * depth + "]" * depth
        parse([f"<tool_call><function=add><parameter=a>{value}</parameter></function></tool_call>"])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.sampled_from([name for name in CASES if name != "deep"]), st.data())
def test_any_pieces_give_the_same_message(name, data):
    text, expected = CASES[name]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
    assert parse(pieces)[0] == expected


FRAGMENTS = [THINK, "</think>", CALL, "</tool_call>", write_call(), write_call()[:-14], " ", "\n"]
FRAGMENTS += [
    '"',
    "\\",
    "{",
    "}",
    '{"name": "add", "arguments": ',
    '{"a": "',
    "x",
    "<",
    "</tool",
    "1",
]


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=12).map("".join))
def test_a_stream_adds_up_to_the_whole_reply(text):
    whole, (delta,) = parse([text])
    assert parse(text)[0] == whole
    indices = [entry["index"] for entry in delta.get("tool_calls", [])]
    assert indices == list(range(len(indices))), "one entry for each call"


def test_text_is_sent_as_soon_as_it_cannot_begin_a_tag():
    _, deltas = parse(["<think>So <", "/b> ", "</think", "> A", " < B"])
    assert [delta.get("reasoning") for delta in deltas] == ["So ", "</b> ", None, None, None]
    assert [delta.get("content") for delta in deltas] == [None, None, None, "A", " < B"]


def test_arguments_are_sent_as_they_arrive():
    _, deltas = parse(
        ['<tool_call>{"name": "add", "argu', 'ments": {"a"', ": {}", "}}</tool_call>"]
    )
    functions = [delta["tool_calls"][0]["function"] for delta in deltas[1:]]
    assert deltas[0] == {}
    assert functions[0] == {"name": "add", "arguments": '{"a"'}
    assert functions[1:] == [{"arguments": ": {}"}, {"arguments": "}"}]
    assert json.loads("".join(function["arguments"] for function in functions)) == {"a": {}}


@pytest.mark.parametrize("prompt", ["assistant\n<think>\n", "<think>", "\n<think> "])
def test_the_prompt_can_begin_the_reasoning(prompt):
    text = "So.\n</think>\n\nYes."
    expected = {"reasoning": "So.\n", "content": "Yes."}
    for cut in range(len(text)):
        assert parse([text[:cut], text[cut:]], prompt=prompt)[0] == expected
    assert parse(["So."], prompt=prompt)[0] == {"reasoning": "So."}
    assert parse(["So."], prompt=f"{prompt}</think>\n\n")[0] == {"content": "So."}
    assert parse(["So."], False, [], prompt=prompt)[0] == {"content": "So."}


def test_only_requested_tags_are_parsed():
    text = f" <think>So.</think>{write_call()}"
    assert parse(text, False, [])[0] == {"content": text}
    assert parse(text, False)[0] == {
        "content": "<think>So.</think>",
        "tool_calls": [ADD],
    }
    assert parse(text, tools=[])[0] == {"reasoning": "So.", "content": write_call()}


def test_without_parallel_calls_only_the_first_one_is_sent():
    text = write_call() + write_call("sub")
    for pieces in ([text], text):
        assert parse(pieces, is_parallel=False)[0] == {"tool_calls": [ADD]}
