"""Divides the text of a reply at its tags.

    <think>Look it up.</think> Wait. <tool_call>{"name": "find", "arguments": {}}</tool_call>
           reasoning           content                  tool_calls

Text that may be the start of a tag is held back, so no delta contains a part of one.
"""

from nanovllm.messages import Tool
from nanovllm.server.errors import JsonObject
from nanovllm.server.tools import CLOSING, OPENING, CallParser, list_strings

THINK = "<think>"
SECTIONS = {THINK: "reasoning", OPENING: "tool_calls"}  # within content
CLOSINGS = {"reasoning": "</think>", "tool_calls": CLOSING}  # content follows


class MessageParser:
    """Parses the text of one choice, which arrives in parts."""

    def __init__(
        self, parses_reasoning: bool, tools: list[Tool], is_parallel: bool, prompt: str
    ) -> None:
        """Without tools, calls are content. A prompt that ends with <think> begins reasoning."""
        tags = [THINK] if parses_reasoning else []
        if tools:
            tags.append(OPENING)
        self.sections = {tag: SECTIONS[tag] for tag in tags}
        self.strings = list_strings(tools)
        is_reasoning = THINK in tags and prompt.rstrip().endswith(THINK)
        self.section = "reasoning" if is_reasoning else "content"
        self.is_parallel = is_parallel
        self.calls: list[CallParser] = []
        self.has_content = False
        # Spaces after a tag. They are content if words come before and after them.
        self.spaces: str | None = "" if tags else None
        self.held_back = ""  # may be the start of a tag

    def feed(self, text: str, is_last: bool) -> JsonObject:
        """Return OpenAI's delta for more text. `is_last` if none follows."""
        self.held_back += text
        delta: JsonObject = {}
        while True:
            section = self.section
            part, tag = self._split(is_last)
            if section == "tool_calls":
                self._add_call(delta, part, tag, is_last)
            else:
                self._add_text(delta, part, section)
            if not tag:
                return delta
            self.spaces = self.spaces or ""
            if tag == OPENING:
                self.calls.append(CallParser(len(self.calls), self.strings))

    def _split(self, is_last: bool) -> tuple[str, str]:
        """Take the text before the next tag, and the tag, which begins another section."""
        text = self.held_back
        sections = self.sections
        if self.section != "content":
            sections = {CLOSINGS[self.section]: "content"}
            if self.section == "reasoning" and OPENING in self.sections:
                sections[OPENING] = "tool_calls"  # Qwen3.5 can leave out </think>
        elif not THINK.startswith(text.lstrip()[: len(THINK)]):
            sections.pop(THINK, None)  # reasoning comes first
        starts = [(text.find(tag), tag) for tag in sections if tag in text]
        end, next_tag = min(starts, default=(len(text), ""))
        if not starts and not is_last:
            heads = [tag[:size] for tag in sections for size in range(len(tag))]
            end -= max((len(head) for head in heads if text.endswith(head)), default=0)
        self.held_back = text[end + len(next_tag) :]
        self.section = sections.get(next_tag, self.section)
        return text[:end], next_tag

    def _add_text(self, delta: JsonObject, text: str, section: str) -> None:
        if section == "content" and self.spaces is not None:
            text = self.spaces + text if self.has_content else text.lstrip()
            if not text.strip():
                self.spaces = text
                return
        if not text:
            return
        self.spaces = None
        self.has_content |= section == "content"
        delta[section] = delta.get(section, "") + text

    def _add_call(self, delta: JsonObject, text: str, tag: str, is_last: bool) -> None:
        call = self.calls[-1]
        call.add(text)
        if tag and call.in_string:  # the tag is text of an argument
            call.add(tag)
            self.section = "tool_calls"
            return
        is_complete = tag != "" or is_last
        entry = call.take_delta(is_complete)
        if entry is not None and (self.is_parallel or call.index == 0):
            delta.setdefault("tool_calls", []).append(entry)
        if is_complete and call.num_sent is None:  # not a call
            self.calls.pop()
            self._add_text(delta, OPENING + call.text + tag, "content")
