"""What callers of a random engine do: calls of all kinds in a random order, and interrupts."""

import random
from collections.abc import Callable, Generator
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from conftest import check_idle, check_invariants, find_feature
from event_interrupts import ENGINE, PACKAGE, EventInterrupts, at_event
from random_engines import Case

from nanovllm import LLM, trace
from nanovllm.engine.outputs import RequestOutput
from nanovllm.engine.request import Inbox, Request
from nanovllm.features.speculation.drafts import Drafts
from nanovllm.features.speculation.proposers import MTPProposer, PromptLookup

ACTIONS = {
    "step": 12,
    "add": 5,
    "advance_stream": 6,
    "open_stream": 2,
    "close_stream": 0.2,
    "generate": 1,
    "abort": 0.6,
    "search": 0.2,
    "embed": 0.5,
    "renew": 0.2,
    "run_threads": 0.2,
}
INTERRUPTED = object()
ERRORS = (KeyboardInterrupt, MemoryError)


class Foresight:
    """Proposes the expected tokens, of which every fifth is replaced, or looks prompts up."""

    def __init__(self, token_ids: list[int], answers: list[list[int]]) -> None:
        self.token_ids = token_ids
        self.answers = answers
        self.lookup = PromptLookup(token_ids)

    def propose(self, num_tokens: int) -> list[int]:
        proposed = self.lookup.propose(num_tokens)
        start = len(self.token_ids)
        for answer in self.answers:
            if len(answer) > start and answer[:start] == self.token_ids:
                end = min(start + num_tokens, len(answer))
                return [answer[i] if i % 5 else 0 for i in range(start, end)]
        return proposed


def correct_often(propose: Callable, answers: list[list[int]]) -> Callable:
    """Replace the drafts of a random head, which are always rejected."""

    def propose_and_correct(seqs: list[Any], num_tokens: int) -> list[list[int]]:
        drafts = propose(seqs, num_tokens)
        for seq, draft in zip(seqs, drafts):
            draft[:] = Foresight(seq.token_ids, answers).propose(len(draft)) or draft
        return drafts

    return propose_and_correct


