"""Speculative decoding that changes no token, up to rounding.

    token_ids | ... a b c | d e f        c is the newest token, d e f the draft of this step
    sampled   |           | d e x y      after c, d, e and f: d and e are accepted, x is next

A sampled token is a function of the tokens before it, because noise is a function of seed and
position. A draft token is therefore accepted exactly when it equals the token that was sampled in
its place. (Leviathan et al. 2023 use rejection sampling instead.)

A draft costs time, so a step computes only those draft tokens that raise its expected tokens per
second (costs.py), and an MTP head runs only if that is worth its time, too. The acceptance rate of
a sequence is learned from its earlier proposals, whether a step computed them or not. Drafts take
the tokens and blocks that a step leaves unused, and can evict cached blocks. No sequence waits or
is preempted for a draft.
"""

from dataclasses import dataclass, field
from operator import attrgetter

from nanovllm.config import MAX_DRAFT_STEP
from nanovllm.engine.feature import Facts, Feature
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.outputs import FinishReason
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.features.speculation.costs import Candidate, measure_costs
from nanovllm.features.speculation.proposers import MTPProposer, PromptLookupProposer, Proposer
from nanovllm.utils.helpers import report
from nanovllm.worker.device import engine_settings

LEARNING_RATE = 0.1  # weight of the newest draft token in the acceptance rate
# How fast a sequence without proposals returns to the first rate, to try again after some 50 steps.
FORGETTING_RATE = 0.002


@dataclass
class Proposal:
    """A sequence's newest proposal, for the tokens from `position` on, and its acceptance rate."""

    acceptance_rate: float
    token_ids: list[int] = field(default_factory=list)
    position: int = 0

    def learn(self, token_ids: list[int]) -> None:
        """Compare the proposal with the tokens that were sampled, computed as a draft or not."""
        for proposed, token_id in zip(self.token_ids, token_ids[self.position :]):
            outcome = 1.0 if proposed == token_id else 0.0
            self.acceptance_rate += LEARNING_RATE * (outcome - self.acceptance_rate)
            if proposed != token_id:
                break

    def forget(self, first_rate: float) -> None:
        """Move the acceptance rate towards the first one, because nothing is proposed."""
        self.acceptance_rate += FORGETTING_RATE * (first_rate - self.acceptance_rate)


