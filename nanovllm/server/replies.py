"""Replies of endpoints that generate: what all of them have in common.

    Reply      one request: its head, its chunks, its usage
    Choice     one of its choices: what of it has been written
    Part       what an output adds to a choice

completions.py and chat_completions.py have the rest. https://platform.openai.com/docs/api-reference
"""

import json
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple
from uuid import uuid4

from nanovllm.engine.input_processor import PreparedPrompt
from nanovllm.outputs import PromptLogprobs, RequestOutput
from nanovllm.server.engine_thread import Outputs
from nanovllm.server.errors import JsonObject


@dataclass(frozen=True)
class StreamOptions:
    """Whether a reply is streamed, and the fields of stream_options."""

    is_stream: bool = False
    include_usage: bool = False
    # Report usage in each chunk. Ignored without include_usage, as in vLLM.
    continuous_usage_stats: bool = False


class Part(NamedTuple):
    """What an output adds to a choice."""

    text: str
    token_ids: list[int]
    logprobs: PromptLogprobs  # one entry for each token, or none at all
    is_first: bool
    finish_reason: str | None

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None


class Choice(ABC):
    """Writes one choice of a reply."""

    def __init__(self) -> None:
        self.num_chars = 0  # written so far
        self.num_tokens = 0

    def write(self, output: RequestOutput) -> JsonObject:
        """Return the choice without the characters and tokens that were written before."""
        part = Part(
            text=output["text"][self.num_chars :],
            token_ids=output["token_ids"][self.num_tokens :],
            logprobs=[*(output["logprobs"] or [])[self.num_tokens :]],
            is_first=self.num_tokens == 0,
            finish_reason=output["finish_reason"],
        )
        self.num_chars = len(output["text"])
        self.num_tokens = len(output["token_ids"])
        return self.write_part(part)

    @abstractmethod
    def write_part(self, part: Part) -> JsonObject:
        """Return the fields of OpenAI's choice. `Reply` adds its index."""


class Reply(ABC):
    """Writes the outputs of one request."""

    def __init__(self, id_prefix: str, kind: str, model: str, stream: StreamOptions) -> None:
        self.stream = stream
        self.head = {
            "id": f"{id_prefix}-{uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        # What all chunks have in common is encoded once.
        self.prefix = json.dumps(self.head).removesuffix("}")
        self.suffix = ', "usage": null' if stream.include_usage else ""
        self.choices: dict[int, Choice] = {}
        self.newest: Outputs = {}

    @abstractmethod
    def make_choice(self, index: int, output: RequestOutput) -> Choice:
        """Make the choice with this index, when its first output comes."""

    def take(self, outputs: Outputs) -> Outputs:
        """Keep new outputs, and return those to be written."""
        self.newest.update(outputs)
        return outputs

    def write_chunk(self, outputs: Outputs) -> str:
        """Return the events for new `outputs`. A token without text has an event, too."""
        events: list[str] = []
        for index, output in self.take(outputs).items():
            choice = json.dumps(self._write_choice(index, output))
            suffix = self.suffix
            if self.stream.include_usage and self.stream.continuous_usage_stats:
                usage = make_usage(len(output["prompt_token_ids"]), len(output["token_ids"]))
                suffix = f', "usage": {json.dumps(usage)}'
            events.append(write_event(f'{self.prefix}, "choices": [{choice}]{suffix}}}'))
        return "".join(events)

    def write_end(self) -> str:
        """Return the events after the last token."""
        if not self.stream.include_usage:
            return END
        usage = {**self.head, "choices": [], "usage": self.write_usage()}
        return write_event(json.dumps(usage)) + END

    def write_whole(self) -> JsonObject:
        """Return the reply to a request that does not stream."""
        choices = [self._write_choice(index, self.newest[index]) for index in sorted(self.newest)]
        return {**self.head, "choices": choices, "usage": self.write_usage()}

    def _write_choice(self, index: int, output: RequestOutput) -> JsonObject:
        if index not in self.choices:
            self.choices[index] = self.make_choice(index, output)
        return {"index": index, **self.choices[index].write(output)}

    def write_usage(self) -> JsonObject:
        """Return OpenAI's usage object of the whole reply."""
        num_prompt = num_cached = num_generated = 0
        for output in self.newest.values():
            num_generated += len(output["token_ids"])
            if output["sample_index"] == 0:  # a prompt counts once
                num_prompt += len(output["prompt_token_ids"])
                num_cached += output["num_cached_tokens"]
        details = {"prompt_tokens_details": {"cached_tokens": num_cached}}
        return {**make_usage(num_prompt, num_generated), **details}


class Generation(NamedTuple):
    """What an endpoint makes of a request."""

    prompts: list[PreparedPrompt]  # for the engine
    reply: Reply  # writes what the engine generates


def make_usage(num_prompt: int, num_generated: int) -> JsonObject:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }


def write_event(data: str) -> str:
    """Return a server-sent event. JSON in ASCII has no line separators, not even U+2028."""
    return f"data: {data}\n\n"


END = write_event("[DONE]")
