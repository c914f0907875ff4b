"""The cost model of drafts: how many draft tokens raise the expected tokens per second of a step.

    seconds of a step = seconds of a step of one token * (1 + per_token * (tokens - 1))

Most of a short step is the time to read the weights, which makes draft tokens nearly free.
`per_token` depends on the machine, the model and its format, so it is measured when the engine
starts. So is `per_pass`, what an MTP head adds for each token of the longest draft.

A step is worth computing with a draft if expected tokens / seconds increases. Each draft token adds
the probability that it and all draft tokens before it are accepted.
"""

import timeit
from dataclasses import dataclass, replace
from typing import cast

import torch

from nanovllm.batch.packing import copy_to
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.layers.sampler import find_best
from nanovllm.models.mtp import DraftingLM
from nanovllm.worker.dummy_steps import make_dummy_batch
from nanovllm.worker.executor import Executor

# Drafts must raise the predicted tokens per second by this factor. Smaller gains vanish, because
# sequences end at different times.
LEAST_GAIN = 1.05
NUM_MEASURED = 64  # tokens of the larger step that is measured


@dataclass
class Candidate:
    """A draft token, and the probability that it and all before it are accepted."""

    probability: float
    seq: Sequence
    token_id: int


@dataclass
class StepCosts:
    """What each token after the first one adds to a step, as a share of a step of one token."""

    per_token: float
    per_pass: float = 0.0  # what each pass of an MTP head adds

    def choose_count(self, step: Step, additions: list[tuple[float, float]]) -> int:
        """Return how many additions to a step give the most expected tokens per second.

        Each adds to the time of the step, in units of a step of one token, and to the number of
        expected tokens. They are made in this order.
        """
        cost = 1 + self.per_token * (sum(step.num_tokens) - 1)
        expected = float(sum(step.num_logits))  # tokens of the step; a partial prefill samples none
        best_rate = LEAST_GAIN * expected / cost
        best_count = 0
        for count, (more_cost, more_expected) in enumerate(additions, 1):
            cost += more_cost
            expected += more_expected
            if expected > best_rate * cost:
                best_rate = expected / cost
                best_count = count
        return best_count


def measure_costs(executor: Executor, max_draft_len: int) -> StepCosts:
    """Measure a step of one token and two larger ones. Must be called before the first request.

    `per_token` is the larger of both slopes, because the first draft token costs most where decodes
    replay CUDA graphs and steps with drafts do not (flash-attn).
    """

    worker = executor.worker

    def measure(num_tokens: int) -> float:
        batch = make_dummy_batch(worker, [num_tokens])
        all_rows = torch.arange(num_tokens, dtype=torch.int32, device="cpu")
        batch = replace(batch, logits_indices=all_rows)

        def run() -> None:
            find_best(executor.execute(batch, lambda hidden, start, logits: logits(None))).tolist()

        # The minimum of three, because the first run of a size may compile.
        return min(timeit.repeat(run, number=1, repeat=3))

    def run_head() -> None:
        model = cast(DraftingLM, worker.model)
        batch = copy_to(make_dummy_batch(worker, [1]), worker.device)
        find_best(model.compute_logits(model.draft(batch, worker.kv_caches))).tolist()

    most = min(worker.max_num_batched_tokens, worker.max_model_len)
    one = measure(1)
    per_token = 0.0
    for size in (1 + max_draft_len, NUM_MEASURED):
        num_tokens = min(size, most)
        if num_tokens > 1:
            growth = measure(num_tokens) / one - 1
            per_token = max(per_token, growth / (num_tokens - 1))
    per_pass = 0.0
    if worker.has_mtp_head:
        per_pass = min(timeit.repeat(run_head, number=1, repeat=3)) / one
    return StepCosts(per_token, per_pass)