class Drafts(Feature):
    """Appends drafts of at most `max_draft_len` tokens to decodes, and removes what is rejected.

    Within a step `token_ids` ends with the draft. Nothing else distinguishes a draft token from a
    token that is scheduled. Steps do not overlap, because the positions in a step depend on how
    many draft tokens of the step before were accepted.
    """

    serves = "num_speculative_tokens"
    can_overlap = False

    def __init__(self) -> None:
        self.proposer: Proposer = PromptLookupProposer()
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def start(self, engine: LLMEngine) -> bool:
        if not engine.config.num_speculative_tokens:
            return False
        worker = engine.executor.worker
        self.max_draft_len = min(
            engine.config.num_speculative_tokens,
            worker.backend.MAX_DRAFT_LEN,
            worker.max_model_len - 1,
        )
        with engine_settings(engine.device):
            self.costs = measure_costs(engine.executor, self.max_draft_len)
        name = "prompt lookup"
        if worker.has_mtp_head:
            name = "the model's MTP head"
            sampler = engine.model_runner.sampler
            self.proposer = MTPProposer(engine.executor, sampler, engine.scheduler.block_manager)
        report(
            f"drafts by {name}: a draft token adds {self.costs.per_token:.0%} to a step of one"
            f" token, and {self.costs.per_pass:.0%} to propose it"
        )
        return super().start(engine)

    def reset(self) -> None:
        self.drafts: dict[Sequence, list[int]] = {}  # in the current step
        self.proposals: dict[Sequence, Proposal] = {}  # for unfinished sequences that have decoded

    def planned(self, step: Step) -> None:
        """Give the rest of the step's budget and the free blocks to drafts."""
        self.drafts = self.choose(step, self.scheduler.max_num_batched_tokens)
        for index, seq in enumerate(step.seqs):
            draft = self.drafts.get(seq)
            if draft is None:
                continue
            seq.token_ids += draft
            while not self.scheduler.block_manager.grow(seq):
                seq.token_ids.pop()
                draft.pop()
            step.num_tokens[index] += len(draft)
            step.num_logits[index] += len(draft)

    def choose(self, step: Step, max_num_tokens: int) -> dict[Sequence, list[int]]:
        """Choose drafts for a step, which has at most `max_num_tokens` with them."""
        budget = min(max_num_tokens, MAX_DRAFT_STEP) - sum(step.num_tokens)
        candidates = self._collect_candidates(step, budget)[:budget] if budget > 0 else []
        tokens = [(self.costs.per_token, candidate.probability) for candidate in candidates]
        num_chosen = self.costs.choose_count(step, tokens)
        drafts: dict[Sequence, list[int]] = {}
        for candidate in candidates[:num_chosen]:
            drafts.setdefault(candidate.seq, []).append(candidate.token_id)
        return drafts

    def _collect_candidates(self, step: Step, budget: int) -> list[Candidate]:
        """All draft tokens that could be computed, the most probable first."""
        limits: dict[Sequence, int] = {}  # how long each draft can be
        for index, seq in enumerate(step.seqs):
            # Penalties and min_tokens make logits depend on more than the K/V of the tokens before.
            is_eligible = not seq.params.penalizes and len(seq.token_ids) >= seq.min_num_tokens
            limit = min(self.max_draft_len, seq.max_num_tokens - len(seq.token_ids) - 1)
            if step.is_decode(index) and is_eligible and limit > 0:
                limits[seq] = limit
                if seq not in self.proposals:
                    self.proposals[seq] = Proposal(self.proposer.first_rate)
                self.proposals[seq].learn(seq.token_ids)
        candidates: list[Candidate] = []
        for seq, draft in zip(limits, self._propose(step, limits, budget)):
            proposal = self.proposals[seq]
            proposal.token_ids = draft
            proposal.position = len(seq.token_ids)
            probability = 1.0
            for token_id in draft[: limits[seq]]:
                probability *= proposal.acceptance_rate
                candidates.append(Candidate(probability, seq, token_id))
        # A stable sort keeps the tokens of a draft in order.
        candidates.sort(key=attrgetter("probability"), reverse=True)
        return candidates

    def _propose(self, step: Step, limits: dict[Sequence, int], budget: int) -> list[list[int]]:
        """Return a draft for each sequence, or empty ones if the proposer takes too long."""
        seqs = list(limits)
        max_len = max(limits.values(), default=0)
        if self.costs.per_pass == 0.0:
            return self.proposer.propose(seqs, max_len)
        rates = sorted([self.proposals[seq].acceptance_rate for seq in seqs], reverse=True)
        passes: list[tuple[float, float]] = []  # what each adds to the time and to the tokens
        for length in range(1, max_len + 1):
            fitting = rates[: max(0, budget - len(passes) * len(seqs))]
            cost = self.costs.per_pass * (1 + self.costs.per_token * (len(seqs) - 1))
            cost += self.costs.per_token * len(fitting)
            passes.append((cost, sum([rate**length for rate in fitting])))
        num_passes = self.costs.choose_count(step, passes)
        if num_passes > 0:
            return self.proposer.propose(seqs, num_passes)
        for seq in seqs:
            self.proposals[seq].forget(self.proposer.first_rate)
        return [[] for _ in seqs]

    def sampled(self, step: Step, token_ids: list[list[int]]) -> list[list[int]]:
        """Verify the drafts, as if only accepted tokens had been scheduled."""
        verified: list[list[int]] = []
        for index, sampled in enumerate(token_ids):
            seq = step.seqs[index]
            if self.drafts.get(seq):
                sampled = self._verify(seq, self.drafts[seq], sampled)
                step.num_tokens[index] = len(sampled)
                step.num_logits[index] = len(sampled)
            verified.append(sampled)
        return verified

    def advanced(self, step: Step) -> None:
        for seq in self.drafts:  # release the blocks of rejected tokens
            self.scheduler.block_manager.release(seq, seq.num_computed_tokens)

    def finished(self, seq: Sequence, reason: FinishReason) -> None:
        self.proposals.pop(seq, None)

    def stats(self) -> dict[str, int]:
        return {
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
        }

    def describe_settings(self) -> Facts:
        return {"max_draft_len": self.max_draft_len}

    def describe(self, step: Step) -> tuple[Facts, dict[Sequence, Facts]]:
        return {}, {seq: {"draft_token_ids": self.drafts.get(seq, [])} for seq in step.seqs}

    def _verify(self, seq: Sequence, draft: list[int], sampled: list[int]) -> list[int]:
        """Remove the rejected part of a draft. Return the sampled tokens that are valid.

        `sampled` has one token more than the draft: sampled[i] is the token at the position of
        draft[i]. The tokens up to the first one that differs are valid, that one included.
        """
        num_accepted = count_matches(draft, sampled)
        self.num_draft_tokens += len(draft)
        self.num_accepted_tokens += num_accepted
        # Accepted tokens stay until `postprocess` replaces them by the same, sampled tokens.
        num_rejected = len(draft) - num_accepted
        del seq.token_ids[len(seq.token_ids) - num_rejected :]
        return sampled[: 1 + num_accepted]


def count_matches(draft: list[int], token_ids: list[int]) -> int:
    """Return how many tokens at the start of both lists are equal."""
    num_matches = 0
    for draft_id, token_id in zip(draft, token_ids):
        if draft_id != token_id:
            break
        num_matches += 1
    return num_matches
