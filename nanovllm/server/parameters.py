"""The parameters of a request, and what each endpoint does with them.

https://platform.openai.com/docs/api-reference, with vLLM's extensions. A parameter that is not in
the table of its endpoint is an error, because it could change the result. null means that a
parameter is not given.
"""

from dataclasses import fields, replace
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.checks import (
    check_bool,
    check_choice,
    check_int,
    check_ints,
    check_type,
    invalid,
    show,
)
from nanovllm.engine.input_processor import PreparedPrompt, Prompt
from nanovllm.messages import Tool
from nanovllm.server.errors import InvalidRequest, JsonObject, blaming
from nanovllm.server.tools import choose_tools, write_grammar

DEFAULT_MAX_TOKENS = 16  # for completions; a chat can use the rest of max_model_len
MAX_SAMPLES = 4096  # prompts times n of one request
MAX_LOGPROBS = 20  # OpenAI's limit
FORMATS = ("text", "json_object", "json_schema")

SAMPLING = "is a field of SamplingParams"
READ = "is read here or by Reply"
IGNORED = "does not change the result"
# A tuple has the accepted values of a parameter that is not supported: they change nothing.
Table = dict[str, str | tuple[Any, ...]]

_SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)} - {"prompt_logprobs"}
_TEMPLATE_FLAGS = ("add_generation_prompt", "continue_final_message")
_TEMPLATE_FIELDS = ("messages", "tools", "chat_template_kwargs", "reasoning_effort")
_COMMON: Table = {
    **dict.fromkeys(_SAMPLING_FIELDS, SAMPLING),
    **dict.fromkeys(("model", "response_format", "stream", "stream_options"), READ),
    **dict.fromkeys(
        (
            "metadata",
            "prediction",
            "prompt_cache_key",
            "prompt_cache_retention",
            "request_id",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
            "verbosity",
        ),
        IGNORED,
    ),
    **dict.fromkeys(
        ("bad_words", "documents", "functions", "logits_processors", "tools"),
        ([],),
    ),
    **dict.fromkeys(("chat_template_kwargs", "mm_processor_kwargs", "vllm_xargs"), ({},)),
    **dict.fromkeys(
        (
            "continue_final_message",
            "early_stopping",
            "include_stop_str_in_output",
            "return_token_ids",
            "return_tokens_as_token_ids",
            "use_beam_search",
        ),
        (False,),
    ),
    **dict.fromkeys(
        (
            "add_generation_prompt",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
        ),
        (True,),
    ),
    **dict.fromkeys(("best_of", "length_penalty"), (1,)),
    **dict.fromkeys(("include_reasoning", "parallel_tool_calls"), (True, False)),
    "function_call": ("none",),
    "modalities": (["text"],),
    "priority": (0,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
}
COMPLETION: Table = {
    **_COMMON,
    "echo": READ,
    "prompt": READ,
    "add_special_tokens": (True,),
    "top_logprobs": (0,),
}
CHAT: Table = {
    **_COMMON,
    **dict.fromkeys(
        (
            *_TEMPLATE_FIELDS,
            *_TEMPLATE_FLAGS,
            "include_reasoning",
            "logprobs",  # a bool
            "max_completion_tokens",
            "parallel_tool_calls",
            "tool_choice",
            "top_logprobs",
        ),
        READ,
    ),
    "add_special_tokens": (False,),
    "echo": (False,),
}
TOKENIZE: dict[bool, Table] = {
    False: dict.fromkeys(("model", "prompt", "add_special_tokens"), READ),
    True: dict.fromkeys(("model", *_TEMPLATE_FIELDS, *_TEMPLATE_FLAGS), READ),
}
DETOKENIZE: Table = dict.fromkeys(("model", "tokens"), READ)


def parse_request(
    body: JsonObject, is_chat: bool, llm: LLM
) -> tuple[JsonObject, list[PreparedPrompt]]:
    """Return the parameters that are given and not ignored, and the prompts, which are checked.

    Raises InvalidRequest, mostly with the engine's message.
    """
    prompt_name = "messages" if is_chat else "prompt"
    given = _select(body, CHAT if is_chat else COMPLETION)
    with blaming(given):
        _check_stream(given)
        _read_constraint(given)
        tools = _read_tools(given, llm) if is_chat else []
        params = _parse_params(given, is_chat, llm)
    with blaming(given, default=prompt_name):
        prompts: Any = given.get(prompt_name)
        if is_chat:
            prompts = [encode_chat(given, tools, llm)]
        checked = llm.prepare_prompts(prompts, params)
        check_int("the number of prompts", len(checked), 1, MAX_SAMPLES)
    with blaming(given, default="n"):
        check_int("the number of prompts times n", len(checked) * params.n, 1, MAX_SAMPLES)
    return given, checked


def _select(body: JsonObject, table: Table) -> JsonObject:
    """Return the parameters that are given and not ignored. Raises InvalidRequest for others."""
    given: JsonObject = {}
    for name, value in body.items():
        use = table.get(name, ())
        if value is None or use == IGNORED:
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # JavaScript and Go can write 16 as 16.0
        if isinstance(use, str):
            given[name] = value
        elif (type(value), value) not in [(type(neutral), neutral) for neutral in use]:
            message = f"{show(name)} with the value {show(value)} is not supported: leave it out"
            raise InvalidRequest(message, name)
    return given


def _check_stream(given: JsonObject) -> None:
    is_stream = check_bool("stream", given.get("stream", False))
    check_bool("echo", given.get("echo", False))
    if "stream_options" not in given:
        return
    if not is_stream:
        raise invalid("stream_options", "needs stream=true: set it, or leave it out")
    options = check_type("stream_options", given["stream_options"], (dict,), "an object")
    for name, value in options.items():
        if name in ("include_usage", "include_obfuscation"):
            check_bool(f"stream_options.{name}", False if value is None else value)
        elif (name, value) != ("continuous_usage_stats", False) and value is not None:
            raise invalid(f"stream_options.{show(name)}", "is not supported: leave it out")


def _read_constraint(given: JsonObject) -> None:
    """Turn response_format into structured_outputs."""
    if "response_format" not in given:
        return
    text = check_type("response_format", given["response_format"], (dict,), "an object")
    kind = check_choice("response_format.type", text.get("type"), FORMATS)
    if kind == "json_object":
        _constrain(given, "response_format", {"json_object": True})
    elif kind == "json_schema":
        name = "response_format.json_schema"
        described = check_type(name, text.get("json_schema"), (dict,), "an object with a schema")
        schema = check_type(f"{name}.schema", described.get("schema"), (dict,), "a JSON schema")
        _constrain(given, "response_format", {"json": schema})


def _read_tools(given: JsonObject, llm: LLM) -> list[Tool]:
    """Return the tools for the template. Keep in `given` those that the reply may call."""
    given["tools"], required = choose_tools(given)
    is_parallel = check_bool("parallel_tool_calls", given.get("parallel_tool_calls", True))
    check_bool("include_reasoning", given.get("include_reasoning", True))
    if required:
        _constrain(given, "tool_choice", {"grammar": write_grammar(required, is_parallel)})
        if not llm.template_uses_tools:
            return []
    return given["tools"]


def _constrain(given: JsonObject, name: str, structured_outputs: JsonObject) -> None:
    if "structured_outputs" in given:
        raise invalid(name, "and structured_outputs or response_format exclude each other")
    given["structured_outputs"] = structured_outputs


def encode_chat(given: JsonObject, tools: list[Tool], llm: LLM) -> Prompt:
    """Return the token ids of `messages`."""
    variables = given.get("chat_template_kwargs", {})
    check_type("chat_template_kwargs", variables, (dict,), "an object")
    if "reasoning_effort" in given:
        variables = {"reasoning_effort": given["reasoning_effort"], **variables}
    options = {name: given[name] for name in _TEMPLATE_FLAGS if name in given}
    messages: Any = given.get("messages")
    return llm.encode_chats([messages], tools, variables, **options)[0]


def tokenize(body: JsonObject, llm: LLM) -> Prompt:
    """Return the token ids of `messages` or of a `prompt`."""
    is_chat = "messages" in body
    given = _select(body, TOKENIZE[is_chat])
    with blaming(given, default="messages" if is_chat else "prompt"):
        if is_chat:
            return encode_chat(given, given.get("tools", []), llm)
        prompt: Any = given.get("prompt")
        check_type("prompt", prompt, (str,), "a str")
        return llm.input_processor.tokenize(prompt, given.get("add_special_tokens", True))


def detokenize(body: JsonObject, llm: LLM) -> str:
    """Return the text of `tokens`, with special tokens."""
    given = _select(body, DETOKENIZE)
    with blaming(given, default="tokens"):
        tokens: Any = given.get("tokens")
        token_ids = check_ints("tokens", tokens, 0)
        check_int("tokens", max(token_ids, default=0), 0, llm.vocab_size - 1)
        if llm.tokenizer is None:
            raise invalid("tokens", "need a tokenizer, which the checkpoint does not have")
        return str(llm.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))


