"""Tool calls: which ones a request allows, and how the text of a reply is parsed.

A call is written as in the chat templates of Qwen3 and Hermes, or as in that of Qwen3.5:

    <tool_call>                                                <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}    <function=get_weather>
    </tool_call>                                               <parameter=city>
                                                               Paris
                                                               </parameter>
                                                               </function>
                                                               </tool_call>

Where a call is required, a grammar makes any model write the first form.
"""

import json
import re
from contextlib import suppress
from uuid import uuid4

from nanovllm.checks import invalid, show
from nanovllm.engine.schemas import relax, write_schema
from nanovllm.messages import Tool, check_tools
from nanovllm.server.errors import JsonObject

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
# Everything before the arguments, whose text can then be sent as it arrives.
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')
MAX_HEAD = 1000  # characters
# What ends strings and objects, and the text between. A newline ends a string, because JSON does
# not allow it there.
TOKEN = re.compile(r'\\.|["\n{}]|[^"\n{}\\]+', re.DOTALL)
# As json.dumps and templates write JSON. Small models can repeat optional spaces forever.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# A function takes only the arguments that its schema names. Parts of a combination can name more.
OBJECT = {"type": "object", "additionalProperties": False}
COMBINATIONS = {"$ref", "allOf", "anyOf", "oneOf"}


def choose_tools(given: JsonObject) -> tuple[list[Tool], list[Tool]]:
    """Return the tools of a request that the model is shown, and those of which it must call one.

    Raises ValueError that names the parameter at fault.
    """
    choice = given.get("tool_choice", "auto")
    tools = given.get("tools", [])
    if tools != []:
        check_tools(tools)
    required: list[Tool] = []
    for tool in tools:
        named = {"type": "function", "function": {"name": tool["function"]["name"]}}
        if choice in ("required", named):
            required.append(tool)
    if choice not in ("none", "auto") and not required:
        meaning = "'none' or 'auto', or with tools 'required' or the name of one"
        raise invalid("tool_choice", f"must be {meaning}, not {show(choice)}")
    return [] if choice == "none" else tools, required


def write_grammar(tools: list[Tool], is_parallel: bool, is_lenient: bool = False) -> str:
    """Write a grammar, in llguidance's variant of Lark, of a call of one of `tools`, or of more.

    If it `is_lenient`, unsupported keys of all schemas are ignored.
    """
    style = {**JSON_STYLE, "lenient": is_lenient}
    calls: list[str] = []
    for tool in tools:
        function = tool["function"]
        head = f'{OPENING}\n{{"name": "{function["name"]}", "arguments": '
        parameters = function.get("parameters") or {}
        defaults = {} if COMBINATIONS & parameters.keys() else OBJECT
        if True not in (function.get("strict"), tool.get("strict")):
            parameters = relax(parameters)
        schema = write_schema({**defaults, **parameters, "x-guidance": style}, {})
        tail = f"}}\n{CLOSING}"
        calls.append(f"{json.dumps(head)} %json {schema} {json.dumps(tail)}")
    more = ' ("\\n" call)*' if is_parallel else ""
    return f"start: call{more}\ncall: {' | '.join(calls)}"


def list_strings(tools: list[Tool]) -> set[tuple[str, str]]:
    """List the functions and parameters whose values can be of type string."""
    strings: set[tuple[str, str]] = set()
    for tool in tools:
        function = tool["function"]
        properties = (function.get("parameters") or {}).get("properties")
        for name, schema in properties.items() if isinstance(properties, dict) else ():
            with suppress(TypeError, AttributeError, RecursionError):  # for an invalid schema
                if allows_string(schema):
                    strings.add((function["name"], name))
    return strings


def allows_string(schema: JsonObject) -> bool:
    """Return whether a value can be a string."""
    types = schema.get("type", ())
    parts = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return (
        types == "string"
        or "string" in list(types)
        or any(isinstance(value, str) for value in schema.get("enum", ()))
        or any(allows_string(part) for part in parts)
    )


class CallParser:
    """Parses the text of one call, which arrives in parts.

    `strings` are the parameters of type string. Qwen3.5 writes these without quotes.
    """

    def __init__(self, index: int, strings: set[tuple[str, str]]) -> None:
        self.index = index  # among the calls of the reply
        self.strings = strings
        self.text = ""
        self.num_scanned = 0  # characters
        self.in_string = False  # whether the text ends within a string of an object
        self.depth = 0  # nesting depth of objects
        self.end: int | None = None  # where the first nested object ends, which is the arguments
        self.is_sent = False  # whether the name was sent, after which the text is a call
        self.num_sent = 0  # characters of the arguments

    def add(self, text: str) -> None:
        """Add more text."""
        self.text += text
        for match in TOKEN.finditer(self.text, self.num_scanned):
            self.num_scanned = match.end()
            match match[0]:
                case "\n":
                    self.in_string = False  # JSON does not allow it there, so a quote is missing
                case '"':
                    self.in_string = not self.in_string and self.depth > 0
                case "{" if not self.in_string:
                    self.depth += 1
                case "}" if not self.in_string:
                    self.depth -= 1
                    if self.depth == 1 and self.end is None:
                        self.end = match.end()

    def take_delta(self, is_complete: bool) -> JsonObject | None:
        """Return OpenAI's delta for new text, or None if there is nothing to send."""
        parsed = self._parse(is_complete)
        if parsed is None or (self.is_sent and len(parsed[1]) == self.num_sent):
            return None
        name, arguments = parsed
        function = {"arguments": arguments[self.num_sent :]}
        self.num_sent = len(arguments)
        delta: JsonObject = {"index": self.index, "function": function}
        if not self.is_sent:
            self.is_sent = True
            function["name"] = name
            delta |= {"id": f"call_{uuid4().hex}", "type": "function"}
        return delta

    def _parse(self, is_complete: bool) -> tuple[str, str] | None:
        """Return the name and the arguments as far as they are known."""
        head = HEAD.match(self.text, 0, MAX_HEAD)
        if head is not None:
            return head[1], self.text[head.end() : self.end]
        if is_complete:  # perhaps in another order
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                call, _ = json.JSONDecoder().raw_decode(self.text.lstrip())
                arguments = call["arguments"] or {}
                if not isinstance(arguments, str):  # some models write a str of JSON
                    arguments = json.dumps(arguments, allow_nan=False)
                if isinstance(call["name"], str):
                    return call["name"], arguments
            with suppress(RecursionError):
                return self._parse_tags()
        return None

    def _parse_tags(self) -> tuple[str, str] | None:
        """Parse a call as Qwen3.5 writes it."""
        head, _, body = self.text.strip().partition(">")
        if not head.startswith("<function=") or not body.endswith("</function>"):
            return None
        function = head.removeprefix("<function=")
        arguments: JsonObject = {}
        for part in body.split("<parameter=")[1:]:
            name, _, rest = part.partition(">")
            text = rest.rpartition("</parameter>")[0].removeprefix("\n").removesuffix("\n")
            arguments[name] = text
            if (function, name) not in self.strings:
                with suppress(ValueError, RecursionError):  # a str, if it is not JSON
                    value = json.loads(text)
                    json.dumps(value, allow_nan=False)
                    arguments[name] = value
        return function, json.dumps(arguments)