class Calls:
    """Runs a case: random calls until all of its jobs have been served."""

    def __init__(self, case: Case, directory: Path) -> None:
        self.case = case
        self.rng = rng = case.rng
        self.waiting = rng.choices(range(len(case.jobs)), k=rng.randint(2, 9))  # indices of jobs
        self.num_interrupts = rng.choice([0, 0, 1, 3, 10])  # at most
        self.jobs: dict[Request, int] = {}  # those of add_request
        self.newest: dict[int, Any] = {}  # the newest output of each request
        self.streams: list[tuple[Generator, int]] = []
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0  # but for the first one of each sample
        self.has_ended_early = False  # by an abort or an interrupt
        self.trace_path = directory / "trace.json" if rng.random() < 0.2 else None
        self.llm = case.make_llm(trace=self.trace_path)
        # As on a GPU, where each step is launched before the tokens of the last one are read.
        if all(feature.can_overlap for feature in self.llm.features):
            self.llm.overlaps = rng.random() < 0.7
        self._watch_steps()
        if case.options["num_speculative_tokens"]:
            self._draft_often()

    def _watch_steps(self) -> None:
        step = self.llm.step

        def step_and_check(inbox: Inbox | None = None) -> list[RequestOutput]:
            outputs = step(inbox)
            self.llm._take_turn(check_between_steps, self.llm)
            return outputs

        self.llm.step = step_and_check  # type: ignore[method-assign]

    def _draft_often(self) -> None:
        """Draft what is accepted often, as if drafts cost nothing."""
        answers: list[list[int]] = []
        for job in set(self.waiting):
            for output in self.case.expect(self.case.generate, job):
                answers.append(output["prompt_token_ids"] + output["token_ids"])
        drafts: Any = find_feature(self.llm, Drafts)
        drafts.costs.choose_count = lambda step, additions: len(additions)
        drafts.proposer.make_lookup = lambda token_ids: Foresight(token_ids, answers)
        if isinstance(drafts.proposer, MTPProposer):
            drafts.proposer.propose = correct_often(drafts.proposer.propose, answers)

    def run(self) -> None:
        names = list(ACTIONS)
        weights = list(ACTIONS.values())
        while self.waiting or self.streams or not self.llm.is_finished():
            (name,) = self.rng.choices(names, weights)
            getattr(self, name)()
        self.num_interrupts = 0
        self.step()  # resets the engine if the last call was interrupted
        for request, job in self.jobs.items():
            assert request.finish_reason is not None
            self._check(request.output(), job)
        check_idle(self.llm)
        self._check_stats()
        self.llm.exit()
        assert not list(self.case.models.directory.glob("kv/*/*.tmp"))
        if self.trace_path is not None:
            assert trace.read(self.trace_path)

    # --- actions

    def step(self) -> None:
        outputs = self._attempt(self.rng, self.llm.step)
        if outputs is not INTERRUPTED:
            for output in outputs:
                self._check_growth(output)

    def add(self) -> None:
        if not self.waiting:
            return
        job = self.waiting.pop()
        request_id = self._attempt(self.rng, self.llm.add_request, *self.case.jobs[job])
        if request_id is INTERRUPTED:
            self.waiting.append(job)
            return
        samples = list(self.llm.requests[request_id])
        self.jobs.update(dict.fromkeys(samples, job))

    def abort(self) -> None:
        unfinished = [request for request in self.jobs if request.finish_reason is None]
        if unfinished:
            self.has_ended_early = True
            self._attempt(self.rng, self.llm.abort, self.rng.choice(unfinished).seq_id)

    def generate(self) -> None:
        jobs = self._take_jobs()
        self._finish(self._attempt(self.rng, self._generate, jobs), jobs)

    def search(self) -> None:
        if not self.waiting:
            return
        job = self.rng.choice(self.waiting)
        self.has_ended_early = True  # the statistics count what it generates, too
        beams = self._attempt(self.rng, self.case.search, self.llm, job)
        if beams is not INTERRUPTED:
            self.case.check(beams, self.case.search, job)

    def embed(self) -> None:
        """The engine's own vectors of a warm cache, in chunks and beside other requests."""
        prompts = [prompt for prompt, _ in self.case.jobs]
        pooling = self.rng.choice(["last", "mean"])
        self.has_ended_early = True  # the statistics count these prompts, too
        vectors = self._attempt(self.rng, self.llm.embed, prompts, pooling)
        if vectors is not INTERRUPTED:
            for vector, expected in zip(vectors, self.case.embed(prompts, pooling), strict=True):
                assert np.abs(vector - expected).max() < 1e-3, f"{self.case}\n{prompts}"

    def renew(self) -> None:
        """Give the engine its own weights again, or let it sleep. It recomputes all K/V."""
        # On a GPU an interrupted update has to be repeated, so that has a test of its own.
        on_gpu = self.llm.device.type == "cuda"
        if on_gpu or self.case.options.get("tensor_parallel_size", 1) > 1:
            return
        self.has_ended_early = True  # the statistics count what is recomputed
        if self.rng.random() < 0.5:
            self._attempt(self.rng, self.llm.update_weights, self.case.load_weights())
        else:
            self._attempt(self.rng, self.llm.sleep, self.rng.choice([1, 2]))
            while self.llm.is_sleeping:
                self._attempt(self.rng, self.llm.wake_up)

    def open_stream(self) -> None:
        if self.waiting:
            job = self.waiting.pop()
            self.streams.append((self.llm.stream(*self.case.jobs[job]), job))

    def advance_stream(self) -> None:
        if not self.streams:
            return
        stream, job = self.rng.choice(self.streams)
        output = self._attempt(self.rng, next, stream, None)
        if output is INTERRUPTED:
            self.waiting.append(job)
        elif output is not None:
            self._check_growth(output)
            self._check(output, job)
            return
        self.streams.remove((stream, job))

    def close_stream(self) -> None:
        if self.streams:
            stream, _ = self.streams.pop()
            self.has_ended_early = True
            stream.close()

    def run_threads(self) -> None:
        """Several threads generate at once, and each of them can be interrupted."""
        batches = [self._take_jobs() for _ in range(3)]
        results: list[Any] = [None] * len(batches)

        def serve(index: int, rng: random.Random) -> None:
            try:
                results[index] = self._attempt(rng, self._generate, batches[index])
            except BaseException as error:
                results[index] = error

        threads = []
        for index in range(len(batches)):
            rng = random.Random(self.rng.random())
            threads.append(Thread(target=serve, args=(index, rng), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a deadlock"
        for outputs, jobs in zip(results, batches):
            if isinstance(outputs, BaseException):
                raise outputs
            self._finish(outputs, jobs)

    def _take_jobs(self) -> list[int]:
        num_jobs = self.rng.randint(1, 3)
        jobs = self.waiting[:num_jobs]
        del self.waiting[:num_jobs]
        return jobs

    def _generate(self, jobs: list[int]) -> list[Any]:
        arguments = [self.case.jobs[job] for job in jobs]
        prompts = [prompt for prompt, _ in arguments]
        return self.llm.generate(prompts, [params for _, params in arguments])

    def _finish(self, outputs: Any, jobs: list[int]) -> None:
        """Check the outputs of several jobs, or let the jobs of an interrupted call wait."""
        if outputs is INTERRUPTED:
            self.waiting += jobs
            return
        remaining = iter(outputs)
        for job in jobs:
            for index in range(self.case.jobs[job][1].n):
                output = next(remaining)
                assert output["sample_index"] == index
                assert output["finish_reason"] is not None
                self._check(output, job)
        assert next(remaining, None) is None

    def _attempt(self, rng: random.Random, call: Callable, *args: Any) -> Any:
        """Call, perhaps with an interrupt at a random event. Return INTERRUPTED if it came."""
        if self.num_interrupts == 0 or rng.random() < 0.8:
            return call(*args)
        is_chosen = at_event(int(2 ** rng.uniform(0, 12)) - 1)
        prefixes = rng.choice([ENGINE, (PACKAGE,)])
        interrupts = EventInterrupts(is_chosen, rng.choice(ERRORS), prefixes)
        try:
            with interrupts:
                return call(*args)
        except ERRORS:
            if not interrupts.was_raised:
                raise
            self.num_interrupts -= 1
            self.has_ended_early = True
            return INTERRUPTED

    # --- checks

    def _check(self, output: Any, job: int) -> None:
        self.case.check([output], self.case.generate, job)
        assert output["num_cached_tokens"] <= len(output["prompt_token_ids"])
        if output["finish_reason"] is not None:
            self.num_prompt_tokens += len(output["prompt_token_ids"])
            self.num_generated_tokens += len(output["token_ids"]) - 1

    def _check_growth(self, output: Any) -> None:
        """Check that an output continues the one before it."""
        older = self.newest.get(output["request_id"], output)
        self.newest[output["request_id"]] = output
        assert output["text"].startswith(older["text"]) or output["finish_reason"] == "abort"
        for name in ("token_ids", "logprobs", "prompt_logprobs"):
            entries = older[name] or []
            assert (output[name] or [])[: len(entries)] == entries

    def _check_stats(self) -> None:
        """Without drafts, preemptions and requests that ended early, the numbers are known."""
        stats = self.llm.stats
        assert stats["num_accepted_tokens"] <= stats["num_draft_tokens"]
        if self.has_ended_early or stats["num_preemptions"] or stats["num_draft_tokens"]:
            return
        num_prompt_tokens = stats["num_prefill_tokens"] + stats["num_cached_tokens"]
        assert num_prompt_tokens == self.num_prompt_tokens
        assert stats["num_decode_tokens"] == self.num_generated_tokens


def check_between_steps(llm: LLM) -> None:
    """Check the invariants of conftest.py, and what the cached blocks of sequences contain."""
    check_invariants(llm)
    manager = llm.scheduler.block_manager
    size = manager.block_size
    assert manager.enable_prefix_caching or not manager.hash_to_block_id
    for seq in llm.scheduler.running:
        block_hash = manager.root_hash
        for index, block_id in enumerate(seq.block_table):
            token_ids = seq.token_ids[size * index : size * (index + 1)]
            if len(token_ids) < size:
                break
            block_hash = manager.compute_hash(token_ids, block_hash)
            block = manager.blocks[block_id]
            if block.is_cached:
                assert block.token_ids == token_ids
                assert block.hash == block_hash
