"""Speculative decoding that changes no token, up to rounding.

    token_ids | ... a b c | d e f        c is the newest token, d e f the draft of this step
    sampled   |           | d e x y      after c, d, e and f: d and e are accepted, x is next

A sampled token is a function of the tokens before it, because noise is a function of seed and
position. A draft token is therefore accepted exactly when it equals the token that was sampled in
its place. (Leviathan et al. 2023 use rejection sampling instead.)

A draft costs time, so a step computes only those draft tokens that raise its expected tokens per
second (costs.py). The acceptance rate of a sequence is learned from its earlier proposals,
whether a step computed them or not. Drafts take the tokens and blocks that a step leaves unused,
and can evict cached blocks. No sequence waits or is preempted for a draft.
"""

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.extension import Extension
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.features.speculation.costs import Candidate, StepCosts, measure_costs
from nanovllm.outputs import FinishReason
from nanovllm.worker.device import engine_settings

LEARNING_RATE = 0.1  # weight of the newest draft token in the acceptance rate


class PromptLookup:
    """Proposes what followed the latest occurrence of the newest tokens (Saxena 2023).

        token_ids | the cat sat on the mat . the cat      "sat on the mat" may follow again

    This works for code, quotations, and answers that repeat the question. `token_ids` is the
    sequence's own list. Each token is read once, so a proposal costs O(1) on average.
    """

    SIZES = (3, 2)  # lengths of the n-grams, the longest first

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.num_read = 0
        # n-gram -> end of its latest occurrence that is followed by a token
        self.ends: dict[tuple[int, ...], int] = {}

    def propose(self, num_tokens: int) -> list[int]:
        token_ids = self.token_ids
        for end in range(self.num_read, len(token_ids)):
            for size in self.SIZES:
                self.ends[tuple(token_ids[max(0, end - size) : end])] = end
        self.num_read = len(token_ids)
        for size in self.SIZES:
            end = self.ends.get(tuple(token_ids[-size:]), 0)
            if end:
                found = token_ids[end : end + num_tokens]
                # An occurrence that overlaps the newest tokens is repeated.
                return (found * num_tokens)[:num_tokens]
        return []


@dataclass
class Proposal:
    """A sequence's newest proposal, for the tokens from `position` on, and its acceptance rate."""

    proposer: PromptLookup
    token_ids: list[int] = field(default_factory=list)
    position: int = 0
    acceptance_rate: float = 0.5
    is_disabled: bool = False  # see _discard_step

    def update(self, token_ids: list[int], num_tokens: int) -> None:
        """Learn from what has followed, and propose what may follow now."""
        self.learn(token_ids)
        self.token_ids = self.proposer.propose(num_tokens)
        self.position = len(token_ids)

    def learn(self, token_ids: list[int]) -> None:
        """Compare the proposal with the tokens that were sampled, computed as a draft or not."""
        for proposed, token_id in zip(self.token_ids, token_ids[self.position :]):
            outcome = 1.0 if proposed == token_id else 0.0
            self.acceptance_rate += LEARNING_RATE * (outcome - self.acceptance_rate)
            if proposed != token_id:
                break


