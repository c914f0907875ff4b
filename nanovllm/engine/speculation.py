"""Speculative decoding that changes no token: which guesses a step computes, and what became of them.

    token_ids | ... a b c |              c is the newest token: this step computes it and draws what comes after it
    draft     |           | d e f        guesses, computed in the same step
    drawn     |         d | e x y        d and e were right, so e and x are drawn as in steps of their own; y is worthless

A token is a function of the tokens before it, also a sampled one, since noise is a function of seed and position. So a guess is
right exactly if it equals the token drawn in its place (as in Leviathan et al. 2023, but without their rejection sampling).

A draft costs time. The costs of steps are measured when the engine starts; a step computes those guesses that raise its expected
tokens per second. How likely a guess is right is learnt from the sequence's earlier ones, computed or not. Nobody waits for a
draft or is preempted for one: drafts get the tokens and the blocks that are left.
"""

import timeit
from collections.abc import Callable
from operator import itemgetter

import numpy as np

from nanovllm.config import MAX_DRAFT_STEP
from nanovllm.engine.drafter import Drafter, Guesser, PromptLookup
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

_LEAST_GAIN = 1.05  # in tokens per second: less is lost again where sequences end at different times


class Speculator:
    """Hands out drafts of at most `max_draft_len` tokens.

    `plain_costs[n]`, `draft_costs[n]`: seconds of a step of n tokens, without drafts and with, in short contexts; a step of more
    tokens than `draft_costs` covers gets none. `context_cost`: seconds more for each token of a token's context.
    """

    def __init__(self, max_draft_len: int, plain_costs: list[float], draft_costs: list[float], context_cost: float = 0.0) -> None:
        self.max_draft_len = max_draft_len
        self.plain_costs, self.draft_costs, self.context_cost = plain_costs, draft_costs, context_cost
        self.make_drafter: Callable[[list[int]], Drafter] = PromptLookup

    def draft(self, seqs: list[Sequence], budget: int) -> None:
        """Set `draft` of the sequences of a step, of which `budget` tokens are left."""
        for seq in seqs:
            seq.draft = []
        num_tokens = sum(seq.num_scheduled_tokens for seq in seqs)
        budget = min(budget, len(self.draft_costs) - 1 - num_tokens)
        if budget <= 0:
            return
        candidates: list[tuple[float, Guesser, Sequence]] = []  # a guess: how likely it and those before it are right
        for seq in seqs:
            # Decodes whose logits depend on nothing but the tokens before them, and were never NaN: a guess could be the reason.
            if seq.is_decode and not seq.was_nan and not seq.params.penalizes and len(seq.token_ids) >= seq.min_num_tokens:
                guesser = seq.guesser = seq.guesser or Guesser(self.make_drafter(seq.token_ids))
                guesser.learn(seq.token_ids)
                guesser.guess, guesser.position = guesser.drafter.guess(self.max_draft_len), len(seq.token_ids)
                length = min(len(guesser.guess), seq.max_num_tokens - len(seq.token_ids) - 1)
                candidates += [(guesser.likelihood**i, guesser, seq) for i in range(1, length + 1)]
        candidates.sort(key=itemgetter(0), reverse=True)
        expected, num_drafted = float(len(seqs)), 0
        attention = self.context_cost * sum(len(seq.token_ids) for seq in seqs)
        best = _LEAST_GAIN * expected / (self.plain_costs[min(num_tokens, len(self.plain_costs) - 1)] + attention)
        for count, (probability, _, seq) in enumerate(candidates[:budget], 1):
            expected += probability
            attention += self.context_cost * len(seq.token_ids)
            if expected > best * (cost := self.draft_costs[num_tokens + count] + attention):
                best, num_drafted = expected / cost, count
        for _, guesser, seq in candidates[:num_drafted]:
            seq.draft = guesser.guess[: len(seq.draft) + 1]


def measure_steps(
    run: Callable[[list[Sequence]], object], draft_len: int, max_num_seqs: int, max_num_tokens: int, max_model_len: int
) -> tuple[list[float], list[float], float]:
    """Seconds of a decode step of 0, 1, 2 ... tokens: without drafts, and with `draft_len` tokens behind every newest one. And
    how many more a token takes for each token of its context. Before the first request: all block tables lead to block 0.

    A list ends where adding tokens makes a token hardly cheaper: computation is the bound there, and no draft pays.
    """

    def measure(num_tokens: int, draft_len: int, context_len: int = 1) -> float:
        seqs = [Sequence(lane, [0] * context_len, SamplingParams()) for lane in range(-(-num_tokens // (1 + draft_len)))]
        for seq in seqs:
            seq.lane, seq.num_scheduled_tokens, seq.num_computed_tokens = seq.seq_id, 1, context_len - 1
            seq.draft = [0] * min(draft_len, num_tokens - 1 - seq.lane * (1 + draft_len))
        return min(timeit.repeat(lambda: run(seqs), number=1, repeat=3))  # the first of a size may have something to prepare

    def measure_sizes(draft_len: int) -> list[float]:
        limit = min(max_num_seqs * (1 + draft_len), max_num_tokens, MAX_DRAFT_STEP)
        sizes, seconds = [0], [0.0]
        while sizes[-1] < limit:
            sizes.append(min(max(1, 2 * sizes[-1]), limit))
            seconds.append(measure(sizes[-1], draft_len))
            if sizes[-1] > 16 and seconds[-1] / sizes[-1] > 0.9 * seconds[-2] / sizes[-2]:
                break
        return np.interp(range(sizes[-1] + 1), sizes, seconds).tolist()

    plain, draft = measure_sizes(0), measure_sizes(draft_len)
    num_tokens = min(1 + draft_len, len(draft) - 1)
    slower = measure(num_tokens, draft_len, max_model_len - draft_len) - measure(num_tokens, draft_len)
    return plain, draft, max(0.0, slower) / (num_tokens * max_model_len)
