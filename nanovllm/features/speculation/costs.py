"""The cost model of drafts: how many draft tokens raise the expected tokens per second of a step.

    seconds of a step = fixed + per_token * tokens

The fixed part is the time to read the weights. It makes draft tokens nearly free in a step of few
tokens. Both parts are measured when the engine starts.

A step is worth computing with a draft if expected tokens / seconds increases. Each draft token adds
the probability that it and all draft tokens before it are accepted.
"""

import timeit
from dataclasses import dataclass, replace

import torch

from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.layers.sampler import find_best
from nanovllm.worker.dummy_steps import make_dummy_batch
from nanovllm.worker.worker import Worker

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
    """The seconds of steps. A step without drafts can have a lower fixed cost, as a CUDA graph."""

    fixed: float
    fixed_with_drafts: float
    per_token: float

    def choose_count(self, step: Step, candidates: list[Candidate]) -> int:
        """Return how many candidates give the most expected tokens per second.

        `candidates` come in the order in which they would be added to the step.
        """
        num_tokens = sum(step.num_tokens)
        expected = float(sum(step.num_logits))  # tokens of the step; a partial prefill samples none
        best_rate = LEAST_GAIN * expected / (self.fixed + self.per_token * num_tokens)
        best_count = 0
        for count, candidate in enumerate(candidates, 1):
            expected += candidate.probability
            cost = self.fixed_with_drafts + self.per_token * (num_tokens + count)
            if expected > best_rate * cost:
                best_rate = expected / cost
                best_count = count
        return best_count


def measure_costs(worker: Worker, max_draft_len: int) -> StepCosts:
    """Measure three steps. Must be called before the first request."""

    def measure(num_seqs: int, query_len: int) -> float:
        batch = make_dummy_batch(worker, [query_len] * num_seqs)
        all_rows = torch.arange(num_seqs * query_len, dtype=torch.int32, device="cpu")
        batch = replace(batch, logits_indices=all_rows)

        def run() -> None:
            find_best(worker.compute_logits(worker.execute(batch))).tolist()

        # The minimum of three, because the first run of a size may compile.
        return min(timeit.repeat(run, number=1, repeat=3))

    query_len = max(1, min(1 + max_draft_len, worker.max_num_batched_tokens // 2))
    num_seqs = max(2, min(NUM_MEASURED, worker.max_num_batched_tokens) // query_len)
    plain = measure(1, 1)
    one = measure(1, query_len)
    many = measure(num_seqs, query_len)
    per_token = max(0.0, many - one) / (query_len * (num_seqs - 1))
    fixed_with_drafts = max(0.0, one - per_token * query_len)
    return StepCosts(max(0.0, plain - per_token), fixed_with_drafts, per_token)
