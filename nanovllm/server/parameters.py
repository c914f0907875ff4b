"""Reads the parameters of a request. parameter_table.py lists them.

https://platform.openai.com/docs/api-reference, with vLLM's extensions.
"""

from dataclasses import replace
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.engine.input_processor import PreparedPrompt, Prompt
from nanovllm.llm import list_prompts
from nanovllm.server.constraints import constrain, delay_constraint
from nanovllm.server.errors import ApiError, JsonObject, blaming
from nanovllm.server.parameter_table import (
    CHAT,
    COMPLETION,
    DETOKENIZE,
    PENALTY_RANGES,
    SAMPLING_FIELDS,
    STREAM_OPTIONS,
    SYNONYMS,
    TOKENIZE_CHAT,
    TOKENIZE_PROMPT,
    Table,
    Use,
)
from nanovllm.text.chat_template import Tool
from nanovllm.utils.checks import (
    check_bool,
    check_choice,
    check_int,
    check_ints,
    check_type,
    invalid,
    naming,
    show,
)

DEFAULT_MAX_TOKENS = 16  # for completions; a chat can use the rest of max_model_len
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_SAMPLES = 4096  # prompts times n of one request
MAX_LOGPROBS = 20  # OpenAI's limit


def parse_request(
    body: JsonObject, is_chat: bool, llm: LLM, parses_reasoning: bool = False
) -> tuple[JsonObject, list[PreparedPrompt]]:
    """Return the parameters that are given and not ignored, and the prompts, which are checked.

    Raises ApiError, mostly with the engine's message.
    """
    prompt_name = "messages" if is_chat else "prompt"
    given = _select(body, CHAT if is_chat else COMPLETION)
    with blaming(given):
        _check_reply_options(given)
        tools = constrain(given, llm, is_chat)
        params = _parse_params(given, is_chat, llm)
    with blaming(given, default=prompt_name):
        prompts: Any = given.get(prompt_name)
        if is_chat:
            prompts = [_encode_chat(given, tools, llm)]
    with blaming(given, default="n" if "n" in given else prompt_name):
        # Before a grammar is compiled, because its limits grow with the number of samples.
        num_samples = params.n * len(list_prompts(prompts))
        check_int("the number of prompts times n", num_samples, 1, MAX_SAMPLES)
    with blaming(given, default=prompt_name):
        outputs: Any = params.structured_outputs
        if is_chat and parses_reasoning and outputs is not None:
            # The constraint alone, because behind reasoning it would fail only when that has ended.
            llm.grammar_compiler.compile(params, params.n)
            outputs = delay_constraint(outputs, given, prompts[0], llm)
            params = replace(params, structured_outputs=outputs)
        return given, llm.prepare_prompts(prompts, params)


def _select(body: JsonObject, table: Table, prefix: str = "") -> JsonObject:
    """Return the parameters that are given and not ignored. Raises ApiError for others.

    Errors name a field of an object with its `prefix`.
    """
    given: JsonObject = {}
    for name, value in body.items():
        use = table.get(name, [])
        if value is None or use is Use.IGNORED:
            continue
        value = _simplify(value)
        if use is Use.READ:
            given[name] = value
            continue
        accepted = list(use)
        synonym = SYNONYMS.get(name)
        if synonym in body:
            accepted.append(_simplify(body[synonym]))
        if (type(value), value) not in [(type(each), each) for each in accepted]:
            path = prefix + name
            advice = f"use {synonym}" if synonym in table else "leave it out"
            message = f"{show(path)} with the value {show(value)} is not supported: {advice}"
            raise ApiError(message, path)
    return given


