"""The scheduling policies that `bench.py --request-rate` compares."""

from collections.abc import Iterable
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.scheduler import POLICIES

# Budgets of policies that split prompts: one that keeps steps short, and the default of LLM.
TOKEN_BUDGETS = (128, Config.max_num_batched_tokens)


def list_policies(token_budgets: Iterable[int]) -> dict[str, dict[str, Any]]:
    """Return for each policy its name and the options of LLM that choose it."""
    policies: dict[str, dict[str, Any]] = {}
    for name, policy in POLICIES.items():
        if not policy.splits_prompts:
            policies[policy.title] = {"policy": name}
            continue
        for budget in token_budgets:
            options = {"policy": name, "max_num_batched_tokens": budget}
            policies[f"{policy.title}, budget {budget}"] = options
    return policies
