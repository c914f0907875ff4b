"""Divides the text of a reply into the fields of OpenAI's message, at its tags.

    <think>Look it up.</think> Wait. <tool_call>{"name": "find", "arguments": {}}</tool_call>
           reasoning           content                  tool_calls

Text that may be the start of a tag is held back, so no delta contains a part of one. A call is sent
when it is complete. A block that is no call is text of the section in which it stands.
"""

import re
from uuid import uuid4

from nanovllm.server.calls import END_FUNCTION, FUNCTION, Call, read_calls
from nanovllm.server.errors import JsonObject
from nanovllm.server.text_stream import TextStream, Waiting
from nanovllm.text.chat_template import Tool
from nanovllm.text.vocabulary import END_THINK, END_TOOL_CALL, THINK, TOOL_CALL, Vocabulary

NUM_TAG_TOKENS = 24  # tokens at the end of a prompt that may be a tag and newlines
MAX_ENDS = 8  # tags in a block that are tried as its end, because models can repeat tags forever


def find_last_tag(given: JsonObject, prompt: list[int], vocabulary: Vocabulary) -> str:
    """Return <think> if a prompt ends inside reasoning, </think> if it ends behind it, or "".

    The tag is the last word of the prompt. Only in a message that is continued, other words can
    follow it.
    """
    end = "".join(map(vocabulary.name, prompt[-NUM_TAG_TOKENS:]))
    tags = re.findall(r"</?think>(?=\s*$)", end)
    if given.get("continue_final_message"):
        tags += re.findall("</?think>", str(given["messages"][-1].get("content")))
    return tags[-1] if tags else ""


class MessageParser(TextStream):
    """Parses the text of one choice, which arrives in parts."""

    def __init__(
        self, parses_reasoning: bool, tools: list[Tool], is_parallel: bool, last_tag: str
    ) -> None:
        """Without tools, calls are content. `last_tag` is that of the prompt."""
        super().__init__()
        functions = [tool["function"] for tool in tools]
        self.schemas = {each["name"]: each.get("parameters") for each in functions}
        self.call_tags: tuple[str, ...] = ()
        if tools:  # some models leave out <tool_call>
            self.call_tags = (TOOL_CALL, *[f"{FUNCTION}{name}>" for name in self.schemas])
        self.is_parallel = is_parallel
        self.num_calls = 0
        self.in_reasoning = parses_reasoning and last_tag == THINK
        self.reasoning = ""
        self.has_content = False
        # Spaces beside a tag are content only if words come before and after them.
        self.is_after_tag = parses_reasoning or len(tools) > 0
        self.spaces = ""
        self.delta: JsonObject = {}
        self.steps = self._parse(parses_reasoning)

    def feed(self, text: str, is_last: bool) -> JsonObject:
        """Return OpenAI's delta for more text. `is_last` if none follows."""
        self.text += text
        self.is_last = is_last
        next(self.steps, None)
        delta = self.delta
        self.delta = {}
        return delta

    def _parse(self, parses_reasoning: bool) -> Waiting[None]:
        if parses_reasoning:  # the model can write <think> even after the prompt has
            start, tag = yield from self.skip(0, (THINK,))
            if tag:
                self.take(start + len(tag))
                self.in_reasoning = True
        while True:
            tags = (END_THINK, *self.call_tags) if self.in_reasoning else self.call_tags
            position, tag = self.search(tags, 0)
            self._add_text(position)
            if tag == END_THINK:
                self._end_section(len(tag))
            elif tag:
                calls, end = yield from self._read_block(tag)
                if calls:
                    yield from self._add_calls(calls, end)
                else:
                    self._add_text(end)
            elif self.is_last:
                return
            else:
                yield

    def _read_block(self, tag: str) -> Waiting[tuple[list[Call], int]]:
        """Read the block that begins with a tag. Return its calls, if it has nothing else.

        The position is that of the text after the block.
        """
        start = len(tag)
        ends: tuple[str, ...] = (END_TOOL_CALL, TOOL_CALL)  # models forget the first one
        if tag != TOOL_CALL:
            start = 0
            ends = (END_FUNCTION,)
        if self.in_reasoning:
            ends += (END_THINK,)
        _, first = yield from self.skip(start, ("{", "[", FUNCTION))
        if not first:
            return [], len(tag)
        first_end, end = yield from self.find(ends, len(tag))
        position = first_end
        for _ in range(MAX_ENDS):
            after = position + len(end)
            calls = read_calls(self.text[start : after if start == 0 else position], self.schemas)
            if calls:
                return calls, position if end == TOOL_CALL else after
            if end in ("", END_THINK):
                break
            position, end = yield from self.find(ends, after)
        return [], first_end

    def _add_calls(self, calls: list[Call], end: int) -> Waiting[None]:
        was_in_reasoning = self.in_reasoning
        self._end_section(end)
        for call in calls:
            self.num_calls += 1
            if self.num_calls == 1 or self.is_parallel:
                entry = {
                    "index": self.num_calls - 1,
                    "id": f"call_{uuid4().hex}",
                    "type": "function",
                    "function": call._asdict(),
                }
                self.delta.setdefault("tool_calls", []).append(entry)
        # Models leave out </think>, or write it after calls.
        tags = (END_THINK, END_TOOL_CALL) if was_in_reasoning else (END_TOOL_CALL,)
        position, tag = yield from self.skip(0, tags)
        if tag:
            self.take(position + len(tag))

    def _end_section(self, end: int) -> None:
        self.take(end)
        self.in_reasoning = False
        self.is_after_tag = True

    def _add_text(self, num_chars: int) -> None:
        """Add the first characters of the stream to the section that they belong to."""
        text = self.take(num_chars)
        name = "reasoning" if self.in_reasoning else "content"
        if self.in_reasoning:
            self.reasoning += text
        elif self.is_after_tag:
            self.spaces += text
            if not self.spaces.strip():
                return
            text = self.spaces if self.has_content else self.spaces.lstrip()
            self.spaces = ""
            self.is_after_tag = False
            self.has_content = True
        if text:
            self.delta[name] = self.delta.get(name, "") + text
