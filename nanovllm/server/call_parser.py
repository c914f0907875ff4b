"""Parses tool calls in the text of a reply, in the two forms of constraints.py.

A block is the text between <tool_call> and </tool_call>: JSON objects and functions in tags. It is
a block of calls only if no other text is in it. Models forget closing tags, and write tags into
their arguments, so what follows a tag decides what it means:

    </parameter>     ends a value if another tag follows.
    <parameter=q>    ends a value if it begins a line and q is a parameter that has no value yet.
    </function>      ends a value if <tool_call>, </tool_call>, a function or nothing follows.
    </tool_call>     ends a value if no </parameter> ends it before the next <tool_call>. It ends a
                     string of JSON if no quote ends it before , : } or ].
    </think>         in reasoning, ends a value without a call.

A function ends with one of the last two tags, or where another one begins. Otherwise its text has
been cut off, and is no call.
"""

import json
import re
from contextlib import suppress
from typing import NamedTuple

from nanovllm.server.parameter_values import find_properties, write_value
from nanovllm.server.text_stream import TextStream, Waiting
from nanovllm.text.chat_template import NAME, Tool
from nanovllm.text.vocabulary import END_THINK, END_TOOL_CALL, TOOL_CALL

FUNCTION = "<function="
END_FUNCTION = "</function>"
PARAMETER = "<parameter="
END_PARAMETER = "</parameter>"
BLOCK_TAGS = (END_TOOL_CALL, TOOL_CALL)
FUNCTION_TAGS = (PARAMETER, END_FUNCTION, FUNCTION)
VALUE_TAGS = (END_PARAMETER, PARAMETER, END_FUNCTION, END_TOOL_CALL, TOOL_CALL, END_THINK)
# Between the elements of a block. Small models write lists of calls, and too many braces.
FILLER = re.compile(r"[\s,\[\]}]*")
# What matters in JSON. A tag is a token of its own.
TOKEN = re.compile(r'\\.|["{}]|</?tool_call>|<|[^"{}\\<]+', re.DOTALL)
ESCAPED = '"\\/bfnrtu'  # what can follow a backslash in JSON
CONTROL = re.compile(r"[\x00-\x1f]")  # JSON does not allow these in strings


class Call(NamedTuple):
    """A call that is complete."""

    name: str
    arguments: str  # JSON


class JsonText(NamedTuple):
    """The text of a JSON object, or its beginning if the object is not closed."""

    text: str
    end: int  # position of the text after it
    is_closed: bool


