"""Divides the text of a reply into the fields of OpenAI's message, at its tags.

    <think>Look it up.</think> Wait. <tool_call>{"name": "find", "arguments": {}}</tool_call>
           reasoning           content                  tool_calls

Text that may be the start of a tag is held back, so no delta contains a part of one. A block
without a call is text of the section in which it stands.
"""

import re
from uuid import uuid4

from nanovllm.server.call_parser import FUNCTION, CallParser
from nanovllm.server.errors import JsonObject
from nanovllm.server.text_stream import Waiting
from nanovllm.text.chat_template import Tool
from nanovllm.text.vocabulary import END_THINK, END_TOOL_CALL, THINK, TOOL_CALL, Vocabulary

NUM_TAG_TOKENS = 24  # tokens at the end of a prompt that may be a tag and newlines


def find_last_tag(given: JsonObject, prompt: list[int], vocabulary: Vocabulary) -> str:
    """Return <think> if a prompt ends inside reasoning, </think> if it ends behind it, or "".

    The tag is the last word of the prompt. Only in a message that is continued, other words can
    follow it.
    """
    continued = ""
    if given.get("continue_final_message"):
        continued = str(given["messages"][-1].get("content"))
    end = "".join(map(vocabulary.name, prompt[-NUM_TAG_TOKENS:]))
    tags = re.findall(r"</?think>(?=\s*$)", end) + re.findall("</?think>", continued)
    return tags[-1] if tags else ""


class Delta:
    """Collects OpenAI's delta: the new text, reasoning and tool calls of a message."""

    def __init__(self, is_parallel: bool, is_after_tag: bool) -> None:
        """Unless `is_parallel`, only the first call is sent. `begin_content` sets is_after_tag."""
        self.is_parallel = is_parallel
        self.fields: JsonObject = {}
        self.num_calls = 0
        self.has_content = False
        self.is_after_tag = is_after_tag
        self.spaces = ""  # after the tag, while no word has come

    def take(self) -> JsonObject:
        """Return the delta, and begin the next one."""
        fields = self.fields
        self.fields = {}
        return fields

    def begin_content(self) -> None:
        """A tag has ended. Spaces after it are content only if words come before and after them."""
        self.is_after_tag = True

    def add_content(self, text: str) -> None:
        if self.is_after_tag:
            text = self.spaces + text if self.has_content else text.lstrip()
            is_blank = not text.strip()
            self.spaces = text if is_blank else ""
            if is_blank:
                return
            self.is_after_tag = False
        if text:
            self.add_text("content", text)
            self.has_content = True

    def add_text(self, name: str, text: str) -> None:
        self.fields[name] = self.fields.get(name, "") + text

    def add_call(self, name: str, arguments: str) -> None:
        """Add a call, or without a name more arguments of the newest call."""
        if name:
            self.num_calls += 1
        if not (name or arguments) or (self.num_calls > 1 and not self.is_parallel):
            return
        index = self.num_calls - 1
        entries = self.fields.setdefault("tool_calls", [])
        if name:
            function = {"name": name, "arguments": arguments}
            call_id = f"call_{uuid4().hex}"
            entries.append(
                {"index": index, "id": call_id, "type": "function", "function": function}
            )
        elif entries:
            entries[-1]["function"]["arguments"] += arguments
        else:
            entries.append({"index": index, "function": {"arguments": arguments}})


class MessageParser(CallParser):
    """Parses the text of one choice, which arrives in parts."""

    def __init__(
        self, parses_reasoning: bool, tools: list[Tool], is_parallel: bool, last_tag: str
    ) -> None:
        """Without tools, calls are content. `last_tag` is that of the prompt."""
        super().__init__(tools)
        self.delta = Delta(is_parallel, is_after_tag=parses_reasoning or len(tools) > 0)
        self.in_reasoning = parses_reasoning and last_tag == THINK
        # Where the reasoning begins and ends in the text. The end is set when it comes.
        self.reasoning_start = 0
        self.reasoning_end = 0
        self.may_end_reasoning = False  # after a call has, which some models write before </think>
        self.call_tags = (TOOL_CALL, FUNCTION) if tools else ()
        self.num_without_calls = 0  # characters that were searched for calls in vain
        self.in_block = False  # in a block without a call
        self.parse = self._parse(may_think=parses_reasoning)

    def feed(self, text: str, is_last: bool) -> JsonObject:
        """Return OpenAI's delta for more text. `is_last` if none follows."""
        self.text += text
        self.is_last = is_last
        next(self.parse, None)
        return self.delta.take()

    def _parse(self, may_think: bool) -> Waiting[None]:
        """Parse the reply. `may_think` if it can begin with <think>, even after the prompt's."""
        while may_think:
            start, tag = yield from self.skip(0, (THINK,))
            may_think = tag == THINK
            if may_think:
                self.take(start + len(THINK))
                self.in_reasoning = True
                self.reasoning_start = self.num_taken
        while True:
            tag = yield from self._read_text()
            if not tag:
                self._begin_content()
                return
            self.in_block = False
            if tag == END_THINK:
                self.may_end_reasoning = False
                self._begin_content()
                self.take(len(tag))
            elif tag == END_TOOL_CALL:  # the end of a block without a call
                self._add_text(len(tag))
            else:
                has_calls, end = yield from self._read_calls(tag)
                if has_calls:
                    self.take(end)
                else:
                    self.num_without_calls = end
                    self.in_block = tag == TOOL_CALL
                    self._add_text(len(tag))

    def _read_text(self) -> Waiting[str]:
        """Read up to a tag that can begin or end a section. Return "" if there is none."""
        call_tags = (TOOL_CALL, END_TOOL_CALL) if self.in_block else self.call_tags
        tags = call_tags
        if self.in_reasoning:
            tags = (END_THINK, *call_tags[:1])  # Qwen3.5 can leave out </think>
        elif self.may_end_reasoning:
            tags = (END_THINK, *call_tags)
        while True:
            position, tag = self.search(tags, 0)
            is_text = tag in call_tags and position < self.num_without_calls
            self._add_text(position + len(tag) if is_text else position)
            if is_text:
                continue
            if tag or self.is_last:
                return tag
            yield

    def _read_calls(self, tag: str) -> Waiting[tuple[bool, int]]:
        """Read the calls at a tag that can begin some, see `CallParser.read_block`."""
        if tag == TOOL_CALL:
            return (yield from self.read_block(len(tag), self.in_reasoning))
        # Some models leave out <tool_call>.
        call, end = yield from self.read_function(0, is_known=True)
        if call is None:
            return False, end
        self.send(*call)
        start, closing = yield from self.skip(end, (END_TOOL_CALL,))
        return True, start + len(END_TOOL_CALL) if closing else end

    def _begin_content(self) -> None:
        if self.in_reasoning:
            self.in_reasoning = False
            self.reasoning_end = self.num_taken
        self.delta.begin_content()

    def _add_text(self, num_chars: int) -> None:
        """Add the first characters of the stream to the section that they belong to."""
        text = self.take(num_chars)
        self.num_without_calls = max(0, self.num_without_calls - num_chars)
        if not self.in_reasoning:
            self.delta.add_content(text)
        elif text:
            self.delta.add_text("reasoning", text)

    def send(self, name: str, arguments: str) -> None:
        """Add a call to the delta, or without a name more arguments of the newest call."""
        if name:
            self.may_end_reasoning |= self.in_reasoning
            self._begin_content()
        self.delta.add_call(name, arguments)
