"""The calls in a block of a reply, which is the text between <tool_call> and </tool_call>.

A block is a sequence of elements, in either of the two forms of constraints.py:

    call          object | function
    object        {"name": name, "arguments": {...}}, or a list of objects
    function      <function=name> parameter* </function>
    parameter     <parameter=name> value </parameter>

A value can contain tags, and whole functions. It ends at the first </parameter> that another tag
follows. Models forget it, so a value without tags also ends at a line with <parameter=name> and at
the end of the function.
"""

import json
import re
from typing import Any, NamedTuple

from nanovllm.server.parameter_values import JSON, find_properties, read_value
from nanovllm.text.chat_template import NAME

FUNCTION = "<function="
END_FUNCTION = "</function>"
HEAD = re.compile(r"<function=[\"']?([^\"'<>\n]+)[\"']?>")  # some models quote names
PARAMETER = re.compile(
    r"\s*<parameter=[\"']?([^\"'<>\n]+)[\"']?>\n?"
    r"(?:([^<]*?)(?:\n(?=<parameter=)|\n?(?=</function>\s*(?:<function=|\Z)))"
    r"|((?:(?!<function=).|<function=(?:(?!</function>).)*</function>)*?)"
    r"\n?</parameter>(?=\s*(?:<parameter=|</function>)))",
    re.DOTALL,
)
TAIL = re.compile(r"\s*</function>")
FILLER = re.compile(r"[\s,}]*")  # small models write too many braces


class Call(NamedTuple):
    name: str
    arguments: str  # JSON


def read_calls(text: str, schemas: dict[str, Any]) -> list[Call]:
    """Return the calls of a block, or none if it has anything else.

    `schemas` are those of the parameters of functions, by name.
    """
    calls: list[Call] = []
    start = _skip(FILLER, text, 0)
    try:
        while start < len(text):
            head = HEAD.match(text, start)
            if head is None:
                value, start = JSON.raw_decode(text, start)
                for each in value if isinstance(value, list) else [value]:
                    calls.append(_make_call(each["name"], each["arguments"] or {}))
            else:
                arguments, start = _read_parameters(text, head.end(), schemas.get(head[1]))
                calls.append(_make_call(head[1], arguments))
            start = _skip(FILLER, text, start)
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
    return calls


def _make_call(name: str, arguments: Any) -> Call:
    if isinstance(arguments, str):  # some models write them as a str of JSON
        arguments = json.loads(arguments)
    if not (NAME.fullmatch(name) and isinstance(arguments, dict)):
        raise ValueError("no call")
    return Call(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def _read_parameters(text: str, start: int, schema: Any) -> tuple[dict[str, Any], int]:
    """Return the arguments of a function in tags, and the position after it."""
    properties = find_properties(schema)
    arguments: dict[str, Any] = {}
    match = PARAMETER.match(text, start)
    while match is not None:
        name, open_value, value = match.groups()
        arguments[name] = read_value(value or open_value or "", properties.get(name), schema)
        start = match.end()
        match = PARAMETER.match(text, start)
    return arguments, _skip(TAIL, text, start)


def _skip(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    if match is None:
        raise ValueError("no call")
    return match.end()
