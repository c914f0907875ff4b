"""POST /v1/completions: text that continues each prompt.

With `echo`, a choice begins with its prompt, which is scored if logprobs are requested. With
max_tokens=0 it has nothing else.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from nanovllm import LLM
from nanovllm.engine.input_processor import Prompt
from nanovllm.engine.outputs import FinishReason, RequestOutput
from nanovllm.llm import list_prompts
from nanovllm.server.constraints import choose_constraint, choose_tools
from nanovllm.server.errors import JsonObject
from nanovllm.server.parameters import (
    COMPLETION,
    MAX_LOGPROBS,
    read_params,
    read_stream_options,
    select,
)
from nanovllm.server.replies import Generation, Reply
from nanovllm.server.token_texts import Token
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.generated_text import GeneratedText
from nanovllm.utils.checks import check_bool, check_int, check_type

DEFAULT_MAX_TOKENS = 16
Echo = tuple[str, list[str]]  # the text of a prompt, and that of each of its tokens


def parse_completion(model: str, body: JsonObject, llm: LLM) -> Generation:
    """Return what a request generates, checked. `model` is its name in the reply."""
    given = select(body, COMPLETION)
    meaning = "a str, a list of token ids, or a list of these"
    prompts = check_type("prompt", given.get("prompt"), (str, list), meaning)
    sent = list_prompts(prompts)
    stream = read_stream_options(given)
    is_echo = check_bool("echo", given.get("echo", False))
    logprobs: Any = given.get("logprobs")
    if logprobs is not None:
        check_int("logprobs", logprobs, 0, MAX_LOGPROBS)
    max_tokens: Any = given.get("max_tokens", DEFAULT_MAX_TOKENS)
    scores_only = is_echo and type(max_tokens) is int and max_tokens == 0
    params = read_params(
        given,
        llm,
        num_prompts=len(sent),
        structured_outputs=choose_constraint(given, choose_tools(given)),
        max_tokens=1 if scores_only else max_tokens,
        logprobs=logprobs,
        prompt_logprobs=logprobs if is_echo else None,
    )
    prepared = llm.prepare_prompts(prompts, params)
    fields = {"ends_with_prompt": scores_only, "lists_pieces": logprobs is not None}
    prepared = [prompt.with_fields(**fields) for prompt in prepared]
    reply = CompletionReply(model, stream, llm.vocabulary)
    if is_echo:
        for prompt, (token_ids, _, _) in zip(sent, prepared):
            reply.echoes += [_read_echo(prompt, token_ids, llm)] * params.n
    return Generation(prepared, reply)


def _read_echo(prompt: Prompt, token_ids: list[int], llm: LLM) -> Echo:
    """Return a prompt as it was sent. A prompt of token ids is decoded.

    A character that the prompt begins and the completion continues belongs to the completion. A
    special token has text if it was sent as text.
    """

    def list_pieces(hidden_ids: frozenset[int] | None) -> list[str]:
        text = GeneratedText(Detokenizer(llm.tokenizer, [], hidden_ids))
        return text.list_pieces(token_ids, is_last=False)

    if not isinstance(prompt, str):
        pieces = list_pieces(None)
        return "".join(pieces), pieces
    sent = list_pieces(frozenset())
    num_added = len("".join(sent)) - len(prompt)  # characters of tokens that were not sent
    index = 0
    while num_added > 0 and index < len(sent):
        num_added -= len(sent[index])
        sent[index] = ""
        index += 1
    return prompt, sent if "".join(sent) == prompt else list_pieces(None)


@dataclass
class CompletionReply(Reply):
    """Writes completions."""

    ID_PREFIX = "cmpl"
    KIND = "text_completion"
    CHUNK_KIND = KIND
    NO_TEXT: ClassVar[JsonObject] = {"text": ""}

    echoes: list[Echo] = field(default_factory=list)  # one for each choice, or none

    def write_logprobs(self, tokens: list[Token]) -> JsonObject:
        return {
            "tokens": [token.name for token in tokens],
            "token_logprobs": [token.logprobs.get(token.name) for token in tokens],
            "top_logprobs": [token.logprobs or None for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def write_text(self, index: int, text: str, reason: FinishReason | None) -> JsonObject:
        return {"text": text}

    def write_choice(self, index: int, output: RequestOutput) -> JsonObject:
        if self.echoes:
            output = repeat_prompt(output, *self.echoes[index])
        return super().write_choice(index, output)


def repeat_prompt(output: RequestOutput, text: str, token_texts: list[str]) -> RequestOutput:
    """Return an output that begins with its prompt, whose text is given."""
    whole: Any = {**output, "text": text + output["text"]}
    whole["token_ids"] = output["prompt_token_ids"] + output["token_ids"]
    if output["logprobs"] is not None:
        whole["logprobs"] = [*(output["prompt_logprobs"] or []), *output["logprobs"]]
        whole["token_texts"] = [*token_texts, *(output["token_texts"] or [])]
    return whole
