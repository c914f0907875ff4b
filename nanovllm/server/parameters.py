"""The parameters of completions, and how those that they have in common are read.

null means that a parameter is not given. Every parameter that an endpoint does not read is an error
that names it, because it could change the result, unless its value says nothing: "", [] and {}, or
a value of NEUTRAL. false and 0 say nothing only where they are the default. To add a parameter, add
its name to a set here, and read it in the file of the endpoint. A sampling parameter only needs a
field of SamplingParams.

https://platform.openai.com/docs/api-reference, with vLLM's extensions.
"""

from collections.abc import Set
from dataclasses import fields, replace
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.server.errors import ApiError, JsonObject
from nanovllm.server.replies import StreamOptions
from nanovllm.utils.checks import check_bool, check_type, invalid, show

MAX_SAMPLES = 4096  # prompts times n of one request
MAX_LOGPROBS = 20  # OpenAI's limit

# What clients of OpenAI and vLLM send, and what changes no token.
IGNORED = set(
    """
    include_obfuscation metadata prediction prompt_cache_key prompt_cache_retention request_id
    safety_identifier service_tier store user verbosity
    """.split()
)
# Values that say nothing, because they are the default of the parameters beside them. 0 is False.
NEUTRAL: list[tuple[Any, str]] = [
    (
        False,
        """
        continue_final_message early_stopping echo include_stop_str_in_output parallel_tool_calls
        priority return_token_ids return_token_strs return_tokens_as_token_ids stream top_logprobs
        use_beam_search
        """,
    ),
    (
        True,
        """
        add_generation_prompt add_special_tokens detokenize include_reasoning parallel_tool_calls
        skip_special_tokens spaces_between_special_tokens
        """,
    ),
    (1, "best_of length_penalty"),
    ("none", "function_call tool_choice"),
    ("auto", "tool_choice"),
    (["text"], "modalities"),
]

SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)} - {
    "logits_processors",
    "prompt_logprobs",
}
COMMON = SAMPLING_FIELDS | {"model", "response_format", "stream", "stream_options"}
COMPLETION = COMMON | {"prompt", "echo"}
TOKENIZE_CHAT = set(
    """
    model messages tools chat_template_kwargs enable_thinking reasoning_effort
    add_generation_prompt add_special_tokens continue_final_message
    """.split()
)
CHAT = COMMON | TOKENIZE_CHAT
CHAT |= set(
    """
    include_reasoning max_completion_tokens parallel_tool_calls tool_choice top_logprobs
    """.split()
)


def select(body: JsonObject, names: Set[str], prefix: str = "") -> JsonObject:
    """Return the parameters with these names that are given. Raises ApiError for others.

    Errors name a field of an object with its `prefix`.
    """
    given: JsonObject = {}
    for name, value in body.items():
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # as in vLLM
        if value is None:
            continue
        if name in names:
            given[name] = value
            continue
        neutral = [default for default, others in NEUTRAL if name in others.split()]
        if value not in ("", [], {}, *neutral) and name not in IGNORED:
            path = prefix + name
            message = f"{show(path)} with the value {show(value)} is not supported: leave it out"
            raise ApiError(message, path)
    return given


def read_stream_options(given: JsonObject) -> StreamOptions:
    is_stream = check_bool("stream", given.get("stream", False))
    name = "stream_options"
    options = check_type(name, given.get(name, {}), (dict,), "an object")
    options = select(options, {"include_usage", "continuous_usage_stats"}, f"{name}.")
    if options and not is_stream:
        raise invalid(name, "needs stream=true: set it, or leave it out")
    for field, value in options.items():
        check_bool(f"{name}.{field}", value)
    return StreamOptions(is_stream, **options)


def read_params(given: JsonObject, llm: LLM, num_prompts: int, **options: Any) -> SamplingParams:
    """Return the sampling parameters. `options` are those that each endpoint reads in its way."""
    options = {**{name: given[name] for name in SAMPLING_FIELDS & given.keys()}, **options}
    if "logit_bias" in given:
        biases = check_type("logit_bias", given["logit_bias"], (dict,), "an object")
        # JSON writes a token id as a str. int() raises its own error above some thousand digits.
        options["logit_bias"] = {
            int(i) if i.isdecimal() and len(i) < 20 else i: bias for i, bias in biases.items()
        }
    if options.get("seed") == -1:  # none, as in vLLM
        del options["seed"]
    params = replace(llm.get_default_sampling_params(), **options)
    # Before a grammar is compiled, because its limits grow with the number of samples.
    num_samples = params.n * num_prompts
    if not 1 <= num_samples <= MAX_SAMPLES:
        limits = f"must be at least 1 and at most {MAX_SAMPLES}, not {num_samples}"
        name = "n" if "n" in given else "prompt"
        raise ApiError(f"the number of prompts times n {limits}", name)
    return params
