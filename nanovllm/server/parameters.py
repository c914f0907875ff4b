"""The parameters of a request, and what each endpoint does with them.

https://platform.openai.com/docs/api-reference, with vLLM's extensions. A parameter that is not in
the table of its endpoint is an error, because it could change the result. null means that a
parameter is not given.
"""

from dataclasses import fields, replace
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.checks import check_bool, check_int, check_type, invalid, show
from nanovllm.engine.input_processor import PreparedPrompt
from nanovllm.server.errors import InvalidRequest, JsonObject, blaming

DEFAULT_MAX_TOKENS = 16  # for completions; a chat can use the rest of max_model_len
MAX_SAMPLES = 4096  # prompts times n of one request
MAX_LOGPROBS = 20  # OpenAI's limit

SAMPLING = "is a field of SamplingParams"
READ = "is read here or by Reply"
IGNORED = "does not change the result"
# A tuple has the accepted values of a parameter that is not supported: they change nothing.
Table = dict[str, str | tuple[Any, ...]]

_SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)} - {"prompt_logprobs"}
_COMMON: Table = {
    **dict.fromkeys(_SAMPLING_FIELDS, SAMPLING),
    "model": READ,
    "stream": READ,
    "stream_options": READ,
    "metadata": IGNORED,
    "prompt_cache_key": IGNORED,
    "request_id": IGNORED,
    "safety_identifier": IGNORED,
    "service_tier": IGNORED,
    "store": IGNORED,
    "user": IGNORED,
    "add_generation_prompt": (True,),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "priority": (0,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
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
    "logprobs": READ,  # a bool
    "max_completion_tokens": READ,
    "messages": READ,
    "top_logprobs": READ,
    "add_special_tokens": (False,),
    "echo": (False,),
}


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
        params = _parse_params(given, is_chat, llm)
    with blaming(given, default=prompt_name):
        prompts: Any = given.get(prompt_name)
        if is_chat:
            prompts = llm.encode_chats([prompts])
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
        if isinstance(use, str):
            given[name] = value
        elif (type(value), value) not in [(type(neutral), neutral) for neutral in use]:
            message = f"{show(name)} with the value {show(value)} is not supported: leave it out"
            raise InvalidRequest(message, name)
    return given


def _check_stream(given: JsonObject) -> None:
    is_stream = check_bool("stream", given.get("stream", False))
    if check_bool("echo", given.get("echo", False)) and is_stream:
        raise invalid("echo", "does not support 'stream': leave one of them out")
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


def _parse_params(given: JsonObject, is_chat: bool, llm: LLM) -> SamplingParams:
    options = {name: given[name] for name in _SAMPLING_FIELDS & given.keys()}
    options.setdefault("max_tokens", llm.max_model_len if is_chat else DEFAULT_MAX_TOKENS)
    if "max_completion_tokens" in given:
        max_tokens = check_int("max_completion_tokens", given["max_completion_tokens"], 1)
        options["max_tokens"] = max_tokens
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
