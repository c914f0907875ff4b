"""The scheduling policies that `bench.py --request-rate` compares.

No other file of the benchmark knows how a policy is chosen.
"""

from collections.abc import Iterable
from typing import Any

from nanovllm.config import Config

OPTION = "enable_chunked_prefill"  # the option of LLM that chooses the policy
# Budgets of mixed steps: one that keeps steps short, and the default of LLM.
TOKEN_BUDGETS = (128, Config.max_num_batched_tokens)


def list_policies(token_budgets: Iterable[int]) -> dict[str, dict[str, Any]]:
    """Return for each policy its name and the options of LLM that choose it."""
    policies: dict[str, dict[str, Any]] = {}
    for budget in token_budgets:
        policies[f"mixed, budget {budget}"] = {OPTION: True, "max_num_batched_tokens": budget}
    policies["prefill first"] = {OPTION: False}
    return policies


def splits_prompts(config: Config) -> bool:
    """Return whether a prompt that exceeds the token budget is computed in chunks."""
    return config.enable_chunked_prefill
