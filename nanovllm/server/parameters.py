"""Reads the parameters that endpoints have in common. parameter_table.py lists all of them.

https://platform.openai.com/docs/api-reference, with vLLM's extensions.
"""

from dataclasses import replace
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.server.errors import ApiError, JsonObject, blaming
from nanovllm.server.parameter_table import (
    PENALTY_RANGES,
    SAMPLING_FIELDS,
    STREAM_OPTIONS,
    SYNONYMS,
    Table,
)
from nanovllm.server.replies import StreamOptions
from nanovllm.utils.checks import check_bool, check_int, check_type, invalid, show

MAX_SAMPLES = 4096  # prompts times n of one request
MAX_LOGPROBS = 20  # OpenAI's limit


def select(body: JsonObject, table: Table, prefix: str = "") -> JsonObject:
    """Return the parameters that are given and not ignored. Raises ApiError for others.

    Errors name a field of an object with its `prefix`.
    """
    given: JsonObject = {}
    for name, value in body.items():
        use = table.get(name, [])
        if value is None or use == "ignored":
            continue
        value = _simplify(value)
        if use == "read":
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


def _simplify(value: Any, depth: int = 2) -> Any:
    """Return an int for an integer that is written as a float, also in lists, as in vLLM."""
    if depth > 0 and isinstance(value, list) and not {float, list}.isdisjoint(map(type, value)):
        return [_simplify(each, depth - 1) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def read_stream_options(given: JsonObject) -> StreamOptions:
    is_stream = check_bool("stream", given.get("stream", False))
    name = "stream_options"
    if name not in given:
        return StreamOptions(is_stream)
    if not is_stream:
        raise invalid(name, "needs stream=true: set it, or leave it out")
    options = check_type(name, given[name], (dict,), "an object")
    options = select(options, STREAM_OPTIONS, f"{name}.")
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
    for name in PENALTY_RANGES.split():
        if params.repetition_penalty != 1 and given.get(name, -1) not in (0, -1):
            raise invalid(name, "must be -1, because a repetition_penalty counts all tokens")
    # Before a grammar is compiled, because its limits grow with the number of samples.
    with blaming(given, "n" if "n" in given else "prompt"):
        check_int("the number of prompts times n", params.n * num_prompts, 1, MAX_SAMPLES)
    return params
