"""POST /v1/chat/completions: the next message of a chat.

With a reasoning parser, a constraint holds behind the reasoning, unless the prompt has closed it.
"""

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from nanovllm import LLM, SamplingParams
from nanovllm.engine.input_processor import PreparedPrompt
from nanovllm.engine.outputs import FinishReason
from nanovllm.features.structured_outputs.grammar_writer import allow_reasoning
from nanovllm.server.constraints import ToolChoice, choose_constraint, choose_tools
from nanovllm.server.errors import JsonObject
from nanovllm.server.message_parser import MessageParser
from nanovllm.server.parameters import (
    CHAT,
    MAX_LOGPROBS,
    read_params,
    read_stream_options,
    select,
)
from nanovllm.server.replies import Generation, Reply
from nanovllm.server.token_texts import Token
from nanovllm.text.chat_template import Tool, prepare_messages, uses_tools
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.vocabulary import END_THINK, THINK, Vocabulary
from nanovllm.utils.checks import check_bool, check_int, check_str, check_type, invalid

NUM_TAG_TOKENS = 24  # tokens at the end of a prompt that may be a tag and spaces


def parse_chat(model: str, parses_reasoning: bool, body: JsonObject, llm: LLM) -> Generation:
    """Return what a request generates, checked. `model` is its name in the reply."""
    given = select(body, CHAT)
    stream = read_stream_options(given)
    includes_reasoning = check_bool("include_reasoning", given.get("include_reasoning", True))
    num_top = check_int("top_logprobs", given.get("top_logprobs", 0), 0, MAX_LOGPROBS)
    tools = choose_tools(given)
    params = _read_params(given, llm, choose_constraint(given, tools), num_top)
    # A grammar alone can make the model write a call, whatever its template shows.
    shows_tools = not tools.required or uses_tools(llm.tokenizer)
    prompt = encode_chat(given, tools.tools if shows_tools else [], llm)
    last_tag = find_last_tag(given, prompt, llm.vocabulary)
    if parses_reasoning and last_tag != END_THINK:
        params = _constrain_after_reasoning(params, llm, is_open=last_tag == THINK)
    prompts = llm.prepare_prompts([prompt], params)
    reply = ChatReply(
        model,
        stream,
        llm.vocabulary,
        tools=tools,
        last_tag=last_tag,
        parses_reasoning=parses_reasoning,
        includes_reasoning=includes_reasoning,
        num_top=num_top,
    )
    return Generation([reply.prepare(prompt) for prompt in prompts], reply)


def find_last_tag(given: JsonObject, prompt: list[int], vocabulary: Vocabulary) -> str:
    """Return <think> if a prompt ends inside reasoning, </think> if it ends behind it, or "".

    The tag is the last word of the prompt. Only in a message that is continued, other words can
    follow it. It then begins with <think>, as a reply does, and goes on to the first </think>.
    """
    if given.get("continue_final_message"):
        (message,) = prepare_messages(given["messages"][-1:])
        content = message["content"].lstrip()
        if content.startswith(THINK):
            return END_THINK if END_THINK in content else THINK
    end = "".join(map(vocabulary.name, prompt[-NUM_TAG_TOKENS:]))
    tags = re.findall(r"</?think>(?=\s*$)", end)
    return tags[-1] if tags else ""


def _read_params(given: JsonObject, llm: LLM, constraint: Any, num_top: int) -> SamplingParams:
    max_tokens: Any = given.get("max_tokens", llm.max_model_len)
    if "max_completion_tokens" in given:
        check_int("max_tokens", max_tokens, 1)
        max_tokens = check_int("max_completion_tokens", given["max_completion_tokens"], 1)
    # In a chat, `logprobs` is a bool.
    has_logprobs = check_bool("logprobs", given.get("logprobs", False))
    if num_top > 0 and not has_logprobs:
        raise invalid("top_logprobs", "needs logprobs=true: set it, or leave it out")
    return read_params(
        given,
        llm,
        num_prompts=1,
        structured_outputs=constraint,
        max_tokens=max_tokens,
        logprobs=num_top if has_logprobs else None,
    )


def _constrain_after_reasoning(params: SamplingParams, llm: LLM, is_open: bool) -> SamplingParams:
    """Let reasoning come before a constraint. `is_open` if the prompt has begun it."""
    outputs: Any = params.structured_outputs
    if outputs is None:
        return params
    # Compile the constraint alone first. Behind reasoning, its error would come only when the
    # reasoning ends.
    llm.input_processor.make_fields(params, params.n)
    return replace(params, structured_outputs=allow_reasoning(outputs, is_open))


