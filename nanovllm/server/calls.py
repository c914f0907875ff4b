"""Tool calls in the text of a reply, in either of the two forms of constraints.py.

    block         <tool_call> (object | list of objects | function) </tool_call>
    object        {"name": name, "arguments": {...}}, where null or no arguments are {}
    function      <function=name> parameter* </function>
    parameter     <parameter=name> value </parameter>

The end of a block is found before the block is read, because tags in its arguments are text. With
JSON it is the first </tool_call> outside of a string. A function ends at the first
</parameter></function></tool_call> at which all parameters are closed. The tags of parameters are
counted, so a value can have whole calls. There is no second way to read a block, because a client
would execute a call that the model only quoted.
"""

import json
import re
from typing import Any

from nanovllm.server.errors import JsonObject
from nanovllm.server.parameter_values import JSON, list_parts, read_value
from nanovllm.text.chat_template import NAME
from nanovllm.utils.helpers import as_list

BLOCK = "<tool_call>"
END_BLOCK = "</tool_call>"
FUNCTION = "<function="
PARAMETER = "<parameter="
END_PARAMETER = "</parameter>"
TAGS = (
    "<think> </think> <tool_call> </tool_call> <function= </function> <parameter= </parameter>"
).split()
# The end of a function without parameters, and of one with parameters. A second function in the
# block is not served, because a value could quote it.
ENDS = (
    "</function></tool_call>",
    ("</parameter></function></tool_call>", "</parameter></function><function="),
)
# The text up to the name of the first parameter, or a whole block without parameters.
HEAD = re.compile(
    r"\A<tool_call>\s*<function=([^<>]+)>\s*(?:<parameter=|</function>\s*</tool_call>)\Z"
)
REST_OF_PARAMETER = re.compile(r"\A([^<>\n]+)>\n?(.*)</parameter>", re.DOTALL)
# Where a lexeme leads from a place in JSON: "" is outside of strings, '"' in one, and "\\" in one
# behind a backslash.
PLACES = {("", '"'): '"', ('"', '"'): "", ('"', "\\"): "\\"}


class Block:
    """A block whose text arrives by lexemes. Each of them is looked at once."""

    def __init__(self) -> None:
        self.parts = [[BLOCK]]  # lexemes; <parameter= of a parameter ends a part
        self.form = ""  # the first lexeme inside, if the block has begun as a call
        self.is_complete = False
        self.place = ""  # a value of PLACES
        self.num_open = 0  # parameters
        self.end = ""  # the newest lexemes, without spaces

    def add(self, lexeme: str) -> bool:
        """Add the next lexeme. Return whether the block ends with it, or cannot be a call."""
        self.parts[-1].append(lexeme)
        if lexeme.isspace():
            return False
        if not self.form and lexeme != FUNCTION and lexeme[0] not in "{[":
            return True
        self.form = self.form or lexeme
        if self.form == FUNCTION:
            ends = self._ends_function(lexeme)
        else:
            self.place = PLACES.get((self.place, lexeme), self.place and '"')
            ends = self.place == "" and lexeme == END_BLOCK
        self.is_complete = ends and lexeme == END_BLOCK
        return ends

    def _ends_function(self, lexeme: str) -> bool:
        has_parameters = len(self.parts) > 1
        can_begin = self.num_open == 0 and (not has_parameters or self.end.endswith(END_PARAMETER))
        self.end = (self.end + lexeme)[-40:]
        if lexeme == PARAMETER:
            if can_begin:
                self.parts.append([])
            self.num_open += 1
        elif lexeme == END_PARAMETER:
            self.num_open = max(0, self.num_open - 1)
        return self.num_open == 0 and self.end.endswith(ENDS[has_parameters])

    def read(self, schemas: dict[str, Any]) -> list[JsonObject]:
        """Return OpenAI's functions of the calls, or none if the block has another form.

        `schemas` are those of the parameters of functions, by name.
        """
        head, *parameters = ["".join(part) for part in self.parts]
        try:
            if not self.is_complete:
                return []
            if self.form != FUNCTION:
                calls = as_list(JSON.decode(head.removeprefix(BLOCK).removesuffix(END_BLOCK)))
                return [_write_call(call["name"], call.get("arguments")) for call in calls]
            (name,) = HEAD.findall(head)
            schema = schemas.get(name)
            properties = [part.get("properties") for part in list_parts([schema], schema)]
            arguments: JsonObject = {}
            for parameter in parameters:
                ((key, text),) = REST_OF_PARAMETER.findall(parameter)
                own = [each.get(key) for each in properties if isinstance(each, dict)]
                arguments[key] = read_value(text.removesuffix("\n"), own, schema)
            return [_write_call(name, arguments)]
        except (ValueError, TypeError, KeyError, RecursionError):
            return []


def _write_call(name: str, arguments: Any) -> JsonObject:
    arguments = {} if arguments is None else arguments
    if not (NAME.fullmatch(name) and isinstance(arguments, dict)):
        raise ValueError("no call")
    return {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False, allow_nan=False)}
