"""The parameters of each endpoint. null means that a parameter is not given.

A parameter that is not in the table of its endpoint is an error, because it could change the
result. Clients of other servers always send neutral values, settings of samplers that are off, and
hints on how to run the model. These do not change the result, so they are accepted.
"""

from dataclasses import fields
from enum import Enum, auto
from typing import Any

from nanovllm import SamplingParams


class Use(Enum):
    """What happens to a parameter."""

    READ = auto()  # by parameters.py or by Reply
    IGNORED = auto()  # because it does not change the result


# A list has the accepted values of a parameter that is not supported: they change nothing.
Table = dict[str, Use | list[Any]]


def make_table(*uses: tuple[Use | list[Any], str]) -> Table:
    """Map names to uses, from pairs of a use and the names that have it.

    A later pair overrides an earlier one.
    """
    return {name: use for use, names in uses for name in names.split()}


# Parameters of OpenAI and vLLM that have no effect, or only at other values.
_NEUTRAL = make_table(
    (Use.IGNORED, "metadata prediction prompt_cache_key prompt_cache_retention request_id"),
    (Use.IGNORED, "safety_identifier service_tier store user verbosity"),
    ([True], "add_generation_prompt detokenize skip_special_tokens"),
    ([True], "spaces_between_special_tokens"),
    ([False], "continue_final_message early_stopping include_stop_str_in_output"),
    ([False], "return_token_ids return_tokens_as_token_ids use_beam_search"),
    ([True, False], "include_reasoning parallel_tool_calls"),
    ([0], "priority"),
    ([1], "best_of length_penalty"),
    ([[]], "bad_words documents functions logits_processors tools"),
    ([{}], "chat_template_kwargs mm_processor_kwargs vllm_xargs"),
    ([""], "suffix"),
    ([["text"]], "modalities"),
    (["none"], "function_call"),
    (["none", "auto"], "tool_choice"),
    # llama.cpp, Ollama, text-generation-webui and KoboldCpp: how to run the model.
    (Use.IGNORED, "backend_sampling cache_prompt id_slot keep_alive n_discard n_keep num_batch"),
    (Use.IGNORED, "num_ctx num_gpu num_keep num_thread speculative_ngram truncation_length"),
    (Use.IGNORED, "use_mlock use_mmap api_server api_type"),
    # Additional fields of the reply.
    (Use.IGNORED, "reasoning_control return_progress sse_ping_interval timings_per_token"),
    ([False], "post_sampling_probs return_tokens"),
    ([0], "n_probs"),
    (["auto"], "reasoning_format"),
    # Settings of samplers that are off.
    (Use.IGNORED, "adaptive_decay dry_allowed_length dry_base dry_penalty_last_n"),
    (Use.IGNORED, "dry_sequence_breakers dynatemp_exponent dynatemp_high dynatemp_low"),
    (Use.IGNORED, "mirostat_eta mirostat_tau rep_pen_slope smoothing_curve xtc_threshold"),
    # Values that turn a sampler or a filter off.
    ([0], "dry_multiplier dynatemp_range epsilon_cutoff eta_cutoff max_tokens_second min_keep"),
    ([0], "mirostat mirostat_mode no_repeat_ngram_size penalty_alpha rep_pen_decay"),
    ([0], "repetition_decay skew smoothing_factor top_a xtc_probability"),
    ([0, -1], "nsigma top_n_sigma"),
    ([-1, -0.01], "adaptive_target"),
    ([1], "encoder_repetition_penalty guidance_scale num_beams tfs tfs_z typ_p typical typical_p"),
    ([True], "add_bos_token do_sample"),
    ([False], "dynamic_temperature temperature_last"),
    ([""], "custom_token_bans grammar grammar_string negative_prompt"),
    ([[]], "banned_strings lora"),
    # Other names of parameters, see SYNONYMS.
    ([1], "rep_pen repeat_penalty"),
    ([0], "min_length"),
    ([False], "ban_eos_token"),
    ([[]], "stopping_strings"),
    ([], "max_new_tokens n_predict num_predict sampler_seed"),
)
# Names that other servers have for a parameter. Some clients send all of them, so a value that
# repeats that of the parameter is accepted.
SYNONYMS = {
    "ban_eos_token": "ignore_eos",
    "max_new_tokens": "max_tokens",
    "min_length": "min_tokens",
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "num_predict": "max_tokens",
    "rep_pen": "repetition_penalty",
    "repeat_penalty": "repetition_penalty",
    "sampler_seed": "seed",
    "stopping_strings": "stop",
}
# How many tokens a repetition penalty counts. 0 and -1 mean all of them, as in SillyTavern.
PENALTY_RANGES = {"rep_pen_range", "repeat_last_n", "repetition_penalty_range"}
SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)} - {"prompt_logprobs"}
_TEMPLATE = "messages tools chat_template_kwargs reasoning_effort"
_TEMPLATE += " add_generation_prompt continue_final_message"
_COMMON: Table = {
    **_NEUTRAL,
    **dict.fromkeys(SAMPLING_FIELDS | PENALTY_RANGES, Use.READ),
    **make_table((Use.READ, "model response_format stream stream_options")),
}
COMPLETION: Table = {
    **_COMMON,
    **make_table((Use.READ, "echo prompt"), ([True], "add_special_tokens"), ([0], "top_logprobs")),
}
CHAT: Table = {
    **_COMMON,
    **make_table(
        (Use.READ, _TEMPLATE),
        (Use.READ, "include_reasoning max_completion_tokens parallel_tool_calls tool_choice"),
        (Use.READ, "logprobs top_logprobs"),  # in a chat, logprobs is a bool
        ([False], "add_special_tokens echo"),
    ),
}
TOKENIZE_PROMPT = make_table(
    (Use.READ, "model prompt add_special_tokens"), ([False], "return_token_strs")
)
TOKENIZE_CHAT = make_table(
    (Use.READ, "model"), (Use.READ, _TEMPLATE), ([False], "add_special_tokens return_token_strs")
)
DETOKENIZE = make_table((Use.READ, "model tokens"))
STREAM_OPTIONS = make_table(
    (Use.READ, "include_usage continuous_usage_stats"), (Use.IGNORED, "include_obfuscation")
)
