"""The parameters of each endpoint. null means that a parameter is not given.

A parameter that is not in the table of its endpoint is an error, because it could change the
result. To add one, add its name to a table here, and read it in the file of the endpoint. A
sampling parameter only needs a field of SamplingParams.
"""

from dataclasses import fields
from typing import Any, Literal

from nanovllm import SamplingParams

# What happens to a parameter. A list has the values at which it changes nothing. Other values are
# errors.
Table = dict[str, Literal["read", "ignored"] | list[Any]]

# Parameters that other servers have. Clients of llama.cpp, Ollama, vLLM, KoboldCpp and
# text-generation-webui always send some of them: hints on how to run the model, settings of
# samplers that are off, additional fields of a reply.
#
# These do not change the result, whatever their values are.
IGNORED = """
    metadata prediction prompt_cache_key prompt_cache_retention request_id safety_identifier
    service_tier store user verbosity

    api_server api_type backend_sampling cache_prompt id_slot keep_alive n_discard n_keep num_batch
    num_ctx num_gpu num_keep num_thread speculative_ngram truncation_length use_mlock use_mmap

    reasoning_control return_progress sse_ping_interval timings_per_token

    adaptive_decay dry_allowed_length dry_base dry_penalty_last_n dry_sequence_breakers
    dynatemp_exponent dynatemp_high dynatemp_low mirostat_eta mirostat_tau rep_pen_slope
    smoothing_curve xtc_threshold
"""
# Some values, and the names of parameters that do nothing at these values. A parameter that is not
# supported can thus be sent, as long as it is off.
NEUTRAL: list[tuple[list[Any], str]] = [
    (
        [True],
        """
        add_generation_prompt detokenize skip_special_tokens spaces_between_special_tokens
        add_bos_token do_sample
        """,
    ),
    (
        [False],
        """
        continue_final_message early_stopping include_stop_str_in_output return_token_ids
        return_tokens_as_token_ids use_beam_search
        post_sampling_probs return_tokens
        dynamic_temperature temperature_last
        ban_eos_token
        """,
    ),
    ([True, False], "include_reasoning parallel_tool_calls"),
    (
        [0],
        """
        priority n_probs min_length
        dry_multiplier dynatemp_range epsilon_cutoff eta_cutoff max_tokens_second min_keep mirostat
        mirostat_mode no_repeat_ngram_size penalty_alpha rep_pen_decay repetition_decay skew
        smoothing_factor top_a xtc_probability
        """,
    ),
    ([0, -1], "nsigma top_n_sigma"),
    ([-1, -0.01], "adaptive_target"),
    (
        [1],
        """
        best_of length_penalty rep_pen repeat_penalty
        encoder_repetition_penalty guidance_scale num_beams tfs tfs_z typ_p typical typical_p
        """,
    ),
    ([""], "suffix custom_token_bans grammar grammar_string negative_prompt"),
    (
        [[]],
        """
        bad_words documents functions logits_processors tools banned_strings lora stopping_strings
        """,
    ),
    ([{}], "chat_template_kwargs mm_processor_kwargs vllm_xargs"),
    ([["text"]], "modalities"),
    (["none"], "function_call"),
    (["none", "auto"], "tool_choice"),
    (["auto"], "reasoning_format"),
    ([], "max_new_tokens n_predict num_predict sampler_seed"),  # see SYNONYMS
]
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
PENALTY_RANGES = "rep_pen_range repeat_last_n repetition_penalty_range"


def read(names: str) -> Table:
    return dict.fromkeys(names.split(), "read")


SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)} - {"prompt_logprobs"}
_TEMPLATE = read(
    """
    messages tools chat_template_kwargs reasoning_effort add_generation_prompt
    continue_final_message
    """
)
_COMMON: Table = {
    **dict.fromkeys(IGNORED.split(), "ignored"),
    **{name: values for values, names in NEUTRAL for name in names.split()},
    **dict.fromkeys(SAMPLING_FIELDS, "read"),
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
    "include_obfuscation": "ignored",
}
