"""POST /v1/completions: text that continues each prompt.

With `echo`, a choice begins with its prompt, which is scored if logprobs are requested.
max_tokens=0 then asks for the prompt alone. The engine generates a token even so, and the reply
leaves it out.
"""

from dataclasses import dataclass
from typing import Any

from nanovllm import LLM
from nanovllm.engine.input_processor import Prompt
from nanovllm.engine.outputs import RequestOutput
from nanovllm.llm import list_prompts
from nanovllm.server.constraints import choose_constraint
from nanovllm.server.engine_thread import Outputs
from nanovllm.server.errors import JsonObject, blaming
from nanovllm.server.parameters import (
    COMPLETION,
    MAX_LOGPROBS,
    read_params,
    read_stream_options,
    select,
)
from nanovllm.server.replies import Choice, Generation, Reply
from nanovllm.server.token_texts import TokenTexts
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.utils.checks import check_bool, check_int

DEFAULT_MAX_TOKENS = 16


def parse_completion(model: str, body: JsonObject, llm: LLM) -> Generation:
    """Return what a request generates, checked. `model` is its name in the reply.

    Raises ApiError, mostly with the engine's message.
    """
    given = select(body, COMPLETION)
    prompts: Any = given.get("prompt")
    sent = list_prompts(prompts)
    max_tokens: Any = given.get("max_tokens", DEFAULT_MAX_TOKENS)
    logprobs: Any = given.get("logprobs")
    with blaming(given):
        stream = read_stream_options(given)
        is_echo = check_bool("echo", given.get("echo", False))
        if is_echo:
            check_int("max_tokens", max_tokens, 0)
        if logprobs is not None:
            check_int("logprobs", logprobs, 0, MAX_LOGPROBS)
        constraint = choose_constraint(given)
        params = read_params(
            given,
            llm,
            num_prompts=len(sent),
            structured_outputs=constraint.outputs,
            max_tokens=max(1, max_tokens) if is_echo else max_tokens,
            logprobs=logprobs,
            prompt_logprobs=logprobs if is_echo else None,
        )
    with blaming(given, "prompt", constraint.source):
        prepared = llm.prepare_prompts(prompts, params)
    reply = CompletionReply(model, stream, llm.vocabulary, is_all=max_tokens == 0)
    if is_echo:
        texts = [_read_text(prompt, reply) for prompt in sent]
        reply.echo = [text for text in texts for _ in range(params.n)]
    return Generation(prepared, reply)


@dataclass
class CompletionReply(Reply):
    """Writes completions."""

    ID_PREFIX = "cmpl"
    KIND = "text_completion"
    CHUNK_KIND = KIND

    is_all: bool  # the prompt is all that is requested
    echo: list[str] | None = None  # for each choice the text of its prompt

    def take(self, outputs: Outputs) -> Outputs:
        if self.is_all:
            outputs = {index: _hide_token(output) for index, output in outputs.items()}
        return super().take(outputs)

    def make_choice(self, index: int, output: RequestOutput) -> Choice:
        choice = CompletionChoice()
        prompt = output["prompt_token_ids"]
        if output["logprobs"] is not None:
            choice.texts = TokenTexts(self.vocabulary, prompt if self.echo is None else [])
        if self.echo is not None:
            choice.echo = self.echo[index]
            if choice.texts is not None:
                entries = output["prompt_logprobs"] or []
                choice.logprobs = choice.texts.write_completion(prompt, entries, self.is_all)
                choice.texts.offset = len(choice.echo)
        return choice


class CompletionChoice(Choice):
    """Writes one completion. It begins with what it repeats of the prompt."""

    texts: TokenTexts | None = None  # if log probabilities are requested
    echo = ""
    logprobs: JsonObject | None = None

    def write_part(self, part: RequestOutput) -> JsonObject:
        choice: JsonObject = {"text": self.echo + part["text"]}
        if self.texts is not None:
            is_last = part["finish_reason"] is not None
            new = self.texts.write_completion(part["token_ids"], part["logprobs"] or [], is_last)
            before = self.logprobs or {}
            choice["logprobs"] = {name: before.get(name, []) + new[name] for name in new}
        self.echo = ""
        self.logprobs = None
        return choice


def _read_text(prompt: Prompt, reply: CompletionReply) -> str:
    """Return a prompt as it was sent. A prompt of token ids is decoded.

    A character that the prompt begins and the completion continues belongs to the completion.
    """
    tokenizer = reply.vocabulary.tokenizer
    if isinstance(prompt, str):
        return prompt
    return "" if tokenizer is None else Detokenizer(tokenizer, []).read(prompt, reply.is_all)


def _hide_token(output: RequestOutput) -> RequestOutput:
    """Return an output without the only token, which was generated although none was requested."""
    hidden: RequestOutput = {**output, "text": "", "token_ids": [], "finish_reason": "length"}
    if output["logprobs"] is not None:
        hidden["logprobs"] = []
    return hidden
