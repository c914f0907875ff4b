"""POST /v1/chat/completions: the next message of a chat.

With a reasoning parser, a constraint holds behind the reasoning, unless the prompt has closed it.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

from nanovllm import LLM
from nanovllm.engine.input_processor import PreparedPrompt
from nanovllm.features.structured_outputs.grammar_writer import allow_reasoning
from nanovllm.outputs import RequestOutput
from nanovllm.server.constraints import ToolChoice, choose_constraint, choose_tools
from nanovllm.server.errors import JsonObject, blaming
from nanovllm.server.logprobs import LogprobsWriter
from nanovllm.server.message_parser import MessageParser, find_last_tag
from nanovllm.server.parameter_table import CHAT
from nanovllm.server.parameters import (
    MAX_LOGPROBS,
    read_params,
    read_stream_options,
    select,
)
from nanovllm.server.replies import Generation, Reply
from nanovllm.text.chat_template import Tool
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.vocabulary import END_THINK, THINK
from nanovllm.utils.checks import check_bool, check_choice, check_int, check_type, invalid, naming

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def parse_chat(model: str, parses_reasoning: bool, body: JsonObject, llm: LLM) -> Generation:
    """Return what a request generates, checked. `model` is its name in the reply.

    Raises ApiError, mostly with the engine's message.
    """
    given = select(body, CHAT)
    with blaming(given):
        stream = read_stream_options(given)
        shows_reasoning = check_bool("include_reasoning", given.get("include_reasoning", True))
        num_top = check_int("top_logprobs", given.get("top_logprobs", 0), 0, MAX_LOGPROBS)
        tools = choose_tools(given)
        constraint = choose_constraint(given, tools)
        params = read_params(
            given,
            llm,
            num_prompts=1,
            structured_outputs=constraint.outputs,
            max_tokens=_read_max_tokens(given, llm.max_model_len),
            logprobs=_read_logprobs(given, num_top),
        )
    with blaming(given, "messages"):
        # A grammar alone can make the model write a call, whatever its template shows.
        shows_tools = not tools.required or llm.chat_template.uses_tools
        prompt = encode_chat(given, tools.tools if shows_tools else [], llm)
    last_tag = find_last_tag(given, prompt, llm.vocabulary)
    with blaming(given, "messages", constraint.source):
        outputs: Any = params.structured_outputs
        if parses_reasoning and outputs is not None and last_tag != END_THINK:
            # Compile the constraint alone first. Behind reasoning, its error would come only when
            # the reasoning ends.
            llm.input_processor.make_fields(params, params.n)
            outputs = allow_reasoning(outputs, is_open=last_tag == THINK)
            params = replace(params, structured_outputs=outputs)
        prompts = llm.prepare_prompts([prompt], params)
    reply = ChatReply(
        model,
        stream,
        llm.vocabulary,
        tools=tools,
        last_tag=last_tag,
        parses_reasoning=parses_reasoning,
        shows_reasoning=shows_reasoning,
        num_top=num_top,
    )
    return Generation([reply.show_tags(prompt) for prompt in prompts], reply)


def _read_max_tokens(given: JsonObject, max_model_len: int) -> Any:
    if "max_completion_tokens" in given:
        return check_int("max_completion_tokens", given["max_completion_tokens"], 1)
    max_tokens = given.get("max_tokens", -1)  # llama.cpp's page sends -1 for no limit
    return max_model_len if max_tokens == -1 else max_tokens


def _read_logprobs(given: JsonObject, num_top: int) -> int | None:
    """Return the number of log probabilities. In a chat, `logprobs` is a bool."""
    if check_bool("logprobs", given.get("logprobs", False)):
        return num_top
    if num_top > 0:
        raise invalid("top_logprobs", "needs logprobs=true: set it, or leave it out")
    return None


def encode_chat(given: JsonObject, tools: list[Tool], llm: LLM) -> list[int]:
    """Return the token ids of `messages`."""
    variables = given.get("chat_template_kwargs", {})
    check_type("chat_template_kwargs", variables, (dict,), "an object")
    if "reasoning_effort" in given:
        effort = check_choice("reasoning_effort", given["reasoning_effort"], REASONING_EFFORTS)
        variables = {"reasoning_effort": effort, **variables}
    for name, value in (("tools", tools), ("chat_template_kwargs", variables)):
        # The error of the tokenizer for a lone surrogate would name the messages.
        with naming(name, ValueError, RecursionError):
            json.dumps(value, ensure_ascii=False).encode()
    messages: Any = given.get("messages")
    prompts: Any = llm.encode_chats(
        [messages],
        tools=tools,
        chat_template_kwargs=variables,
        add_generation_prompt=given.get("add_generation_prompt", True),
        continue_final_message=given.get("continue_final_message", False),
    )
    return prompts[0]


@dataclass
class ChatReply(Reply):
    """Writes the reply to a chat: messages, or in a stream what each chunk adds to them."""

    ID_PREFIX = "chatcmpl"
    KIND = "chat.completion"
    CHUNK_KIND = "chat.completion.chunk"

    tools: ToolChoice
    last_tag: str  # of the prompt, see find_last_tag
    parses_reasoning: bool
    shows_reasoning: bool
    num_top: int  # candidates beside each token, if log probabilities are requested

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parsers: dict[int, MessageParser] = {}  # one per choice
        self.has_tags = self.parses_reasoning or len(self.tools.tools) > 0
        # Special tokens that are left out of the text, None for all. The parser needs the tags.
        self.hidden_ids: frozenset[int] | None = None
        if self.has_tags and self.vocabulary.hidden_ids < self.vocabulary.special_ids:
            self.hidden_ids = self.vocabulary.hidden_ids

    def show_tags(self, prompt: PreparedPrompt) -> PreparedPrompt:
        """Return a prompt whose requests have text with the tags that the parser needs."""
        if self.hidden_ids is None:
            return prompt
        detokenizer = self._make_detokenizer(prompt.token_ids, prompt.params.stop_strings)
        return prompt._replace(fields={**prompt.fields, "detokenizer": detokenizer})

    def write_part(self, index: int, part: RequestOutput, is_first: bool) -> JsonObject:
        if is_first:
            self.parsers[index] = MessageParser(
                self.parses_reasoning, self.tools.tools, self.tools.is_parallel, self.last_tag
            )
        is_last = part["finish_reason"] is not None
        choice: JsonObject = {}
        if part["logprobs"] is not None:
            if is_first:
                self.writers[index] = LogprobsWriter(self.vocabulary, part["prompt_token_ids"])
            choice["logprobs"] = self.writers[index].write_chat(
                part["token_ids"], part["logprobs"], is_last, self.num_top
            )
        delta = self._write_delta(self.parsers[index].feed(part["text"], is_last))
        has_calls = self.parsers[index].delta.num_calls > 0
        # A call of the function that the request names ends with "stop", as in OpenAI's API.
        if has_calls and not self.tools.is_named and part["finish_reason"] == "stop":
            choice["finish_reason"] = "tool_calls"
        if self.stream.is_stream:
            choice["delta"] = {"role": "assistant", **delta} if is_first else delta
        else:
            for call in delta.get("tool_calls", []):
                del call["index"]
            choice["message"] = {"role": "assistant", "content": None, "refusal": None, **delta}
        return choice

    def _write_delta(self, delta: JsonObject) -> JsonObject:
        reasoning = delta.pop("reasoning", "")
        if reasoning and self.shows_reasoning:
            delta |= {"reasoning": reasoning, "reasoning_content": reasoning}  # both, as vLLM
        if not delta and not self.has_tags:
            return {"content": ""}
        return delta

    def write_usage(self) -> JsonObject:
        usage = super().write_usage()
        if self.parses_reasoning:
            num_reasoning = sum(map(self._count_reasoning, self.parsers))
            usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        return usage

    def _count_reasoning(self, index: int) -> int:
        """Count the tokens of a choice's reasoning, without the tags around it."""
        parser = self.parsers[index]
        if parser.reasoning_start == parser.reasoning_end:
            return 0
        num_before = self._count_tokens(index, parser.reasoning_start)
        return self._count_tokens(index, parser.reasoning_end) - num_before

    def _count_tokens(self, index: int, num_chars: int) -> int:
        """Return how many tokens of a choice have a part of the text's first characters.

        A step of the search decodes half as many tokens as the one before it, because other
        requests wait for all of them.
        """
        prompt = self.newest[index]["prompt_token_ids"]
        token_ids = prompt + self.newest[index]["token_ids"]
        num_read = start = len(prompt)
        end = len(token_ids)
        while start < end:
            middle = (start + end) // 2
            reader = self._make_detokenizer(token_ids[:num_read])
            text = reader.read(token_ids[:middle], is_last=True)
            num_new = len(text.rstrip("\ufffd"))  # without a character that is incomplete
            if num_new >= num_chars:
                end = middle
                continue
            start = middle + 1
            if num_new == len(text):
                num_chars -= num_new
                num_read = middle
        return end - len(prompt)

    def _make_detokenizer(self, prompt: list[int], stops: tuple[str, ...] = ()) -> Detokenizer:
        tokenizer: Any = self.vocabulary.tokenizer  # without one, there are no chats
        return Detokenizer(tokenizer, prompt, stops, self.hidden_ids)
