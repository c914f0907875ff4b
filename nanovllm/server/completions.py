"""POST /v1/completions: text that continues each prompt.

With `echo`, a choice begins with its prompt, which is scored if logprobs are requested.
max_tokens=0 then asks for the prompt alone. The engine generates a token even so, and the reply
leaves it out. lm-evaluation-harness scores texts in this way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm import LLM
from nanovllm.engine.input_processor import Prompt
from nanovllm.llm import list_prompts
from nanovllm.outputs import RequestOutput
from nanovllm.server.constraints import choose_constraint, choose_tools
from nanovllm.server.engine_thread import Outputs
from nanovllm.server.errors import JsonObject, blaming
from nanovllm.server.logprobs import LogprobsWriter
from nanovllm.server.parameter_table import COMPLETION
from nanovllm.server.parameters import (
    MAX_LOGPROBS,
    read_params,
    read_stream_options,
    select,
)
from nanovllm.server.replies import Generation, Reply
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.vocabulary import Vocabulary
from nanovllm.utils.checks import check_bool, check_int

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True)
class Echo:
    """What the choices of a reply repeat."""

    prompts: Sequence[Prompt]  # as sent
    num_samples: int  # choices for each prompt
    is_all: bool  # the reply has nothing else

    def read_text(self, index: int, vocabulary: Vocabulary) -> str:
        """Return the prompt of a choice as it was sent. A prompt of token ids is decoded.

        A character that the prompt begins and the completion continues belongs to the completion.
        """
        prompt = self.prompts[index // self.num_samples]
        if isinstance(prompt, str):
            return prompt
        if vocabulary.tokenizer is None:
            return ""
        return Detokenizer(vocabulary.tokenizer, []).read(prompt, is_last=self.is_all)


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
        tools = choose_tools(given)  # none: the table accepts only neutral values
        constraint = choose_constraint(given, tools)
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
    echo = Echo(sent, params.n, is_all=max_tokens == 0) if is_echo else None
    return Generation(prepared, CompletionReply(model, stream, llm.vocabulary, echo))


@dataclass
class CompletionReply(Reply):
    """Writes completions."""

    ID_PREFIX = "cmpl"
    KIND = "text_completion"
    CHUNK_KIND = KIND

    echo: Echo | None

    def take(self, outputs: Outputs) -> Outputs:
        if self.echo is not None and self.echo.is_all:
            outputs = {index: _hide_tokens(output) for index, output in outputs.items()}
        return super().take(outputs)

    def write_part(self, index: int, part: RequestOutput, is_first: bool) -> JsonObject:
        echoed = ""
        if is_first and self.echo is not None:
            echoed = self.echo.read_text(index, self.vocabulary)
        choice: JsonObject = {"text": echoed + part["text"]}
        if part["logprobs"] is None:
            return choice
        prompt = part["prompt_token_ids"]
        if is_first:
            context = prompt if self.echo is None else []
            self.writers[index] = LogprobsWriter(self.vocabulary, context)
        writer = self.writers[index]
        before: JsonObject = {}
        if is_first and self.echo is not None:
            entries = part["prompt_logprobs"] or []
            before = writer.write_completion(prompt, entries, is_last=self.echo.is_all)
            writer.offset = len(echoed)
        is_last = part["finish_reason"] is not None
        new = writer.write_completion(part["token_ids"], part["logprobs"], is_last)
        choice["logprobs"] = {name: before.get(name, []) + new[name] for name in new}
        return choice


def _hide_tokens(output: RequestOutput) -> RequestOutput:
    """Return an output without the token that was generated although none was requested."""
    hidden: RequestOutput = {**output, "text": "", "token_ids": []}
    if output["logprobs"] is not None:
        hidden["logprobs"] = []
    if output["finish_reason"] == "stop":  # because of the token that is not shown
        hidden["finish_reason"] = "length"
    return hidden
