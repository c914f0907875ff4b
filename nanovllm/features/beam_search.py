"""Beam search with the same results as transformers', built on ordinary requests.

Each step sends all running beams to the engine, as prompts of which one token is generated, and
extends every beam by its most probable next tokens. The candidates are ranked by cumulative log
probability:

    running    the best `beam_width` candidates that have not ended
    finished   the best `beam_width` ended beams by cumulative_logprob / length ** length_penalty.
               Only ended candidates among the best `beam_width` of a step compete.

The search ends when no running beam could replace a finished one at its current length
(transformers' early_stopping=False). The beams share their prefix through the prefix cache.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import islice
from operator import itemgetter

from nanovllm.engine.input_processor import PreparedPrompt
from nanovllm.engine.outputs import FinishReason, RequestOutput
from nanovllm.engine.request import Request
from nanovllm.sampling_params import SamplingParams


@dataclass(frozen=True)
class Beam:
    """One hypothesis: generated tokens and their log probabilities."""

    token_ids: list[int]
    logprobs: list[dict[int, float]]  # one dict per token
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None


@dataclass
class BeamSearch:
    """The beams of one prompt. Handles token ids and scores. `search_together` runs the engine."""

    prompt: PreparedPrompt
    beam_width: int
    max_tokens: int  # at most those for which the model has room
    length_penalty: float
    eos_token_ids: frozenset[int]
    num_cached_tokens: int = 0  # tokens of the prompt that the first step found

    def __post_init__(self) -> None:
        # Even if the best candidates of every beam are all EOS tokens, beam_width others remain.
        self.num_candidates = max(2, 1 + len(self.eos_token_ids)) * self.beam_width
        self.running = [Beam([], [])]
        self.finished: list[Beam] = []  # best first

    def advance(self, outputs: list[RequestOutput]) -> None:
        """Extend all running beams by one token.

        `outputs` has for each of them the `num_candidates` most probable tokens, or all tokens. It
        has none for a beam with NaN logits, which is dropped. If no beam is left, the search ends
        with "error".
        """
        if not self.running[0].token_ids:
            self.num_cached_tokens = outputs[0]["num_cached_tokens"]
        candidates: list[tuple[float, Beam, int, float]] = []  # the first is the new total
        for beam, output in zip(self.running, outputs, strict=True):
            for next_tokens in output["logprobs"] or ():
                for token_id, logprob in next_tokens.items():
                    total = beam.cumulative_logprob + logprob
                    candidates.append((total, beam, token_id, logprob))
        chosen = nlargest(self.num_candidates, candidates, key=itemgetter(0))
        best = [self._extend(*candidate) for candidate in chosen]
        ended = [beam for beam in best[: self.beam_width] if beam.finish_reason is not None]
        self.finished = nlargest(self.beam_width, self.finished + ended, key=self._score)
        if not best and not self.finished:
            self.finished = [replace(beam, finish_reason="error") for beam in self.running]
        unfinished = [beam for beam in best if beam.finish_reason is None]
        self.running = unfinished[: self.beam_width]
        if self.running and len(self.finished) == self.beam_width:
            # No running beam could replace a finished one at its current length.
            if self._score(self.running[0]) <= self._score(self.finished[-1]):
                self.running = []

    def _extend(self, total: float, beam: Beam, token_id: int, logprob: float) -> Beam:
        token_ids = [*beam.token_ids, token_id]
        reason: FinishReason | None = None
        if token_id in self.eos_token_ids:
            reason = "stop"
        elif len(token_ids) == self.max_tokens:
            reason = "length"
        return Beam(token_ids, [*beam.logprobs, {token_id: logprob}], total, reason)

    def _score(self, beam: Beam) -> float:
        return beam.cumulative_logprob / len(beam.token_ids) ** self.length_penalty


def search_together(
    searches: list[BeamSearch], generate: Callable[[list[PreparedPrompt]], list[RequestOutput]]
) -> None:
    """Finish all `searches`, which share the engine's steps."""
    active = searches
    while active:
        params = SamplingParams(
            temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=active[0].num_candidates
        )
        prompts: list[PreparedPrompt] = []
        for search in active:
            prompts += [
                PreparedPrompt(search.prompt.token_ids + beam.token_ids, params, {})
                for beam in search.running
            ]
        outputs = iter(generate(prompts))
        for search in active:
            search.advance(list(islice(outputs, len(search.running))))
        active = [search for search in active if search.running]


def make_outputs(
    search: BeamSearch, make_requests: Callable[..., list[Request]]
) -> list[RequestOutput]:
    """Return the finished beams as outputs of requests, which are made of the prompt alone.

    `make_requests` is that of the engine's InputProcessor.
    """
    outputs: list[RequestOutput] = []
    requests = make_requests([search.prompt] * len(search.finished), search.eos_token_ids, inbox={})
    for beam, request in zip(search.finished, requests, strict=True):
        request.token_ids += beam.token_ids
        request.finish_reason = beam.finish_reason
        request.num_cached_tokens = search.num_cached_tokens
        request.commit(beam.logprobs)
        outputs.append(request.output())
    return outputs
