"""OpenAI's objects: what a request asks for, and how outputs are written.

https://platform.openai.com/docs/api-reference, with vLLM's extensions. Independent of HTTP.
"""

import json
import time
from dataclasses import fields
from itertools import accumulate
from typing import Any
from uuid import uuid4

from nanovllm import LLM, SamplingParams
from nanovllm.checks import check_bool, check_int, check_type
from nanovllm.engine.input_processor import CheckedPrompt
from nanovllm.outputs import PromptLogprobs, RequestOutput
from nanovllm.server.engine_thread import Outputs

Object = dict[str, Any]  # a JSON object

DEFAULT_MAX_TOKENS = 16  # of a completion; a chat can use the rest of max_model_len
MAX_SAMPLES = 4096  # prompts times n of one request
MAX_LOGPROBS = 20  # OpenAI's limit
SAMPLING = {field.name for field in fields(SamplingParams)} - {"prompt_logprobs"}
HANDLED = {
    "echo",
    "model",
    "prompt",
    "messages",
    "stream",
    "stream_options",
    "top_logprobs",
    "max_completion_tokens",
}
# These do not change the result.
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
# Accepted values of unsupported parameters. For all others these are None, False, 0 and empty
# values.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "best_of": (1,),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "tool_choice": ("none", "auto"),
}


