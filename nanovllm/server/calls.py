"""Tool calls in the text of a reply, in either of the two forms of constraints.py.

    block         <tool_call> (object | list of objects | function) </tool_call>
    object        {"name": name, "arguments": {...}}, where null or no arguments are {}
    function      <function=name> parameter* </function>
    parameter     <parameter=name> value </parameter>

Tags in arguments are text. With JSON a block ends at the first </tool_call> outside of a string. A
function ends at the first </parameter></function></tool_call> at which all parameters are closed.
The tags of parameters are counted, so a value can have whole calls. A block is read in one way
only, because a second try could find a call that the model only quoted, and a client would execute
it.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from nanovllm.server.errors import JsonObject
from nanovllm.server.parameter_values import JSON, list_parts, read_value
from nanovllm.text.chat_template import NAME
from nanovllm.text.vocabulary import END_TOOL_CALL
from nanovllm.utils.helpers import as_list

FUNCTION = "<function="
PARAMETER = "<parameter="
HEAD = re.compile(r"\s*<function=([^<>]+)>\s*(<parameter=|</function>\s*</tool_call>)")
END = re.compile(r"</function>\s*</tool_call>\Z")
TAG = re.compile(r"<parameter=|</parameter>")
# What follows the end of a parameter. Anything else shows that the value goes on. Two functions in
# a block are rejected, because a value could quote the second one.
NEXT = re.compile(r"\s*(<parameter=|</function>\s*</tool_call>|</function>\s*<function=)")
NAME_AND_VALUE = re.compile(r"([^<>\n]+)>\n?(.*?)\n?", re.DOTALL)


class Incomplete(Exception):
    """The </tool_call> at the end of the text is part of an argument."""


def read_block(text: str, schemas: dict[str, Any]) -> list[JsonObject]:
    """Return OpenAI's functions of a block up to a </tool_call>, or none if it is no call.

    `schemas` are those of the parameters of functions, by name. Raises Incomplete.
    """
    try:
        if text.lstrip().startswith(FUNCTION):
            return [_read_function(text, schemas)]
        calls = as_list(JSON.decode(text.removesuffix(END_TOOL_CALL)))
        return [_write_call(call["name"], call.get("arguments")) for call in calls]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        # json reads from left to right, so all before this string is valid.
        if isinstance(error, json.JSONDecodeError) and error.msg.startswith("Unterminated string"):
            raise Incomplete from error
        return []


def _read_function(text: str, schemas: dict[str, Any]) -> JsonObject:
    head = HEAD.match(text)
    if head is None:
        raise ValueError("no function")
    if END.search(text) is None:  # before a pass over all tags
        raise Incomplete
    name, next_tag = head.groups()
    schema = schemas.get(name)
    properties = [part.get("properties") for part in list_parts([schema], schema)]
    arguments: JsonObject = {}
    parameters = _split_parameters(text, head.end()) if next_tag == PARAMETER else ()
    for parameter in parameters:
        match = NAME_AND_VALUE.fullmatch(parameter)
        if match is None:
            raise ValueError("no parameter")
        key, value = match.groups()
        own = [each.get(key) for each in properties if isinstance(each, dict)]
        arguments[key] = read_value(value, own, schema)
    return _write_call(name, arguments)


def _split_parameters(text: str, start: int) -> Iterator[str]:
    """Yield the texts between <parameter= and </parameter>. The first one begins at `start`."""
    num_open = 1
    for tag in TAG.finditer(text, start):
        num_open = num_open + 1 if tag[0] == PARAMETER else max(0, num_open - 1)
        following = NEXT.match(text, tag.end())
        if num_open > 0 or following is None:
            continue
        yield text[start : tag.start()]
        if following[1].endswith(FUNCTION):
            raise ValueError("two functions")
        if following[1] != PARAMETER:
            return
        start = following.end()
    raise Incomplete


def _write_call(name: str, arguments: Any) -> JsonObject:
    arguments = {} if arguments is None else arguments
    if not (NAME.fullmatch(name) and isinstance(arguments, dict)):
        raise ValueError("no call")
    return {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False, allow_nan=False)}
