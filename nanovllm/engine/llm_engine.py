"""The engine's front half: requests in, one step at a time, results to whoever waits for them.

    add_request -> Request and Sequence -> [ Scheduler.schedule -> ModelRunner.run -> Scheduler.postprocess ] -> news -> step

It alone knows text and callers. A request has a place for its news: the engine's own, emptied by `step`, or that of the
`generate` or `stream` call that waits for it. So callers can share an engine and miss nothing.

Every change of its state is a transaction: one that is cut short is undone, down to the tokens that callers have been told
of.
"""

import operator
import struct
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import count, islice, takewhile
from threading import get_ident
from typing import Any, NamedTuple, TypeVar

import torch
import xxhash

from nanovllm.checks import check_text
from nanovllm.config import Config, takes
from nanovllm.detokenizer import Detokenizer
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.request import News, Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.timeline import Timeline
from nanovllm.engine.transaction import Busy, Transactional, for_one_thread, transaction
from nanovllm.models.checkpoint import find_checkpoint, read_config, read_eos_token_ids, read_tokenizer
from nanovllm.models.config import read_spec
from nanovllm.models.weights import find_dtype
from nanovllm.outputs import RequestOutput, Stats
from nanovllm.sampling_params import SamplingParams

Prompt = str | list[int]
Engine = TypeVar("Engine", bound="LLMEngine")
_SHUT_DOWN = "this engine has been shut down by exit()"


class CheckedPrompt(NamedTuple):
    """A prompt that can be served, and its params; `params.n` sequences come of it."""

    token_ids: list[int]
    params: SamplingParams


