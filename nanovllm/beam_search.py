"""Beam search: every step sends all beams through the engine as prompts of one token to generate.

A step extends every running beam by its most probable tokens and ranks all these candidates by their summed log
probability. The best ones that have not ended run on; of the best `beam_width` candidates those that have ended compete
for a place among the finished, ranked by score = sum / length ** length_penalty. The search is over when no running beam
could still displace a finished one at its present length (transformers' early_stopping=False). The beams' common past is in
the prefix cache.
"""

from collections.abc import Callable
from heapq import nlargest
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

from nanovllm.outputs import FinishReason, RequestOutput
from nanovllm.sampling_params import SamplingParams

Generate = Callable[[list[tuple[list[int], SamplingParams]]], list[RequestOutput]]


class Beam(NamedTuple):
    token_ids: list[int]  # generated
    logprobs: list[dict[int, float]]  # of these
    cumulative_logprob: float
    finish_reason: FinishReason | None


class BeamSearch:
    """The search for one prompt. Knows scores and token ids; `search_together` asks the engine for the scores."""

    def __init__(
        self,
        prompt: list[int],
        beam_width: int,
        max_tokens: int,
        length_penalty: float,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.prompt = prompt
        self.beam_width, self.max_tokens, self.length_penalty = (
            beam_width,
            max_tokens,
            length_penalty,
        )
        self.eos_token_ids = eos_token_ids
        # So many that beam_width of them go on even if every beam's best candidates are all the EOS there are.
        self.num_candidates = max(2, 1 + len(eos_token_ids)) * beam_width
        self.running = [Beam([], [], 0.0, None)]
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
            self._extend(*best) for best in nlargest(self.num_candidates, scored, key=itemgetter(0))
        ]
        ended = [beam for beam in candidates[: self.beam_width] if beam.finish_reason]
        self.finished = nlargest(self.beam_width, self.finished + ended, key=self._score)
        if not (candidates or self.finished):
            self.finished = [beam._replace(finish_reason="error") for beam in self.running]
        self.running = [beam for beam in candidates if not beam.finish_reason][: self.beam_width]
        if self.running and len(self.finished) == self.beam_width:
            if self._score(self.running[0]) <= self._score(self.finished[-1]):
                self.running = []

    def _extend(self, total: float, beam: Beam, token_id: int, logprob: float) -> Beam:
        is_longest = len(beam.token_ids) + 1 == self.max_tokens
        reason: FinishReason | None = (
            "stop" if token_id in self.eos_token_ids else "length" if is_longest else None
        )
        return Beam(
            [*beam.token_ids, token_id], [*beam.logprobs, {token_id: logprob}], total, reason
        )

    def _score(self, beam: Beam) -> float:
        return beam.cumulative_logprob / len(beam.token_ids) ** self.length_penalty


def search_together(searches: list[BeamSearch], generate: Generate) -> list[RequestOutput]:
    """Finish all `searches`, which share the engine's steps. The outputs of the first step, one for each search."""
    first: list[RequestOutput] = []
    while active := [search for search in searches if search.running]:
        params = SamplingParams(
            temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=active[0].num_candidates
        )
        outputs = generate(
            [
                (search.prompt + beam.token_ids, params)
                for search in active
                for beam in search.running
            ]
        )
        first = first or outputs
        logprobs = iter([output["logprobs"][0] if output["logprobs"] else {} for output in outputs])
        for search in active:
            search.advance(list(islice(logprobs, len(search.running))))
    return first
