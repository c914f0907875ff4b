"""OpenAI's objects: how outputs are written.

https://platform.openai.com/docs/api-reference. Does not use the web framework.
"""

import json
import time
from bisect import bisect_left
from copy import copy
from typing import Any
from uuid import uuid4

from nanovllm import LLM
from nanovllm.engine.input_processor import PreparedPrompt
from nanovllm.engine.request import Request
from nanovllm.llm import list_prompts
from nanovllm.outputs import PromptLogprobs, RequestOutput
from nanovllm.server.engine_thread import Outputs
from nanovllm.server.errors import JsonObject
from nanovllm.server.logprobs import LogprobsWriter
from nanovllm.server.message_parser import MessageParser, find_last_tag, read_continued
from nanovllm.text.detokenizer import Detokenizer


class Reply:
    """Writes the outputs of one request."""

    def __init__(
        self, given: JsonObject, model: str, is_chat: bool, llm: LLM, parses_reasoning: bool = False
    ) -> None:
        """`given` has the parameters of the request, from `parse_request`."""
        self.is_stream: bool = given.get("stream", False)
        stream_options = given.get("stream_options", {})
        self.wants_usage: bool = stream_options.get("include_usage", False)
        # Report usage in each chunk. Ignored without include_usage, as in vLLM.
        self.wants_counts = self.wants_usage and stream_options.get("continuous_usage_stats", False)
        self.echoes_prompt: bool = given.get("echo", False)
        self.wants_completion = not (self.echoes_prompt and given.get("max_tokens") == 0)
        self.num_top: int = given.get("top_logprobs", 0)
        self.echoed_prompts: list[str | list[int]] = []  # one per choice, as sent
        if self.echoes_prompt:
            for prompt in list_prompts(given["prompt"]):
                self.echoed_prompts += [prompt] * given.get("n", 1)
        self.is_chat = is_chat
        self.parses_reasoning = is_chat and parses_reasoning
        self.tools = given.get("tools") or []
        self.is_parallel: bool = given.get("parallel_tool_calls", True)
        self.shows_reasoning: bool = given.get("include_reasoning", True)
        self.continued = read_continued(given) if is_chat else ""
        self.is_named = isinstance(given.get("tool_choice"), dict)
        self.parsers: dict[int, MessageParser] = {}  # one per choice of a chat
        self.vocabulary = llm.vocabulary
        self.tokenizer: Any = llm.tokenizer
        # Special tokens that are left out of the text, None for all. The parser needs the tags.
        self.hidden_ids: frozenset[int] | None = None
        self.has_tags = self.parses_reasoning or len(self.tools) > 0
        if self.has_tags and self.vocabulary.hidden_ids < self.vocabulary.special_ids:
            self.hidden_ids = self.vocabulary.hidden_ids
        self.writers: dict[int, LogprobsWriter] = {}  # one per choice, if logprobs are requested
        kind = "text_completion"
        if is_chat:
            kind = "chat.completion.chunk" if self.is_stream else "chat.completion"
        self.head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        # What all chunks have in common is encoded once.
        self.prefix = json.dumps(self.head).removesuffix("}")
        self.suffix = ', "usage": null' if self.wants_usage else ""
        self.sent: dict[int, tuple[int, int]] = {}  # choice -> characters and tokens sent
        self.newest: Outputs = {}

    def show_tags(self, prompt: PreparedPrompt) -> PreparedPrompt:
        """Return a prompt whose requests have text with the tags that the parser needs."""
        if self.hidden_ids is None:
            return prompt
        stops = prompt.params.stop_strings
        detokenizer = Detokenizer(self.tokenizer, prompt.token_ids, stops, self.hidden_ids)

        def make_request(**options: Any) -> Request:
            return prompt.make_request(**{**options, "detokenizer": copy(detokenizer)})

        return prompt._replace(make_request=make_request)

    def take(self, outputs: Outputs) -> Outputs:
        """Keep and return new `outputs`, without a token that was not requested."""
        if not self.wants_completion:
            for index, output in outputs.items():
                logprobs: list[dict[int, float]] | None = None if output["logprobs"] is None else []
                outputs[index] = {**output, "text": "", "token_ids": [], "logprobs": logprobs}
                if output["finish_reason"] == "stop":  # because of the token that is not shown
                    outputs[index]["finish_reason"] = "length"
        self.newest.update(outputs)
        return outputs

    def write_chunk(self, outputs: Outputs) -> str:
        """Return the events for new `outputs`. A token without text has an event, too."""
        outputs = self.take(outputs)
        events: list[str] = []
        for index, output in outputs.items():
            num_chars, num_tokens = self.sent.get(index, (0, 0))
            self.sent[index] = (len(output["text"]), len(output["token_ids"]))
            choice = json.dumps(self._write_choice(index, output, num_chars, num_tokens))
            suffix = self.suffix
            if self.wants_counts:
                usage = make_usage(len(output["prompt_token_ids"]), len(output["token_ids"]))
                suffix = f', "usage": {json.dumps(usage)}'
            events.append(write_event(f'{self.prefix}, "choices": [{choice}]{suffix}}}'))
        return "".join(events)

    def write_end(self) -> str:
        """Return the events after the last token."""
        if not self.wants_usage:
            return END
        usage = {**self.head, "choices": [], "usage": self._usage()}
        return write_event(json.dumps(usage)) + END

    def write_whole(self) -> JsonObject:
        """Return the reply to a request that does not stream."""
        choices = [self._write_choice(i, self.newest[i], 0, 0) for i in sorted(self.newest)]
        return {**self.head, "choices": choices, "usage": self._usage()}

    def _write_choice(
        self, index: int, output: RequestOutput, num_chars: int, num_tokens: int
    ) -> JsonObject:
        """Return a choice without the characters and tokens that were already sent."""
        text = output["text"][num_chars:]
        if self.echoes_prompt and num_tokens == 0:
            text = self._prompt_text(index) + text
        choice: JsonObject = {
            "index": index,
            "finish_reason": output["finish_reason"],
            "logprobs": None,
        }
        if output["logprobs"] is not None:
            choice["logprobs"] = self._write_logprobs(index, output, num_tokens)
        if not self.is_chat:
            choice["text"] = text
            return choice
        delta = self._parse_message(index, output, text)
        has_calls = self.parsers[index].num_calls > 0
        # A call of the function that the request names ends with "stop", as in OpenAI's API.
        if has_calls and not self.is_named and output["finish_reason"] == "stop":
            choice["finish_reason"] = "tool_calls"
        if self.is_stream:
            choice["delta"] = delta if num_tokens else {"role": "assistant", **delta}
        else:
            for call in delta.get("tool_calls", []):
                del call["index"]
            choice["message"] = {"role": "assistant", "content": None, "refusal": None, **delta}
        return choice

    def _parse_message(self, index: int, output: RequestOutput, text: str) -> JsonObject:
        """Return the delta of a chat for more text."""
        if index not in self.parsers:
            prompt = output["prompt_token_ids"]
            last_tag = find_last_tag(prompt, self.continued, self.vocabulary)
            self.parsers[index] = MessageParser(
                self.parses_reasoning, self.tools, self.is_parallel, last_tag
            )
        delta = self.parsers[index].feed(text, output["finish_reason"] is not None)
        reasoning = delta.pop("reasoning", "")
        if reasoning and self.shows_reasoning:
            delta |= {"reasoning": reasoning, "reasoning_content": reasoning}  # both, as vLLM
        return delta or ({} if self.has_tags else {"content": ""})

    def _prompt_text(self, index: int) -> str:
        """The prompt of a choice as it was sent. A prompt of token ids is decoded.

        A character that the prompt begins and the completion continues belongs to the completion.
        """
        prompt = self.echoed_prompts[index]
        if isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            return ""
        detokenizer = Detokenizer(self.tokenizer, [])
        return detokenizer.read(prompt, is_last=not self.wants_completion)

    def _write_logprobs(self, index: int, output: RequestOutput, num_tokens: int) -> JsonObject:
        """Describe the tokens of a choice after the first `num_tokens`, which were already sent."""
        prompt_token_ids = output["prompt_token_ids"]
        if index not in self.writers:
            context = [] if self.echoes_prompt else prompt_token_ids
            self.writers[index] = LogprobsWriter(self.vocabulary, context)
        writer = self.writers[index]
        token_ids = output["token_ids"][num_tokens:]
        entries: PromptLogprobs = [*(output["logprobs"] or [])[num_tokens:]]
        is_last = output["finish_reason"] is not None
        if self.is_chat:
            return writer.write_chat(token_ids, entries, is_last, self.num_top)
        if not (self.echoes_prompt and num_tokens == 0):
            return writer.write_completion(token_ids, entries, is_last)
        of_prompt = output["prompt_logprobs"] or []
        found = writer.write_completion(prompt_token_ids, of_prompt, not self.wants_completion)
        writer.offset = len(self._prompt_text(index))
        for name, values in writer.write_completion(token_ids, entries, is_last).items():
            found[name] += values
        return found

    def _usage(self) -> JsonObject:
        num_prompt = num_cached = num_generated = 0
        for output in self.newest.values():
            num_generated += len(output["token_ids"])
            if output["sample_index"] == 0:  # a prompt counts once
                num_prompt += len(output["prompt_token_ids"])
                num_cached += output["num_cached_tokens"]
        usage = make_usage(num_prompt, num_generated)
        usage["prompt_tokens_details"] = {"cached_tokens": num_cached}
        if self.parses_reasoning:
            num_reasoning = sum(map(self._count_reasoning, self.parsers))
            usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        return usage

    def _count_reasoning(self, index: int) -> int:
        """Count the tokens of a choice's reasoning, without the tags around it."""
        parser = self.parsers[index]
        if parser.reasoning_start == parser.reasoning_end:
            return 0
        num_tokens = len(self.newest[index]["token_ids"])
        if parser.reasoning_end is not None:
            num_tokens = self._count_tokens(index, parser.reasoning_end)
        return num_tokens - self._count_tokens(index, parser.reasoning_start)

    def _count_tokens(self, index: int, num_chars: int) -> int:
        """Return how many tokens of a choice have a part of the text's first characters."""
        output = self.newest[index]
        prompt = output["prompt_token_ids"]
        token_ids = output["token_ids"]
        reader = Detokenizer(self.tokenizer, prompt, (), self.hidden_ids)

        def count_chars(num_tokens: int) -> int:
            text = reader.read(prompt + token_ids[:num_tokens], is_last=True)
            return len(text.rstrip("\ufffd"))  # without a character that is incomplete

        return bisect_left(range(len(token_ids)), num_chars, key=count_chars)


def make_usage(num_prompt: int, num_generated: int) -> JsonObject:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }


def write_event(data: str) -> str:
    """Return a server-sent event. JSON in ASCII has no line separators, not even U+2028."""
    return f"data: {data}\n\n"


END = write_event("[DONE]")