def _parse_params(given: JsonObject, is_chat: bool, llm: LLM) -> SamplingParams:
    options = {name: given[name] for name in _SAMPLING_FIELDS & given.keys()}
    options.setdefault("max_tokens", llm.max_model_len if is_chat else DEFAULT_MAX_TOKENS)
    if "max_completion_tokens" in given:
        max_tokens = check_int("max_completion_tokens", given["max_completion_tokens"], 1)
        options["max_tokens"] = max_tokens
    if "logit_bias" in options:
        biases = check_type("logit_bias", options["logit_bias"], (dict,), "an object")
        options["logit_bias"] = {int(i) if i.isdecimal() else i: biases[i] for i in biases}
    seed = options.get("seed")
    if isinstance(seed, int) and seed == -1:  # none, as in vLLM
        del options["seed"]
    if is_chat:  # `logprobs` is a bool, and `top_logprobs` their number
        wants_logprobs = check_bool("logprobs", options.pop("logprobs", False))
        if wants_logprobs:
            options["logprobs"] = given.get("top_logprobs", 0)
        elif given.get("top_logprobs"):
            raise invalid("top_logprobs", "needs logprobs=true: set it, or leave it out")
    if "logprobs" in options:
        name = "top_logprobs" if is_chat else "logprobs"
        check_int(name, options["logprobs"], 0, MAX_LOGPROBS)
    if given.get("echo"):
        options["prompt_logprobs"] = options.get("logprobs")
        if options["max_tokens"] == 0:  # the prompt alone, see Reply
            options["max_tokens"] = 1
    return replace(llm.get_default_sampling_params(), **options)
