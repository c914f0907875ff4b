"""Beam search, the bookkeeping of one prompt. Knows scores and token ids; LLM.beam_search asks the engine for the scores.

A step extends every running beam by its most probable tokens and ranks all these candidates by their summed log
probability. The best ones that have not ended run on; of the best `beam_width` candidates those that have ended compete
for a place among the finished, ranked by score = sum / length ** length_penalty. The search is over when no running beam
could still displace a finished one at its present length (transformers' early_stopping=False).
"""

from heapq import nlargest
from operator import itemgetter
from typing import NamedTuple

from nanovllm.outputs import FinishReason


class Beam(NamedTuple):
    token_ids: list[int]  # generated
    logprobs: list[dict[int, float]]  # of these
    cumulative_logprob: float


class BeamSearch:
    def __init__(
        self, prompt: list[int], beam_width: int, max_tokens: int, length_penalty: float, eos_token_ids: frozenset[int]
    ) -> None:
        self.prompt = prompt
        self.beam_width = beam_width
        self.max_tokens = max_tokens
        self.length_penalty = length_penalty
        self.eos_token_ids = eos_token_ids
        # So many that beam_width of them go on even if every beam's best candidates are all the EOS there are.
        self.num_candidates = max(2, 1 + len(eos_token_ids)) * beam_width
        self.running = [Beam([], [], 0.0)]
        self.finished: list[Beam] = []  # best first

    def advance(self, logprobs: list[dict[int, float]]) -> None:
        """Take a step. `logprobs`: of each running beam's next tokens, the `num_candidates` most probable or all.

        A beam without any (its logits are NaN) goes no further; if that is true of all beams, they are the result.
        """
        scored = (
            (beam.cumulative_logprob + logprob, beam, token_id, logprob)
            for beam, nexts in zip(self.running, logprobs, strict=True)
            for token_id, logprob in nexts.items()
        )
        candidates = [
            Beam([*beam.token_ids, token_id], [*beam.logprobs, {token_id: logprob}], cumulative_logprob)
            for cumulative_logprob, beam, token_id, logprob in nlargest(self.num_candidates, scored, key=itemgetter(0))
        ]
        ended = [beam for beam in candidates[: self.beam_width] if self.finish_reason(beam)]
        self.finished = nlargest(self.beam_width, self.finished + ended, key=self._score)
        if not (candidates or self.finished):
            self.finished = self.running
        self.running = [beam for beam in candidates if not self.finish_reason(beam)][: self.beam_width]
        if self.running and len(self.finished) == self.beam_width:
            if self._score(self.running[0]) <= self._score(self.finished[-1]):
                self.running = []

    def finish_reason(self, beam: Beam) -> FinishReason | None:
        """Why a beam has ended. None if it has not, even where its logits were NaN and it goes no further."""
        if beam.token_ids and beam.token_ids[-1] in self.eos_token_ids:
            return "stop"
        return "length" if len(beam.token_ids) == self.max_tokens else None

    def _score(self, beam: Beam) -> float:
        return beam.cumulative_logprob / len(beam.token_ids) ** self.length_penalty