class Drafts(Extension):
    """Appends drafts of at most `max_draft_len` tokens to decodes, and removes what is rejected.

    Within a step `token_ids` ends with the draft. Nothing else distinguishes a draft token from a
    token that is scheduled.
    """

    scheduler: Scheduler

    def __init__(self, max_draft_len: int, costs: StepCosts) -> None:
        self.max_draft_len = max_draft_len
        self.costs = costs
        self.make_proposer = PromptLookup

    def reset(self) -> None:
        self.drafts: dict[Sequence, list[int]] = {}  # in the current step
        self.proposals: dict[Sequence, Proposal] = {}  # for unfinished sequences that have decoded

    def planned(self, seqs: list[Sequence]) -> None:
        """Give the rest of the step's budget and the free blocks to drafts."""
        self.drafts = self.choose(seqs, self.scheduler.max_num_batched_tokens)
        for seq, draft in self.drafts.items():
            seq.token_ids += draft
            while not self.scheduler.block_manager.grow(seq):
                seq.token_ids.pop()
                draft.pop()
            seq.num_scheduled_tokens += len(draft)
            seq.num_logits += len(draft)

    def choose(self, seqs: list[Sequence], max_num_tokens: int) -> dict[Sequence, list[int]]:
        """The drafts of a step of `seqs`, which has at most `max_num_tokens` with them."""
        num_tokens = sum(seq.num_scheduled_tokens for seq in seqs)
        budget = min(max_num_tokens, self.costs.max_num_tokens) - num_tokens
        drafts: dict[Sequence, list[int]] = {}
        if budget <= 0:
            return drafts
        candidates = self._collect_candidates(seqs)[:budget]
        if not candidates:
            return drafts
        num_chosen = self.costs.choose_count(seqs, num_tokens, candidates)
        for candidate in candidates[:num_chosen]:
            drafts.setdefault(candidate.seq, []).append(candidate.token_id)
        return drafts

    def _collect_candidates(self, seqs: list[Sequence]) -> list[Candidate]:
        """All draft tokens that could be computed, the most probable first."""
        candidates: list[Candidate] = []
        for seq in seqs:
            # Penalties and min_tokens make logits depend on more than the K/V of the tokens before.
            is_eligible = not seq.params.penalizes and len(seq.token_ids) >= seq.min_num_tokens
            if not seq.is_decode or not is_eligible:
                continue
            if seq not in self.proposals:
                self.proposals[seq] = Proposal(self.make_proposer(seq.token_ids))
            proposal = self.proposals[seq]
            if proposal.is_disabled:
                continue
            proposal.update(seq.token_ids, self.max_draft_len)
            max_len = seq.max_num_tokens - len(seq.token_ids) - 1
            probability = 1.0
            for token_id in proposal.token_ids[: max(0, max_len)]:
                probability *= proposal.acceptance_rate
                candidates.append(Candidate(probability, seq, token_id))
        # A stable sort keeps the tokens of a draft in order.
        candidates.sort(key=attrgetter("probability"), reverse=True)
        return candidates

    def sampled(self, seqs: list[Sequence], token_ids: list[list[int]]) -> list[list[int]]:
        """Verify the drafts, as if only accepted tokens had been scheduled."""
        verified: list[list[int]] = []
        for seq, sampled in zip(seqs, token_ids, strict=True):
            draft = self.drafts.get(seq)
            verified.append(self._verify(seq, draft, sampled) if draft else sampled)
        return verified

    def recorded(self, seqs: list[Sequence]) -> None:
        for seq in self.drafts:
            if seq.status is SequenceStatus.RUNNING:  # release the blocks of rejected tokens
                self.scheduler.block_manager.truncate(seq, seq.num_computed_tokens)

    def finished(self, seq: Sequence, reason: FinishReason) -> None:
        self.proposals.pop(seq, None)

    def describe_sequence(self, seq: Sequence) -> dict[str, Any]:
        return {"draft_token_ids": self.drafts.get(seq, [])}

    def _verify(self, seq: Sequence, draft: list[int], sampled: list[int]) -> list[int]:
        """Remove the draft from `seq`. Return the sampled tokens that are valid.

        `sampled` has one token more than the draft: sampled[i] is the token at the position of
        draft[i]. The tokens up to the first one that differs are valid, that one included.
        """
        num_accepted = count_matches(draft, sampled)
        if num_accepted > 0 and sampled[num_accepted] < 0:  # NaN: sampled again, in the next step
            num_accepted -= 1
        self.scheduler.num_draft_tokens += len(draft)
        self.scheduler.num_accepted_tokens += num_accepted

        seq.num_scheduled_tokens = 1 + num_accepted
        seq.num_logits = 1 + num_accepted
        if sampled[0] < 0:
            self._discard_step(seq)
        # The blocks that accepted tokens fill can be cached now, while token_ids has them.
        start = seq.num_computed_tokens
        self.scheduler.block_manager.cache_full_blocks(seq, start, start + seq.num_scheduled_tokens)
        del seq.token_ids[-len(draft) :]
        return sampled[: seq.num_logits]

    def _discard_step(self, seq: Sequence) -> None:
        """Discard the step of `seq`, because a draft token can be the cause of NaN logits.

        Attention multiplies masked values by 0, so NaN of a draft token reaches the tokens before
        it. Later steps of this sequence have no drafts.
        """
        self.proposals[seq].is_disabled = True
        seq.num_scheduled_tokens = 0
        seq.num_logits = 0
        first = seq.num_computed_tokens // self.scheduler.block_size
        for block_id in seq.block_table[first:]:
            self.scheduler.block_manager.uncache(block_id)


def count_matches(draft: list[int], token_ids: list[int]) -> int:
    """Return how many tokens at the start of both lists are equal."""
    num_matches = 0
    for draft_id, token_id in zip(draft, token_ids):
        if draft_id != token_id:
            break
        num_matches += 1
    return num_matches


def make_drafts(config: Config, runner: ModelRunner, max_model_len: int) -> Drafts:
    """Make the extension, with costs that are measured now, before the first request."""
    limit = runner.executor.worker.backend.MAX_DRAFT_LEN
    max_draft_len = min(config.num_speculative_tokens, limit, max_model_len - 1)
    with engine_settings(runner.device):
        costs = measure_costs(runner, max_draft_len, max_model_len)
    return Drafts(max_draft_len, costs)
