"""Divides the text of a reply into the fields of OpenAI's message, at its tags.

    <think>Look it up.</think> Wait. <tool_call>{"name": "find", "arguments": {}}</tool_call>
           reasoning           content                  tool_calls

Text that may be the start of a tag is held back, so no delta contains a part of one.
"""

from nanovllm.messages import Tool
from nanovllm.server.errors import JsonObject
from nanovllm.server.tools import CLOSING, OPENING, CallParser, list_strings

THINK = "<think>"
END_THINK = "</think>"
# The section that each tag begins. <think> is missing, because it counts only at the start.
SECTION_AFTER = {END_THINK: "content", OPENING: "tool_calls", CLOSING: "content"}


class MessageParser:
    """Parses the text of one choice, which arrives in parts."""

    def __init__(
        self, parses_reasoning: bool, tools: list[Tool], is_parallel: bool, prompt: str
    ) -> None:
        """Without tools, calls are content. A prompt that ends with <think> begins reasoning."""
        call_tags = [OPENING] if tools else []
        self.end_tags = {
            "reasoning": [END_THINK, *call_tags],  # Qwen3.5 can leave out </think>
            "content": call_tags,
            "tool_calls": [CLOSING, OPENING],  # small models can leave out the closing tag
        }
        self.section = "content"
        if parses_reasoning:
            self.section = "reasoning" if prompt.rstrip().endswith(THINK) else "start"
        self.strings = list_strings(tools)
        self.is_parallel = is_parallel
        self.calls: list[CallParser] = []
        self.unread = ""  # may be the start of a tag
        self.has_content = False
        # Spaces that follow a tag are content only if words come before and after them.
        self.is_after_tag = parses_reasoning or len(tools) > 0
        self.spaces = ""  # spaces after the tag, while no word has come

    def feed(self, text: str, is_last: bool) -> JsonObject:
        """Return OpenAI's delta for more text. `is_last` if none follows."""
        self.unread += text
        if self.section == "start":
            words = self.unread.lstrip()
            if words.startswith(THINK):
                self.section = "reasoning"
                self.unread = words.removeprefix(THINK)
            elif THINK.startswith(words) and not is_last:
                return {}
            else:
                self.section = "content"
        delta: JsonObject = {}
        while True:
            part, tag, self.unread = split(self.unread, self.end_tags[self.section], is_last)
            if self.section == "content":
                self._add_content(delta, part)
            elif self.section == "reasoning" and part:
                delta["reasoning"] = part
            elif self.section == "tool_calls":
                call = self.calls[-1]
                call.add(part)
                if tag and call.in_string:  # the tag is text of an argument
                    call.add(tag)
                    continue
                self._add_call(delta, call, tag, is_last)
            if not tag:
                return delta
            self.section = SECTION_AFTER[tag]
            self.is_after_tag = True
            if tag == OPENING:
                self.calls.append(CallParser(len(self.calls), self.strings))

    def _add_content(self, delta: JsonObject, text: str) -> None:
        if self.is_after_tag:
            text = self.spaces + text if self.has_content else text.lstrip()
            is_blank = not text.strip()
            self.spaces = text if is_blank else ""
            if is_blank:
                return
            self.is_after_tag = False
        if text:
            delta["content"] = delta.get("content", "") + text
            self.has_content = True

    def _add_call(self, delta: JsonObject, call: CallParser, tag: str, is_last: bool) -> None:
        """Add what the call has gained. A complete call that cannot be parsed is content."""
        is_complete = tag != "" or is_last
        entry = call.take_delta(is_complete)
        if entry is not None and (self.is_parallel or call.index == 0):
            delta.setdefault("tool_calls", []).append(entry)
        if is_complete and not call.is_sent:
            self.calls.pop()
            end = tag if tag == CLOSING else ""  # an opening tag begins the next call
            self._add_content(delta, OPENING + call.text + end)


def split(text: str, tags: list[str], is_last: bool) -> tuple[str, str, str]:
    """Divide text at the first of `tags`: the text before the tag, the tag, the text after it.

    Without a tag, the second part is empty. The third one may then be the start of a tag, unless
    the text `is_last`.
    """
    starts = [(text.index(tag), tag) for tag in tags if tag in text]
    if starts:
        start, tag = min(starts)
        return text[:start], tag, text[start + len(tag) :]
    start = text.rfind("<")  # only the first character of a tag is one
    if is_last or start < 0 or not any(tag.startswith(text[start:]) for tag in tags):
        start = len(text)
    return text[:start], "", text[start:]