class LLMEngine(Transactional):
    """Serves one model. The options are those of `Config`.

    Raises TypeError or ValueError for an option that is unknown or wrong, or cannot be had on this machine (device,
    attention_backend, max_model_len, the KV cache's size); ValueError for a checkpoint that is not there, damaged, of an
    architecture that is not supported, or whose tensors do not fit it; RuntimeError in a forked process, or if another rank
    does not start.
    """

    @takes(Config)
    def __init__(self, *args: Any, **options: Any) -> None:
        self.check_process()
        self.config = config = Config.from_options(*args, **options)
        timeline = None if config.trace is None else Timeline(config.trace)
        directory = find_checkpoint(config.model)
        hf_config = read_config(directory)
        if config.dtype != "auto":
            dtype = getattr(torch, config.dtype)
        elif config.load_format == "dummy":
            dtype = hf_config.dtype or torch.float32
        else:
            dtype = hf_config.dtype or find_dtype(directory)
        spec = read_spec(hf_config, dtype, config.tensor_parallel_size)
        self.tokenizer = read_tokenizer(directory)
        self.eos_token_ids = read_eos_token_ids(directory, hf_config, self.tokenizer)
        self.model_runner: ModelRunner | None = ModelRunner(config, spec, directory)
        super().__init__()
        self.vocab_size = spec.vocab_size
        executor = self.model_runner.executor
        self.max_model_len = executor.max_model_len
        self.scheduler = Scheduler(
            BlockManager(executor.num_blocks, executor.block_size, config.enable_prefix_caching),
            self.model_runner.num_lanes,
            config.max_num_batched_tokens,
            config.enable_chunked_prefill,
        )
        if timeline is not None:
            timeline.watch(self.scheduler, self.model_runner)
        self.requests: dict[int, Request] = {}  # unfinished ones, oldest first
        self.news: News = {}
        self._ids = count()
        self._aborted: deque[int | Request] = deque()  # to be ended when no transaction runs; an id stands for all its samples

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue a prompt and return its request id; with n > 1 that of the first sample, the others' follow.

        Raises ValueError or TypeError for a prompt that can never be served.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        requests: list[Request] = []
        self._queue([self._check_prompt(prompt, params)], self.news, requests)
        return requests[0].first_id

    @for_one_thread
    def step(self) -> list[RequestOutput]:
        """Run one step; the requests that gained a token or ended since the last call, as they stand now."""
        self._step()
        outputs = self._tell(dict(self.news))
        self.news.clear()  # not before: they are told again if a warning is an error
        return outputs

    def abort(self, request_id: int) -> None:
        """End a request, with all its samples, with finish_reason "abort". An unknown or ended one is left alone.

        May be called at any moment, by any thread. Within a step it takes effect after it; if another thread was served last,
        with the next call.
        """
        self._abort([operator.index(request_id)])

    def is_finished(self) -> bool:
        """True if nothing waits, runs or is left for `step` to report, other than what the caller has aborted itself."""
        return not self.requests and all(request.seq.finish_reason == "abort" for request in list(self.news))

    @property
    def stats(self) -> Stats:
        scheduler, block_manager = self.scheduler, self.scheduler.block_manager
        return Stats(
            num_prefill_tokens=scheduler.num_prefill_tokens,
            num_decode_tokens=scheduler.num_decode_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            num_free_blocks=len(block_manager.free_block_ids),
            num_blocks=block_manager.num_blocks,
        )

    def exit(self) -> None:
        """Give the model's and the cache's memory back and end the other ranks. The engine serves nothing afterwards; a second
        call does nothing."""
        if self.model_runner is not None:
            self.model_runner.ranks.stop(_SHUT_DOWN)
        self.model_runner = None
        torch.cuda.empty_cache()  # does nothing where there is no GPU

    def __enter__(self: Engine) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.exit()

    def _find_model_runner(self) -> ModelRunner:
        """Raises RuntimeError if there is none any more, or none that can compute."""
        if self.model_runner is None:
            raise RuntimeError(_SHUT_DOWN)
        self.model_runner.ranks.check()
        return self.model_runner

    @transaction
    def _step(self) -> None:
        """One step of whatever is queued, and word of it to those who wait."""
        model_runner = self._find_model_runner()
        if seqs := self.scheduler.schedule():
            logits = model_runner.run(seqs)
            token_ids, logprobs = model_runner.sample(logits, seqs)
            caught_up = self.scheduler.postprocess(seqs, token_ids)
            self._note(caught_up, token_ids, logprobs)

    def _note(self, seqs: list[Sequence], token_ids: list[int], logprobs: list[dict[int, float] | None] | None) -> None:
        """Count the tokens that `seqs` have gained, look for stop strings in them, and send word."""
        requests = self.requests
        for row, seq in enumerate(seqs):
            request = requests[seq.seq_id]
            if token_ids[row] < 0:
                if not seq.is_finished:
                    continue
                self._warn(request, "its logits are NaN")
            elif request.looks_for_stop_strings:
                try:
                    if request.meets_stop_string():  # which comes before "length"
                        self.scheduler.finish(seq, "stop")
                except Exception as error:  # whatever somebody's tokenizer raises
                    self._fail(request, error)
            request.note(logprobs and logprobs[row])
            if seq.finish_reason is None:
                request.news[request] = None
            else:
                self._close(request)

    def _output(self, request: Request) -> RequestOutput:
        """The request as it stands. If its tokens cannot be decoded, it ends here."""
        text, detokenizer = "", request.detokenizer
        if detokenizer is not None:
            try:
                text = detokenizer.read(request.seq.token_ids, is_last=request.is_finished)
            except Exception as error:  # as above
                text = detokenizer.shown
                self._fail(request, error)
                request.note(None)
                self._close(request)
        return request.output(text)

    def _fail(self, request: Request, error: Exception) -> None:
        if request.seq.finish_reason != "error":
            self._warn(request, f"its tokens cannot be decoded: {error!r}")
            self.scheduler.finish(request.seq, "error")

    def _warn(self, request: Request, reason: str) -> None:
        self._warnings.append(f"request {request.seq.seq_id} ends with an error: {reason}")

    def _close(self, request: Request) -> None:
        """Send word of the end, and forget the request."""
        request.news[request] = None
        self.requests.pop(request.seq.seq_id, None)

    def _roll_back(self) -> None:
        """Start over from what callers know: blocks may be findable that were never written, tokens appended that nobody was
        told of."""
        for request in list(self.requests.values()):
            if request.is_finished:
                self._close(request)
            else:
                request.rewind()
        self.scheduler.reset([request.seq for request in self.requests.values()])

    def _catch_up(self) -> None:
        """End what was aborted meanwhile."""
        for _ in range(len(self._aborted)):  # not what comes now: other threads may abort faster than this
            for request in self._samples(self._aborted[0]):
                self.scheduler.finish(request.seq, "abort")
                request.note(None)
                self._close(request)
            self._aborted.popleft()

    def _abort(self, requests: Iterable[int | Request]) -> None:
        self._aborted.extend(requests)
        if self._thread == get_ident():  # else it would be in the way of the thread that is served
            with suppress(Busy):  # with a step, which ends them when done
                self._end_aborted()

    @transaction
    def _end_aborted(self) -> None:
        """Nothing but to catch up."""

    def _samples(self, wanted: int | Request) -> list[Request]:
        """The unfinished sample of this id, or, if it is the first sample's, all unfinished ones of its request."""
        request = wanted if isinstance(wanted, Request) else self.requests.get(wanted)
        if request is not None and (request is wanted or request.seq.params.n == 1):
            return [] if request.is_finished else [request]
        requests = list(self.requests.values())  # in the order of their ids: samples stand side by side
        first = bisect_left(requests, wanted, key=lambda request: request.seq.seq_id)
        return list(takewhile(lambda request: wanted in (request.first_id, request.seq.seq_id), islice(requests, first, None)))

    @transaction
    def _tell(self, news: News) -> list[RequestOutput]:
        """Outputs of the requests in `news`, which is emptied."""
        outputs = [self._output(request) for request in news]
        news.clear()
        return outputs

    @transaction
    def _count_ends(self, news: News) -> int:
        """How many of the requests in `news`, which is emptied, have ended."""
        num_ends = sum(request.is_finished for request in news)
        news.clear()
        return num_ends

    def _check_prompt(self, prompt: Prompt, params: SamplingParams) -> CheckedPrompt:
        """The prompt as token ids, if this engine can serve it."""
        self._find_model_runner()
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, not {params!r}")
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer: use stop_token_ids instead of stop")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("the checkpoint has no tokenizer: a prompt must be a list of token ids, not a str")
            prompt = self.tokenizer.encode(check_text("a prompt", prompt))
        if not isinstance(prompt, (list, tuple)):
            raise TypeError(f"a prompt must be a str or a list of token ids, not {prompt!r}")
        if not prompt:
            raise ValueError("a prompt must have at least one token")
        try:
            prompt = list(map(operator.index, prompt))
        except TypeError as error:
            wrong = next(token_id for token_id in prompt if not hasattr(token_id, "__index__"))
            raise TypeError(f"a prompt's token ids must be ints, not {wrong!r}") from error
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            wrong = min(prompt) if min(prompt) < 0 else max(prompt)
            raise ValueError(f"token id {wrong} is outside the vocabulary of {self.vocab_size}")
        if len(prompt) >= self.max_model_len:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens leaves no room to generate within max_model_len={self.max_model_len}"
            )
        if not self.config.enable_chunked_prefill and len(prompt) > self.config.max_num_batched_tokens:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens is above max_num_batched_tokens={self.config.max_num_batched_tokens}:"
                " raise that, or set enable_chunked_prefill"
            )
        return CheckedPrompt(prompt, params)

    @transaction
    def _queue(self, prompts: list[CheckedPrompt], news: News, requests: list[Request]) -> None:
        """Queue `prompts`, all or none. Their Requests, with `news`, are appended to `requests`."""
        first = len(requests)
        for token_ids, params in prompts:
            stop_token_ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self.eos_token_ids)}
            stop_token_ids = frozenset(token_id for token_id in stop_token_ids if token_id < self.vocab_size)
            max_num_tokens = min(len(token_ids) + params.max_tokens, self.max_model_len)
            seq_ids = [next(self._ids) for _ in range(params.n)]
            for sample_index, seq_id in enumerate(seq_ids):
                if params.seed is None:
                    seed = _derive_seed(self.config.seed, seq_id)
                else:
                    seed = _derive_seed(params.seed, sample_index) if sample_index else params.seed
                seq = Sequence(seq_id, token_ids, params, seed, stop_token_ids, max_num_tokens)
                detokenizer = None
                if self.tokenizer is not None:
                    detokenizer = Detokenizer(self.tokenizer, len(token_ids), params.stop_strings)
                requests.append(Request(seq, seq_ids[0], sample_index, news, detokenizer))
                self.scheduler.add(seq)
        self.requests.update({request.seq.seq_id: request for request in requests[first:]})  # from here on they are queued


def _derive_seed(seed: int, index: int) -> int:
    """The seed of a request without one (engine's seed, request's id) and of sample index > 0 (request's seed, index)."""
    return xxhash.xxh64_intdigest(struct.pack("<QQ", seed % 2**64, index))
