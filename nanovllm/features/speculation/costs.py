"""The cost model of drafts: how many draft tokens raise the expected tokens per second of a step.

The seconds of a step are measured when the engine starts, for several numbers of tokens:

    tokens of a step     1    2    4    8 ...     interpolated between them
    seconds              flat while a step is bound by memory: there, draft tokens are nearly free

A step is worth computing with a draft if expected tokens / seconds increases. Each draft token adds
the probability that it and all draft tokens before it are accepted.
"""

import timeit
from dataclasses import dataclass, replace

import numpy as np
import torch

from nanovllm.config import MAX_DRAFT_STEP
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.layers.sampler import find_best
from nanovllm.worker.dummy_steps import make_dummy_batch
from nanovllm.worker.worker import Worker

# Drafts must raise the predicted tokens per second by this factor. Smaller gains vanish, because
# sequences end at different times.
LEAST_GAIN = 1.05


@dataclass
class Candidate:
    """A draft token, and the probability that it and all before it are accepted."""

    probability: float
    seq: Sequence
    token_id: int


@dataclass
class StepCosts:
    """The seconds of steps.

    `plain[n]` and `with_drafts[n]` are those of a step of n tokens, in short contexts. Each context
    token of each query token adds `per_context_token`.
    """

    plain: list[float]  # up to one token for each sequence
    with_drafts: list[float]
    per_context_token: float = 0.0

    @property
    def max_num_tokens(self) -> int:
        """The tokens of the largest step that can have drafts."""
        return len(self.with_drafts) - 1

    def choose_count(self, step: Step, candidates: list[Candidate]) -> int:
        """Return how many candidates give the most expected tokens per second.

        `candidates` come in the order in which they would be added to the step.
        """
        num_tokens = sum(step.num_tokens)
        costs = self.plain if num_tokens < len(self.plain) else self.with_drafts
        attention_cost = 0.0
        expected = 0.0  # tokens of the step; a partial prefill samples none
        for seq, count, num_logits in step:
            attention_cost += self.per_context_token * len(seq.token_ids) * count
            expected += num_logits
        best_rate = LEAST_GAIN * expected / (costs[num_tokens] + attention_cost)
        best_count = 0
        for count, candidate in enumerate(candidates, 1):
            expected += candidate.probability
            attention_cost += self.per_context_token * len(candidate.seq.token_ids)
            cost = self.with_drafts[num_tokens + count] + attention_cost
            if expected > best_rate * cost:
                best_rate = expected / cost
                best_count = count
        return best_count


def measure_costs(worker: Worker, max_draft_len: int) -> StepCosts:
    """Measure the costs of steps. Must be called before the first request.

    A list ends where larger steps hardly reduce the cost per token. Steps are then compute-bound,
    and no draft pays.
    """

    def measure(num_tokens: int, draft_len: int, context_len: int = 1) -> float:
        """Seconds of a step of `num_tokens` tokens, in sequences of 1 + draft_len each."""
        query_lens = [1 + draft_len] * (num_tokens // (1 + draft_len))
        if sum(query_lens) < num_tokens:
            query_lens.append(num_tokens - sum(query_lens))
        batch = make_dummy_batch(worker, query_lens, num_computed_tokens=context_len - 1)
        all_rows = torch.arange(num_tokens, dtype=torch.int32, device="cpu")
        batch = replace(batch, logits_indices=all_rows)

        def run() -> None:
            find_best(worker.compute_logits(worker.execute(batch))).tolist()

        # The minimum of three, because the first run of a size may compile.
        return min(timeit.repeat(run, number=1, repeat=3))

    def measure_sizes(draft_len: int) -> list[float]:
        num_drafted = worker.plan.num_lanes * (1 + draft_len)
        limit = min(num_drafted, worker.max_num_batched_tokens, MAX_DRAFT_STEP)
        sizes = [0]
        seconds = [0.0]
        while sizes[-1] < limit:
            sizes.append(min(max(1, 2 * sizes[-1]), limit))
            seconds.append(measure(sizes[-1], draft_len))
            if sizes[-1] > 16 and seconds[-1] / sizes[-1] > 0.9 * seconds[-2] / sizes[-2]:
                break
        return np.interp(range(sizes[-1] + 1), sizes, seconds).tolist()

    plain = measure_sizes(0)
    with_drafts = measure_sizes(max_draft_len)
    num_tokens = min(1 + max_draft_len, len(with_drafts) - 1)
    long_cost = measure(num_tokens, max_draft_len, worker.max_model_len - max_draft_len)
    slowdown = max(0.0, long_cost - measure(num_tokens, max_draft_len))
    return StepCosts(plain, with_drafts, slowdown / (num_tokens * worker.max_model_len))
