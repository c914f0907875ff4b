"""Divides the text of a reply into the fields of OpenAI's message, at its tags.

    <think>Look it up.</think> Wait. <tool_call>{"name": "find", "arguments": {}}</tool_call>
           reasoning           content                  tool_calls

The text is read by lexemes, each of them once. The start of a tag is held back until it is clear
whether it is one, so no delta has a part of a tag. A call is sent when its block is complete. A
block that begins as a call and cannot be read is text, and nothing behind it is made a call.
"""

import re
from itertools import chain
from uuid import uuid4

from nanovllm.server.calls import BLOCK, TAGS, Block
from nanovllm.server.errors import JsonObject
from nanovllm.text.chat_template import Tool
from nanovllm.text.vocabulary import END_THINK, THINK

TAG_STARTS = {tag[:size] for tag in TAGS for size in range(1, len(tag))}
# A tag, a sign that matters in JSON, spaces, or other text.
LEXEME = re.compile("|".join(TAGS) + r'|["\\<]|\s+|[^"\\<\s]+')


class MessageParser:
    """Parses the text of one choice, which arrives in parts."""

    def __init__(
        self, parses_reasoning: bool, tools: list[Tool], is_parallel: bool, last_tag: str
    ) -> None:
        """Without tools, calls are content. `last_tag` is that of the prompt."""
        functions = [tool["function"] for tool in tools]
        self.schemas = {each["name"]: each.get("parameters") for each in functions}
        self.reads_calls = len(tools) > 0
        self.is_parallel = is_parallel
        self.num_calls = 0
        self.may_think = parses_reasoning  # <think> can begin a reply, even if the prompt has it
        # "undecided" behind a call within reasoning: reasoning if </think> follows, else content.
        self.section = "reasoning" if parses_reasoning and last_tag == THINK else "content"
        self.pending: list[str] = []  # undecided text, or spaces
        self.is_after_tag = False
        self.has_content = False
        self.tail = ""  # of the text that was fed, if it may be the start of a tag
        self.block: Block | None = None
        self.delta: JsonObject = {}

    def feed(self, text: str, is_last: bool) -> JsonObject:
        """Return OpenAI's delta for more text. `is_last` if none follows."""
        text = self.tail + text
        end = text.rfind("<")
        if is_last or text[end:] not in TAG_STARTS:
            end = len(text)
        self.tail = text[end:]
        for lexeme in LEXEME.findall(text[:end]):
            self._read(lexeme)
        if is_last:
            if self.block is not None:
                self._end_block(self.block)
            if self.section == "undecided":
                self.section = "content"
            self._settle()
        delta = self.delta
        self.delta = {}
        for section in delta.keys() - {"tool_calls"}:
            delta[section] = "".join(delta[section])
        return delta

    def _read(self, lexeme: str) -> None:
        if self.block is not None:
            if self.block.add(lexeme):
                self._end_block(self.block)
        elif lexeme == BLOCK and self.reads_calls:
            self.block = Block()
        elif lexeme == THINK and self.may_think:
            self.pending = []
            self._pass_tag("reasoning")
        elif lexeme == END_THINK and self.section != "content":
            self.section = "reasoning"
            self._settle()
            self._pass_tag("content")
        else:
            self._add_text(lexeme)

    def _pass_tag(self, section: str) -> None:
        self.section = section
        self.is_after_tag = True
        self.may_think = False

    def _add_text(self, lexeme: str) -> None:
        self.pending.append(lexeme)
        if self.section != "undecided" and not lexeme.isspace():
            self._settle()
            self.is_after_tag = False
            self.may_think = False

    def _settle(self) -> None:
        """Add the pending text to its section. Spaces beside a tag are text only between words."""
        text = "".join(self.pending)
        self.pending = []
        if self.is_after_tag and self.section == "content" and not self.has_content:
            text = text.lstrip()
        if text and not (self.is_after_tag and text.isspace()):
            self.delta.setdefault(self.section, []).append(text)
            self.has_content = self.section == "content"

    def _end_block(self, block: Block) -> None:
        """Add the calls of a block, or its text if it has none."""
        self.block = None
        calls = block.read(self.schemas)
        for call in calls:
            if self.is_parallel or self.num_calls == 0:
                entry = {"index": self.num_calls, "id": f"call_{uuid4().hex}", "type": "function"}
                self.delta.setdefault("tool_calls", []).append({**entry, "function": call})
                self.num_calls += 1
        if calls:
            self._pass_tag("content" if self.section == "content" else "undecided")
            return
        self.reads_calls = not block.form
        first, *others = chain(*block.parts)
        self._add_text(first)
        for lexeme in others:
            self._read(lexeme)
