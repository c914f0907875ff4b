"""Replies of endpoints that generate: what they have in common.

completions.py and chat_completions.py have the rest. https://platform.openai.com/docs/api-reference
"""

import json
import time
from dataclasses import dataclass
from typing import ClassVar, NamedTuple
from uuid import uuid4

from nanovllm.engine.input_processor import PreparedPrompt
from nanovllm.engine.outputs import FinishReason, RequestOutput
from nanovllm.server.engine_thread import Outputs
from nanovllm.server.errors import JsonObject
from nanovllm.server.token_texts import Token, list_tokens
from nanovllm.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class StreamOptions:
    """Whether a reply is streamed, and the fields of stream_options."""

    is_stream: bool = False
    include_usage: bool = False
    # Report usage in each chunk. Ignored without include_usage, as in vLLM.
    continuous_usage_stats: bool = False


@dataclass
class Written:
    """What is written of a choice."""

    num_chars: int = 0
    num_tokens: int = 0


@dataclass
class Reply:
    """Writes the outputs of one request, whole or in chunks."""

    # OpenAI's names.
    ID_PREFIX: ClassVar[str]
    KIND: ClassVar[str]
    CHUNK_KIND: ClassVar[str]
    NO_TEXT: ClassVar[JsonObject]  # the fields of a chunk without text

    model: str
    stream: StreamOptions
    vocabulary: Vocabulary

    def __post_init__(self) -> None:
        self.head = {
            "id": f"{self.ID_PREFIX}-{uuid4().hex}",
            "object": self.CHUNK_KIND if self.stream.is_stream else self.KIND,
            "created": int(time.time()),
            "model": self.model,
        }
        self.newest: Outputs = {}  # of each choice
        self.written: dict[int, Written] = {}

    def write_logprobs(self, tokens: list[Token]) -> JsonObject:
        """Return the `logprobs` of new tokens."""
        raise NotImplementedError

    def write_text(self, index: int, text: str, reason: FinishReason | None) -> JsonObject:
        """Return the fields for new text. They can replace the finish reason, which is given."""
        raise NotImplementedError

    def write_chunk(self, outputs: Outputs) -> str:
        """Return the events for new `outputs`. A token without text has an event, too.

        The finish reason has an event of its own. OpenAI's clients complete a call only then.
        """
        self.newest.update(outputs)
        events: list[str] = []
        for index, output in outputs.items():
            choice = self.write_choice(index, output)
            choices = [{**choice, "finish_reason": None}]
            if choice["finish_reason"] is not None:
                end = {"index": index, "finish_reason": choice["finish_reason"], "logprobs": None}
                choices.append({**end, **self.NO_TEXT})
            usage: JsonObject = {}
            if self.stream.include_usage:
                usage["usage"] = None
                if self.stream.continuous_usage_stats:
                    num_prompt = len(output["prompt_token_ids"])
                    usage["usage"] = make_usage(num_prompt, len(output["token_ids"]))
            for each in choices:
                events.append(write_event(json.dumps({**self.head, "choices": [each], **usage})))
        return "".join(events)

    def write_end(self) -> str:
        """Return the events after the last token."""
        if not self.stream.include_usage:
            return END
        usage = {**self.head, "choices": [], "usage": self.write_usage()}
        return write_event(json.dumps(usage)) + END

    def write_whole(self) -> JsonObject:
        """Return the reply to a request that does not stream."""
        choices = [self.write_choice(index, self.newest[index]) for index in sorted(self.newest)]
        return {**self.head, "choices": choices, "usage": self.write_usage()}

    def write_choice(self, index: int, output: RequestOutput) -> JsonObject:
        """Return a choice with the text and tokens that are not written yet."""
        written = self.written.setdefault(index, Written())
        reason = output["finish_reason"]
        choice: JsonObject = {"index": index, "finish_reason": reason, "logprobs": None}
        if output["logprobs"] is not None:
            tokens = list_tokens(self.vocabulary, output, written.num_tokens)
            choice["logprobs"] = self.write_logprobs(tokens)
        choice |= self.write_text(index, output["text"][written.num_chars :], reason)
        written.num_chars = len(output["text"])
        written.num_tokens = len(output["token_ids"])
        return choice

    def write_usage(self) -> JsonObject:
        """Return OpenAI's usage object of the whole reply."""
        num_prompt = 0
        num_cached = 0
        num_generated = 0
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