def encode_chat(given: JsonObject, tools: list[Tool], llm: LLM) -> list[int]:
    """Return the token ids of `messages`."""
    variables = given.get("chat_template_kwargs", {})
    check_type("chat_template_kwargs", variables, (dict,), "an object")
    if "reasoning_effort" in given:
        effort = check_str("reasoning_effort", given["reasoning_effort"])
        variables = {"reasoning_effort": effort, **variables}
    if "enable_thinking" in given:
        name = "enable_thinking"
        value = check_bool(name, given[name])
        if variables.get(name, value) != value:
            raise invalid(name, "contradicts chat_template_kwargs: leave one of them out")
        variables = {**variables, name: value}
    if given.get("add_special_tokens"):
        raise invalid("add_special_tokens", "must be false: the chat template writes such tokens")
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
    NO_TEXT: ClassVar[JsonObject] = {"delta": {}}

    tools: ToolChoice
    last_tag: str  # of the prompt, see find_last_tag
    parses_reasoning: bool
    includes_reasoning: bool
    num_top: int  # candidates beside each token, if log probabilities are requested

    def __post_init__(self) -> None:
        super().__post_init__()
        self.has_tags = self.parses_reasoning or len(self.tools.tools) > 0
        self.parsers: dict[int, MessageParser] = {}  # of choices, if there are tags

    def prepare(self, prompt: PreparedPrompt) -> PreparedPrompt:
        """Return a prompt whose outputs have what the reply is made of."""
        prompt = prompt.with_fields(lists_pieces=prompt.params.logprobs is not None)
        if not self.has_tags:
            return prompt
        # Tags can be special tokens, which the text has only here.
        vocabulary = self.vocabulary
        detokenizer = Detokenizer(vocabulary.tokenizer, prompt.token_ids, vocabulary.hidden_ids)
        return prompt.with_fields(detokenizer=detokenizer)

    def write_logprobs(self, tokens: list[Token]) -> JsonObject:
        content: list[JsonObject] = []
        for token in tokens:
            described = {
                name: {
                    "token": name,
                    "logprob": logprob,
                    "bytes": list(self.vocabulary.read_bytes(token.candidates[name])),
                }
                for name, logprob in token.logprobs.items()
            }
            top = list(described.values())[: self.num_top]
            content.append({**described[token.name], "top_logprobs": top})
        return {"content": content}

    def write_text(self, index: int, text: str, reason: FinishReason | None) -> JsonObject:
        choice: JsonObject = {}
        delta: JsonObject = {"content": text}
        if self.has_tags:
            if index not in self.parsers:
                self.parsers[index] = MessageParser(
                    self.parses_reasoning, self.tools.tools, self.tools.is_parallel, self.last_tag
                )
            parser = self.parsers[index]
            delta = parser.feed(text, is_last=reason is not None)
            if self.tools.required:  # all content is a call that a limit has cut
                delta.pop("content", None)
            # A call of the function that the request names ends with "stop", as in OpenAI's API.
            if parser.num_calls > 0 and reason == "stop" and not self.tools.is_named:
                choice["finish_reason"] = "tool_calls"
        reasoning = delta.pop("reasoning", "")
        if reasoning and self.includes_reasoning:
            delta |= {"reasoning": reasoning, "reasoning_content": reasoning}  # both, as vLLM
        if self.stream.is_stream:
            is_first = self.written[index].num_tokens == 0
            choice["delta"] = {"role": "assistant", **delta} if is_first else delta
        else:
            for call in delta.get("tool_calls", []):
                del call["index"]
            choice["message"] = {"role": "assistant", "content": None, "refusal": None, **delta}
        return choice

    def write_usage(self) -> JsonObject:
        usage = super().write_usage()
        if self.parses_reasoning:
            tokenizer: Any = self.vocabulary.tokenizer
            num_reasoning = 0
            for index, parser in self.parsers.items():
                ids = tokenizer.encode("".join(parser.reasoning), add_special_tokens=False)
                # The model need not have written the text with the fewest tokens.
                num_reasoning += min(len(ids), len(self.newest[index]["token_ids"]))
            usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        return usage
