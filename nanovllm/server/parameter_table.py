"""The parameters of each endpoint. null means that a parameter is not given.

A parameter that is not in the table of its endpoint is an error, because it could change the
result. To add one, add its name to a table here, and read it in the file of the endpoint. A
sampling parameter only needs a field of SamplingParams.
"""

from dataclasses import fields
from enum import Enum, auto
from typing import Any

from nanovllm import SamplingParams
from nanovllm.server.neutral_parameters import IGNORED, NEUTRAL, PENALTY_RANGES


class Use(Enum):
    """What happens to a parameter."""

    READ = auto()
    IGNORED = auto()


# A list has the values at which a parameter changes nothing. Others are errors.
Table = dict[str, Use | list[Any]]


def read(names: str) -> Table:
    return dict.fromkeys(names.split(), Use.READ)


SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)} - {"prompt_logprobs"}
_TEMPLATE = read(
    """
    messages tools chat_template_kwargs reasoning_effort add_generation_prompt
    continue_final_message
    """
)
_COMMON: Table = {
    **dict.fromkeys(IGNORED.split(), Use.IGNORED),
    **{name: values for values, names in NEUTRAL for name in names.split()},
    **dict.fromkeys(SAMPLING_FIELDS, Use.READ),
    **read(PENALTY_RANGES),
    **read("model response_format stream stream_options"),
}
COMPLETION: Table = {
    **_COMMON,
    **read("prompt echo"),
    "add_special_tokens": [True],
    "top_logprobs": [0],
}
CHAT: Table = {
    **_COMMON,
    **_TEMPLATE,
    **read("include_reasoning max_completion_tokens parallel_tool_calls tool_choice top_logprobs"),
    "add_special_tokens": [False],
    "echo": [False],
}
TOKENIZE_PROMPT: Table = {
    **read("model prompt add_special_tokens"),
    "return_token_strs": [False],
}
TOKENIZE_CHAT: Table = {
    **read("model"),
    **_TEMPLATE,
    "add_special_tokens": [False],
    "return_token_strs": [False],
}
DETOKENIZE = read("model tokens")
STREAM_OPTIONS: Table = {
    **read("include_usage continuous_usage_stats"),
    "include_obfuscation": Use.IGNORED,
}