def _simplify(value: Any) -> Any:
    """Return an int for an integer that is written as a float. JavaScript and Go can do so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_reply_options(given: JsonObject) -> None:
    is_stream = check_bool("stream", given.get("stream", False))
    check_bool("echo", given.get("echo", False))
    check_bool("include_reasoning", given.get("include_reasoning", True))
    if "stream_options" not in given:
        return
    if not is_stream:
        raise invalid("stream_options", "needs stream=true: set it, or leave it out")
    options = check_type("stream_options", given["stream_options"], (dict,), "an object")
    given["stream_options"] = _select(options, STREAM_OPTIONS, "stream_options.")
    for name, value in given["stream_options"].items():
        check_bool(f"stream_options.{name}", value)


def _parse_params(given: JsonObject, is_chat: bool, llm: LLM) -> SamplingParams:
    options = {name: given[name] for name in SAMPLING_FIELDS & given.keys()}
    options["max_tokens"] = _read_max_tokens(given, is_chat, llm.max_model_len)
    options["logprobs"] = _read_logprobs(given, is_chat)
    if given.get("echo"):
        options["prompt_logprobs"] = options["logprobs"]
    if "logit_bias" in given:
        options["logit_bias"] = _read_biases(given["logit_bias"])
    if options.get("seed") == -1:  # none, as in vLLM
        del options["seed"]
    params = replace(llm.get_default_sampling_params(), **options)
    for name in PENALTY_RANGES & given.keys():
        if params.repetition_penalty != 1 and given[name] not in (0, -1):
            raise invalid(name, "must be -1, because a repetition_penalty counts all tokens")
    return params


def _read_max_tokens(given: JsonObject, is_chat: bool, max_model_len: int) -> int:
    if "max_completion_tokens" in given:
        return check_int("max_completion_tokens", given["max_completion_tokens"], 1)
    default = max_model_len if is_chat else DEFAULT_MAX_TOKENS
    max_tokens = given.get("max_tokens", default)
    if is_chat and max_tokens == -1:  # llama.cpp's page sends it for no limit
        return default
    if given.get("echo"):  # 0 asks for the prompt alone, see Reply
        return max(1, check_int("max_tokens", max_tokens, 0))
    return max_tokens


def _read_logprobs(given: JsonObject, is_chat: bool) -> int | None:
    """Return the number of log probabilities. In a chat, `logprobs` is a bool."""
    if not is_chat:
        if "logprobs" not in given:
            return None
        return check_int("logprobs", given["logprobs"], 0, MAX_LOGPROBS)
    num_top = check_int("top_logprobs", given.get("top_logprobs", 0), 0, MAX_LOGPROBS)
    if check_bool("logprobs", given.get("logprobs", False)):
        return num_top
    if num_top > 0:
        raise invalid("top_logprobs", "needs logprobs=true: set it, or leave it out")
    return None


def _read_biases(biases: Any) -> dict[Any, Any]:
    """Return biases by token id, which JSON writes as a str."""
    check_type("logit_bias", biases, (dict,), "an object")
    # int() raises an error of its own above some thousand digits.
    return {int(i) if i.isdecimal() and len(i) < 20 else i: bias for i, bias in biases.items()}


def _encode_chat(given: JsonObject, tools: list[Tool], llm: LLM) -> Prompt:
    """Return the token ids of `messages`."""
    variables = given.get("chat_template_kwargs", {})
    check_type("chat_template_kwargs", variables, (dict,), "an object")
    if "reasoning_effort" in given:
        effort = check_choice("reasoning_effort", given["reasoning_effort"], REASONING_EFFORTS)
        variables = {"reasoning_effort": effort, **variables}
    messages: Any = given.get("messages")
    (prompt,) = llm.encode_chats(
        [messages],
        tools=tools,
        chat_template_kwargs=variables,
        add_generation_prompt=given.get("add_generation_prompt", True),
        continue_final_message=given.get("continue_final_message", False),
    )
    return prompt


def tokenize(body: JsonObject, llm: LLM) -> JsonObject:
    """Return the reply for `messages` or for a `prompt`."""
    is_chat = "messages" in body
    given = _select(body, TOKENIZE_CHAT if is_chat else TOKENIZE_PROMPT)
    with blaming(given, default="messages" if is_chat else "prompt"):
        if is_chat:
            ids = _encode_chat(given, given.get("tools", []), llm)
        else:
            prompt: Any = given.get("prompt")
            check_type("prompt", prompt, (str,), "a str")
            adds_special = given.get("add_special_tokens", True)
            check_bool("add_special_tokens", adds_special)
            ids = llm.input_processor.tokenize(prompt, adds_special)
    return {"tokens": ids, "count": len(ids), "max_model_len": llm.max_model_len}


def detokenize(body: JsonObject, llm: LLM) -> JsonObject:
    """Return the reply for `tokens`: their text, with special tokens."""
    given = _select(body, DETOKENIZE)
    with blaming(given, default="tokens"):
        tokens: Any = given.get("tokens")
        ids = check_ints("tokens", tokens, 0)
        check_int("tokens", max(ids, default=0), 0, llm.vocab_size - 1)
        if llm.tokenizer is None:
            raise invalid("tokens", "need a tokenizer, which the checkpoint does not have")
        with naming("the tokenizer cannot decode the tokens", Exception):
            return {"prompt": llm.tokenizer.decode(ids, clean_up_tokenization_spaces=False)}