class CallParser(TextStream):
    """A stream of text in which calls are parsed. MessageParser defines what `send` does."""

    def __init__(self, tools: list[Tool]) -> None:
        super().__init__()
        self.schemas: dict[str, object] = {}  # function -> schema of its parameters
        for tool in tools:
            self.schemas[tool["function"]["name"]] = tool["function"].get("parameters") or {}

    def send(self, name: str, arguments: str) -> None:
        """Take a call. A call in JSON can come in parts, of which only the first one has a name."""
        raise NotImplementedError

    def read_block(self, start: int, in_reasoning: bool) -> Waiting[tuple[bool, int]]:
        """Read the block whose text begins at `start`.

        Returns whether it has calls, and where the text after them begins. If it has none, this is
        a position up to which no other block can begin.
        """
        calls: list[Call] = []
        start_of_rest: int | None = None  # after the calls that have been sent
        while True:
            start, tag = yield from self.skip(start, ("{", FUNCTION, *BLOCK_TAGS), FILLER)
            call: Call | None = None
            if tag == "{":
                name, start_of_arguments = yield from self._read_head(start)
                # It is certainly a call, so its arguments are sent as they arrive. In reasoning, it
                # can be an example that is not complete.
                if name and not in_reasoning:
                    for each in calls:
                        self.send(*each)
                    calls = []
                    self.send(name, "")
                    start = yield from self._send_arguments(start_of_arguments)
                    start_of_rest = start
                    continue
                call, start = yield from self._read_json(start)
            elif tag == FUNCTION:
                call, start = yield from self.read_function(start, in_reasoning)
            if call is None:
                break
            calls.append(call)
        if tag in ("", *BLOCK_TAGS) and (calls or start_of_rest is not None):
            for each in calls:
                self.send(*each)
            return True, start + len(END_TOOL_CALL) if tag == END_TOOL_CALL else start
        if start_of_rest is not None:
            return True, start_of_rest
        return False, start

    def _read_head(self, start: int) -> Waiting[tuple[str, int]]:
        """Read the name of a call in JSON, and where its arguments begin, if they come next."""
        name_start = yield from self._read_tokens(start, "{", '"name"', ":", '"')
        if name_start is None:
            return "", start
        end, quote = yield from self.find(('"', "\\"), name_start)
        name = self.text[name_start:end]
        if quote != '"' or not NAME.fullmatch(name):
            return "", start
        start_of_rest = yield from self._read_tokens(end + 1, ",", '"arguments"', ":", "{")
        return ("", start) if start_of_rest is None else (name, start_of_rest - 1)

    def _read_tokens(self, start: int, *tokens: str) -> Waiting[int | None]:
        """Return where the text after some tokens begins, or None if others come."""
        for token in tokens:
            start, found = yield from self.skip(start, (token,))
            if not found:
                return None
            start += len(token)
        return start

    def _send_arguments(self, start: int) -> Waiting[int]:
        """Send the arguments that begin at `start`. Return where the call ends."""
        arguments = yield from self._read_object(start, is_sent=True)
        start = arguments.end
        if not arguments.is_closed:
            return start
        end, more = yield from self.skip(start, (",", "}"))
        if more == "}":
            return end + 1
        if more == ",":  # other keys
            others = yield from self._read_object(end, depth=1)
            if others.is_closed:
                return others.end
        return start

    def _read_json(self, start: int) -> Waiting[tuple[Call | None, int]]:
        """Read a call whose keys come in another order."""
        whole = yield from self._read_object(start)
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            call = json.loads(whole.text)
            name = call["name"]
            arguments = call["arguments"] or {}
            if isinstance(arguments, dict):
                arguments = json.dumps(arguments, allow_nan=False)
            # Some models write the arguments as a str of JSON.
            if NAME.fullmatch(name) and isinstance(arguments, str):
                return Call(name, arguments), whole.end
        return None, whole.end

    def _read_object(self, start: int, depth: int = 0, is_sent: bool = False) -> Waiting[JsonText]:
        """Read a JSON object from `start`, which is within `depth` objects. Escape newlines in it.

        If `is_sent`, send its text as arguments instead of returning it.
        """
        pieces: list[str] = []
        in_string = False
        tag_start: int | None = None  # a tag in a string that has not ended since
        held: list[str] = []  # from the tag on

        def finish(end: int, is_closed: bool) -> JsonText:
            text = "".join(pieces)
            if is_sent:
                self.send("", text)
            return JsonText(text, end, is_closed)

        while True:
            match = TOKEN.match(self.text, start)
            if match is None or (match[0] == "<" and self.may_begin(BLOCK_TAGS, start)):
                if self.is_last and tag_start is not None:
                    return finish(tag_start, False)
                if self.is_last:
                    pieces.append(self.text[start:])  # perhaps half an escape
                    return finish(len(self.text), False)
                if is_sent:
                    self.send("", "".join(pieces))
                    pieces.clear()
                yield
                continue
            token = match[0]
            if token in BLOCK_TAGS:
                if not in_string:
                    return finish(start, False)
                if tag_start is None:
                    tag_start = start
            start = match.end()
            if token == '"':
                in_string = not in_string
                if tag_start is not None:
                    _, found = yield from self.skip(start, (",", ":", "}", "]"))
                    if found is None:  # this quote begins another string, of the next call
                        return finish(tag_start, False)
                    tag_start = None
                    pieces += held
                    held = []
            elif token[0] == "\\" and token[1] not in ESCAPED:
                token = "\\" + token  # such as in a Windows path
            elif in_string:
                token = CONTROL.sub(lambda control: json.dumps(control[0])[1:-1], token)
            elif token == "{":
                depth += 1
            elif token == "}":
                depth -= 1
            (pieces if tag_start is None else held).append(token)
            if depth == 0:
                return finish(start, True)

    def read_function(
        self, start: int, in_reasoning: bool = False, is_known: bool = False
    ) -> Waiting[tuple[Call | None, int]]:
        """Read a function in tags, and return where it ends.

        If `is_known`, it must be one of the tools.
        """
        name, start = yield from self._read_name(start + len(FUNCTION))
        if not NAME.fullmatch(name) or (is_known and name not in self.schemas):
            return None, start
        schema = self.schemas.get(name)
        properties = find_properties(schema)
        values: dict[str, str] = {}
        arguments = ""
        tags = (PARAMETER, END_FUNCTION, *BLOCK_TAGS)
        start, tag = yield from self.skip(start, ("{", *tags))
        if tag == "{":
            whole = yield from self._read_object(start)
            try:
                arguments = json.dumps(json.loads(whole.text), allow_nan=False)
            except (ValueError, RecursionError):
                return None, whole.end
            start, tag = yield from self.skip(whole.end, tags[1:])
        while tag == PARAMETER:
            key, start = yield from self._read_name(start + len(PARAMETER))
            if not key or key in values:
                return None, start
            missing = properties.keys() - values.keys() - {key}
            text, start, tag = yield from self._read_value(start, missing, in_reasoning)
            text = text.removeprefix("\n").removesuffix("\n")
            values[key] = write_value(text, properties.get(key), schema)
        if tag == END_FUNCTION:
            start += len(END_FUNCTION)
        elif not tag:
            return None, start
        written = ", ".join(f"{json.dumps(key)}: {value}" for key, value in values.items())
        return Call(name, arguments or f"{{{written}}}"), start

    def _read_name(self, start: int) -> Waiting[tuple[str, int]]:
        """Read a name up to the end of its tag. Some models quote it."""
        end, tag = yield from self.find((">", "<", "\n"), start)
        name = self.text[start:end].strip("\"' ")
        return (name, end + 1) if tag == ">" else ("", end)

    def _read_value(
        self, start: int, missing: set[str], in_reasoning: bool
    ) -> Waiting[tuple[str, int, str | None]]:
        """Read a value. Return it, and the position and the tag of what follows it.

        The tag is None if the value does not end. `missing` are parameters without a value.
        """
        position = start
        closing: int | None = None  # a </tool_call> that ends the value unless </parameter> does
        depth = 0  # open blocks in the value
        quoted_depth = 0  # depth of the first block in the value with a function in tags
        while True:
            position, tag = yield from self.find(VALUE_TAGS, position)
            after = position + len(tag)
            if quoted_depth and tag in (PARAMETER, END_PARAMETER, END_FUNCTION):
                pass  # of the function in the value
            elif tag == END_PARAMETER:
                end, next_tag = yield from self.skip(after, (*FUNCTION_TAGS, *BLOCK_TAGS))
                if next_tag is not None:
                    return self.text[start:position], end, next_tag
            elif tag == END_FUNCTION:
                _, next_tag = yield from self.skip(after, (FUNCTION, *BLOCK_TAGS))
                if next_tag is not None:
                    return self.text[start:position], position, tag
            elif tag == PARAMETER:
                name, _ = yield from self._read_name(after)
                line_start = self.text.rfind("\n", start, position)
                is_at_start = line_start >= 0 and not self.text[line_start:position].strip()
                if is_at_start and name in missing:
                    return self.text[start:position], position, tag
            elif tag == END_TOOL_CALL:
                if depth == 0 and closing is None:
                    closing = position
                depth = max(0, depth - 1)
                if depth < quoted_depth:
                    quoted_depth = 0
            elif tag == TOOL_CALL and closing is None:
                depth += 1
                _, function = yield from self.skip(after, (FUNCTION,))
                if function and not quoted_depth:
                    quoted_depth = depth
            elif tag in (TOOL_CALL, "") and closing is not None:
                return self.text[start:closing], closing, END_TOOL_CALL
            elif tag == "" or (tag == END_THINK and in_reasoning):
                return "", position, None
            position = after
