"""Tool calls in the text of a reply, in either of the two forms of constraints.py.

    block         <tool_call> (object | list of objects | function) </tool_call>
    object        {"name": name, "arguments": {...}}, where null or no arguments are {}
    function      <function=name> parameter* </function>
    parameter     <parameter=name> value </parameter>

The end of a block is found before the block is read, because tags in its arguments are text. With
JSON it is the first </tool_call> outside of a string. A function ends at the first
</parameter></function></tool_call> at which all parameters are closed. The tags of parameters are
counted, so a value can have whole calls. A block is read in one way only, because a second try
could find a call that the model only quoted, and a client would execute it.
"""

import json
import re
from typing import Any

from nanovllm.server.errors import JsonObject
from nanovllm.server.parameter_values import JSON, list_parts, read_value
from nanovllm.text.chat_template import NAME
from nanovllm.text.vocabulary import END_TOOL_CALL
from nanovllm.utils.helpers import as_list

FUNCTION = "<function="
END_FUNCTION = "</function>"
PARAMETER = "<parameter="
END_PARAMETER = "</parameter>"
# The tags behind the last parameter. Two functions in a block are rejected, because a value could
# quote the second one.
ENDS = ([END_FUNCTION, END_TOOL_CALL], [END_FUNCTION, FUNCTION])
NEXT = r"\s*(?:<parameter=|</function>\s*</tool_call>)\Z"
HEAD = re.compile(r"\A\s*<function=([^<>]+)>" + NEXT)  # a function up to its first parameter
REST_OF_PARAMETER = re.compile(r"\A([^<>\n]+)>\n?(.*)</parameter>" + NEXT, re.DOTALL)
# The state of a scanner of JSON, and a lexeme, to the next state: "" outside of strings, '"' in a
# string, and "\\" behind a backslash.
STRINGS = {("", '"'): '"', ('"', '"'): "", ('"', "\\"): "\\"}


class Block:
    """A block whose text arrives by lexemes. Each of them is looked at once."""

    def __init__(self) -> None:
        self.parts: list[list[str]] = [[]]  # lexemes; <parameter= of a parameter ends a part
        self.form = ""  # the first lexeme, if the block has begun as a call
        self.string = ""  # a state of STRINGS
        self.num_open = 0  # parameters
        self.newest: list[str] = []  # lexemes since the name, or since all parameters were closed

    def add(self, lexeme: str) -> bool:
        """Add the next lexeme. Return whether the block ends with it, or cannot be a call."""
        self.parts[-1].append(lexeme)
        if lexeme.isspace():
            return False
        if not self.form and lexeme != FUNCTION and lexeme[0] not in "{[":
            return True
        self.form = self.form or lexeme
        if self.form == FUNCTION:
            return self._ends_function(lexeme)
        self.string = STRINGS.get((self.string, lexeme), self.string and '"')
        return self.string == "" and lexeme == END_TOOL_CALL

    def _ends_function(self, lexeme: str) -> bool:
        if lexeme == PARAMETER:
            if not self.newest:
                self.parts.append([])
            self.num_open += 1
        elif lexeme == END_PARAMETER:
            self.num_open = max(0, self.num_open - 1)
        is_in_head = len(self.parts) == 1 and not lexeme.startswith("<")
        if is_in_head or (lexeme == END_PARAMETER and self.num_open == 0):
            self.newest = []
        else:
            self.newest = [*self.newest[:2], lexeme]
        return self.newest in ENDS

    def read(self, schemas: dict[str, Any]) -> list[JsonObject]:
        """Return OpenAI's functions of a block that has ended, or none if it has another form.

        `schemas` are those of the parameters of functions, by name.
        """
        head, *parameters = ["".join(part) for part in self.parts]
        try:
            if self.form != FUNCTION:
                calls = as_list(JSON.decode(head.removesuffix(END_TOOL_CALL)))
                return [_write_call(call["name"], call.get("arguments")) for call in calls]
            (name,) = HEAD.findall(head)
            texts = dict([REST_OF_PARAMETER.findall(text)[0] for text in parameters])
            schema = schemas.get(name)
            properties = [part.get("properties") for part in list_parts([schema], schema)]
            arguments: JsonObject = {}
            for key, text in texts.items():
                own = [each.get(key) for each in properties if isinstance(each, dict)]
                arguments[key] = read_value(text.removesuffix("\n"), own, schema)
            return [_write_call(name, arguments)]
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            return []


def _write_call(name: str, arguments: Any) -> JsonObject:
    arguments = {} if arguments is None else arguments
    if not (NAME.fullmatch(name) and isinstance(arguments, dict)):
        raise ValueError("no call")
    return {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False, allow_nan=False)}