def parse_prompts(body: Object, is_chat: bool, llm: LLM) -> list[CheckedPrompt]:
    """Return the prompts of a request, tokenized and checked.

    Raises ValueError or TypeError with the engine's message.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        is_known = name in SAMPLING or name in HANDLED or name in IGNORED
        is_neutral = value in NEUTRAL[name] if name in NEUTRAL else not value
        if not is_known and not is_neutral:
            raise ValueError(f"{name!r} with the value {value!r} is not supported: leave it out")
    if given.get("echo") and (is_chat or given.get("stream")):
        raise ValueError("'echo' is supported for completions without stream only: leave it out")
    params = _parse_params(given, is_chat, llm.max_model_len)
    prompts: Any = given.get("prompt")
    if is_chat:
        messages: Any = given.get("messages")
        check_type("messages", messages, (list,), "a list of objects")
        prompts = llm.encode_chats([messages])
    checked = llm.check_prompts(prompts, params)
    check_int("the number of prompts times n", len(checked) * params.n, 1, MAX_SAMPLES)
    return checked


def _parse_params(given: Object, is_chat: bool, max_model_len: int) -> SamplingParams:
    options = {name: given[name] for name in SAMPLING & given.keys()}
    default = max_model_len if is_chat else DEFAULT_MAX_TOKENS
    options["max_tokens"] = given.get("max_completion_tokens", given.get("max_tokens", default))
    if is_chat:  # `logprobs` is a bool, and `top_logprobs` their number
        wants_logprobs = check_bool("logprobs", options.pop("logprobs", False))
        if wants_logprobs:
            options["logprobs"] = given.get("top_logprobs", 0)
        elif given.get("top_logprobs"):
            raise ValueError("top_logprobs needs logprobs=true")
    if "logprobs" in options:
        name = "top_logprobs" if is_chat else "logprobs"
        check_int(name, options["logprobs"], 0, MAX_LOGPROBS)
    if given.get("echo"):
        options["prompt_logprobs"] = options.get("logprobs")
        if options["max_tokens"] == 0:  # the prompt alone, see Reply
            options["max_tokens"] = 1
    return SamplingParams(**options)


class Reply:
    """Writes the outputs of one request."""

    def __init__(self, body: Object, model: str, is_chat: bool, llm: LLM) -> None:
        options = body.get("stream_options") or {}
        check_type("stream_options", options, (dict,), "an object")
        self.has_usage = check_bool("include_usage", options.get("include_usage") or False)
        self.is_stream = check_bool("stream", body.get("stream") or False)
        self.has_prompt = check_bool("echo", body.get("echo") or False)
        max_tokens = body.get("max_completion_tokens")
        if max_tokens is None:
            max_tokens = body.get("max_tokens")
        self.has_completion = not (self.has_prompt and max_tokens == 0)
        self.num_top = body.get("top_logprobs") or 0
        self.is_chat = is_chat
        self.tokenizer = llm.tokenizer
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
        self.suffix = ', "usage": null' if self.has_usage else ""
        self.sent: dict[int, tuple[int, int]] = {}  # choice -> characters and tokens sent
        self.newest: Outputs = {}

    def write_chunk(self, outputs: Outputs) -> str:
        """Return the events for new `outputs`. A token without text has an event, too."""
        self.newest.update(outputs)
        events: list[str] = []
        for index, output in outputs.items():
            num_chars, num_tokens = self.sent.get(index, (0, 0))
            self.sent[index] = (len(output["text"]), len(output["token_ids"]))
            choice = json.dumps(self._choice(index, output, num_chars, num_tokens))
            events.append(write_event(f'{self.prefix}, "choices": [{choice}]{self.suffix}}}'))
        return "".join(events)

    def write_end(self) -> str:
        """Return the events after the last token."""
        if not self.has_usage:
            return END
        usage = {**self.head, "choices": [], "usage": self._usage()}
        return write_event(json.dumps(usage)) + END

    def write_whole(self) -> Object:
        """Return the reply to a request that does not stream."""
        if not self.has_completion:  # the engine has generated a token that was not requested
            nothing: Any = {"text": "", "token_ids": [], "logprobs": []}
            self.newest = {index: {**output, **nothing} for index, output in self.newest.items()}
        choices = [self._choice(index, self.newest[index], 0, 0) for index in sorted(self.newest)]
        return {**self.head, "choices": choices, "usage": self._usage()}

    def _choice(self, index: int, output: RequestOutput, num_chars: int, num_tokens: int) -> Object:
        """Return a choice without the characters and tokens that were already sent."""
        text = output["text"][num_chars:]
        if self.has_prompt:
            text = self._decode(output["prompt_token_ids"]) + text
        choice: Object = {
            "index": index,
            "finish_reason": output["finish_reason"],
            "logprobs": self._logprobs(output, num_chars, num_tokens),
        }
        if not self.is_chat:
            choice["text"] = text
        elif self.is_stream:
            choice["delta"] = {"content": text}
            if num_tokens == 0:
                choice["delta"]["role"] = "assistant"
        else:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        return choice

    def _logprobs(self, output: RequestOutput, num_chars: int, num_tokens: int) -> Object | None:
        """Log probabilities of the tokens that are not sent, whose text begins at `num_chars`."""
        if output["logprobs"] is None:
            return None
        token_ids = output["token_ids"][num_tokens:]
        entries: PromptLogprobs = [*output["logprobs"][num_tokens:]]
        if self.has_prompt:
            token_ids = output["prompt_token_ids"] + token_ids
            entries = (output["prompt_logprobs"] or []) + entries
        tokens = [self._decode([token_id]) for token_id in token_ids]
        chosen: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for token_id, entry in zip(token_ids, entries):
            chosen.append(entry[token_id] if entry else None)
            tops.append(self._decode_entry(entry) if entry else None)
        if self.is_chat:
            positions: list[Object] = []
            for token, logprob, top in zip(tokens, chosen, tops):
                alternatives = list((top or {}).items())[: self.num_top]
                described = [_describe_token(*alternative) for alternative in alternatives]
                positions.append({**_describe_token(token, logprob), "top_logprobs": described})
            return {"content": positions}
        offsets = accumulate(map(len, tokens), initial=num_chars)
        return {
            "tokens": tokens,
            "token_logprobs": chosen,
            "top_logprobs": tops,
            "text_offset": list(offsets)[:-1],
        }

    def _decode(self, token_ids: list[int]) -> str:
        if self.tokenizer is None:
            return "".join(f"token_id:{token_id}" for token_id in token_ids)
        return str(self.tokenizer.decode(token_ids))

    def _decode_entry(self, entry: dict[int, float]) -> dict[str, float]:
        """Log probabilities by text. Of tokens with equal text the most probable one is kept."""
        found: dict[str, float] = {}
        for token_id, logprob in entry.items():  # the most probable one comes first
            found.setdefault(self._decode([token_id]), logprob)
        return found

    def _usage(self) -> Object:
        num_prompt = num_cached = num_generated = 0
        for output in self.newest.values():
            num_generated += len(output["token_ids"])
            if output["sample_index"] == 0:  # a prompt counts once
                num_prompt += len(output["prompt_token_ids"])
                num_cached += output["num_cached_tokens"]
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }


def _describe_token(token: str, logprob: float | None) -> Object:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode(errors="replace"))}


def write_event(data: str) -> str:
    """Return a server-sent event. JSON in ASCII has no line separators, not even U+2028."""
    return f"data: {data}\n\n"


END = write_event("[DONE]")


def describe_error(status: int, message: str, code: str | None = None) -> Object:
    """Return OpenAI's error object."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
