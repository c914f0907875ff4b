"""Divides the text of a reply into the fields of OpenAI's message, at its tags.

    <think>Look it up.</think> Wait. <tool_call>{"name": "find", "arguments": {}}</tool_call>
           reasoning           content                  tool_calls

The text is read by lexemes. The start of a tag is held back until it is clear whether it is one, so
no delta has a part of a tag. A call is sent when its block is complete. A block that begins as a
call and cannot be read is text, and nothing behind it is made a call.
"""

import re
from contextlib import suppress
from uuid import uuid4

from nanovllm.server.calls import FUNCTION, Incomplete, read_block
from nanovllm.server.errors import JsonObject
from nanovllm.text.chat_template import Tool
from nanovllm.text.vocabulary import END_THINK, END_TOOL_CALL, TAGS, THINK, TOOL_CALL

ALL_TAGS = (*TAGS, FUNCTION)
TAG_STARTS = {tag[:size] for tag in ALL_TAGS for size in range(1, len(tag))}
LEXEME = re.compile("|".join(ALL_TAGS) + r"|<|\s+|[^<\s]+")


class MessageParser:
    """Parses the text of one choice, which arrives in parts."""

    def __init__(
        self, parses_reasoning: bool, tools: list[Tool], is_parallel: bool, last_tag: str
    ) -> None:
        """Without tools, calls are content. `last_tag` is the prompt's, see find_last_tag."""
        functions = [tool["function"] for tool in tools]
        self.schemas = {each["name"]: each.get("parameters") for each in functions}
        self.reads_calls = len(tools) > 0
        self.is_parallel = is_parallel
        self.num_calls = 0
        # "undecided" behind a call within reasoning: reasoning if </think> follows, else content.
        self.section = "reasoning" if parses_reasoning and last_tag == THINK else "content"
        self.pending: list[str] = []  # undecided text, or spaces
        # What comes before the pending text: "start" if <think> can begin the reply, "tag", "word".
        self.previous = "start" if parses_reasoning else "word"
        self.has_content = False
        self.tail = ""  # the end of the text, if it may be the start of a tag
        self.block: list[str] | None = None  # lexemes after <tool_call>
        self.is_call = False  # the block has begun as a call
        self.delta: JsonObject = {}
        self.reasoning: list[str] = []  # of the whole reply, in parts

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
                self._end_block(self.block, [])
            self._settle("content" if self.section == "undecided" else self.section)
        delta = self.delta
        self.delta = {}
        for section in delta.keys() - {"tool_calls"}:
            delta[section] = "".join(delta[section])
        self.reasoning.append(delta.get("reasoning", ""))
        return delta

    def _read(self, lexeme: str) -> None:
        if self.block is not None:
            self._read_block(self.block, lexeme)
        elif lexeme == TOOL_CALL and self.reads_calls:
            self.block = []
            self.is_call = False
        elif lexeme == THINK and self.previous == "start":
            self.pending = []
            self._begin("reasoning")
        elif lexeme == END_THINK and self.section != "content":
            self._settle("reasoning")
            self._begin("content")
        else:
            self._add_text(lexeme)

    def _begin(self, section: str) -> None:
        """Begin a section behind a tag."""
        self.section = section
        self.previous = "tag"

    def _add_text(self, lexeme: str) -> None:
        self.pending.append(lexeme)
        if self.section != "undecided" and not lexeme.isspace():
            self._settle(self.section)
            self.previous = "word"

    def _settle(self, section: str) -> None:
        """Add the pending text to a section. Content has spaces beside a tag only between words."""
        text = "".join(self.pending)
        self.pending = []
        is_after_tag = self.previous == "tag"
        if is_after_tag and section == "content" and not self.has_content:
            text = text.lstrip()
        if text and not (is_after_tag and text.isspace()):
            self.delta.setdefault(section, []).append(text)
            self.has_content = section == "content"  # reasoning comes before all content

    def _read_block(self, block: list[str], lexeme: str) -> None:
        block.append(lexeme)
        if not self.is_call and not lexeme.isspace():
            self.is_call = lexeme == FUNCTION or lexeme[0] in "{["
            if not self.is_call:
                self._end_block(block, [])
        elif lexeme == END_TOOL_CALL:
            with suppress(Incomplete):
                self._end_block(block, read_block("".join(block), self.schemas))

    def _end_block(self, block: list[str], calls: list[JsonObject]) -> None:
        """Add the calls of a block, or its text if it has none."""
        self.block = None
        for call in calls:
            if self.is_parallel or self.num_calls == 0:
                entry = {"index": self.num_calls, "id": f"call_{uuid4().hex}", "type": "function"}
                self.delta.setdefault("tool_calls", []).append({**entry, "function": call})
                self.num_calls += 1
        if calls:
            self._begin("content" if self.section == "content" else "undecided")
            return
        self.reads_calls = not self.is_call
        self._add_text(TOOL_CALL)
        for lexeme in block:
            self._read(lexeme)
