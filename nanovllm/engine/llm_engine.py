"""The engine's front half: requests in, one step at a time, results to whoever waits for them.

    add_request -> Request -> [ Scheduler.schedule -> ModelRunner.run, sample -> Scheduler.postprocess -> note ] -> step

It alone knows text and callers. Callers, also in several threads, share its steps: each call waits for its turn (`_alone`) and
looks at its own requests afterwards.

A call that is cut short (Ctrl-C, an error, no memory) is not undone at once. The next one starts over before it does anything
else: all unfinished requests wait, with the tokens that are noted, nothing is computed and no block is cached.
"""

import operator
import os
import struct
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from threading import Lock, get_ident
from typing import Any, ClassVar, TypeVar

import torch
import xxhash

from nanovllm.checks import check_int, check_text, check_type
from nanovllm.config import MAX_DRAFT_LEN, Config, takes
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.request import NOTHING, Noted, Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.speculation import Speculator, measure_steps
from nanovllm.engine.timeline import Timeline
from nanovllm.models.checkpoint import find_checkpoint, read_config, read_eos_token_ids, read_tokenizer
from nanovllm.models.config import read_spec
from nanovllm.models.weights import find_dtype
from nanovllm.outputs import Logprobs, RequestOutput, Stats
from nanovllm.sampling_params import SamplingParams

Prompt = str | list[int]
CheckedPrompt = tuple[list[int], SamplingParams]  # one that can be served; `params.n` sequences come of it
Told = dict[Request, Noted]  # what a caller waits for, and what it has been told of it
Engine = TypeVar("Engine", bound="LLMEngine")
Result = TypeVar("Result")


class LLMEngine:
    """Serves one model. The options are those of `Config`.

    Raises TypeError or ValueError for an option that is unknown or wrong, or cannot be had on this machine (device,
    attention_backend, max_model_len, the KV cache's size); ValueError for a checkpoint that is not there, damaged, of an
    architecture that is not supported, or whose tensors do not fit it; RuntimeError in a forked process, or if another rank
    does not start.
    """

    _process: ClassVar[int | None] = None  # that made the first engine: OpenMP and CUDA do not survive a fork

    @takes(Config)
    def __init__(self, *args: Any, **options: Any) -> None:
        self._check_process()
        self.config = config = Config.from_options(*args, **options)
        directory = find_checkpoint(os.fspath(config.model))
        hf_config = read_config(directory)
        spec = read_spec(hf_config, find_dtype(config, hf_config, directory), config.tensor_parallel_size)
        self.tokenizer = read_tokenizer(directory)
        self.eos_token_ids = read_eos_token_ids(directory, hf_config, self.tokenizer)
        timeline = None if config.trace is None else Timeline(config.trace)
        self.model_runner = runner = ModelRunner(config, spec, directory)
        LLMEngine._process = os.getpid()
        self.ranks, executor = runner.ranks, runner.executor
        self.vocab_size, self.max_model_len = spec.vocab_size, executor.max_model_len
        block_manager = BlockManager(executor.num_blocks, executor.block_size, config.enable_prefix_caching)
        limits = runner.num_lanes, config.max_num_batched_tokens
        self.scheduler = Scheduler(block_manager, *limits, config.enable_chunked_prefill)
        if draft_len := min(config.num_speculative_tokens, MAX_DRAFT_LEN, self.max_model_len - 1):
            costs = measure_steps(lambda s: runner.sample(runner.run(s), s), draft_len, *limits, self.max_model_len)
            self.scheduler.speculator = Speculator(draft_len, *costs)
        if timeline is not None:
            timeline.watch(self.scheduler, self.model_runner)
        self.requests: dict[int, Request] = {}  # unfinished ones, oldest first
        self._samples: dict[int, list[int]] = {}  # by the id of an unfinished request, those of its samples
        self._told: Told = {}  # add_request's
        self._ids = count()
        self._aborted: deque[list[Request]] = deque()  # to be ended at the end of a call
        self._lock = Lock()
        self._callers: set[int] = set()  # threads that have it or want it
        self._is_under_way = False  # a call has begun and has not ended; if the next one sees it, it was cut short

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue a prompt and return its request id; with n > 1 that of the first sample, the others' follow.

        Raises ValueError or TypeError for a prompt that can never be served.
        """
        prompt_and_params = self._check_prompt(prompt, SamplingParams() if sampling_params is None else sampling_params)
        with self._queued([prompt_and_params]) as requests:
            self._told.update(dict.fromkeys(requests, NOTHING))
            return requests[0].seq_id

    def step(self) -> list[RequestOutput]:
        """Run one step; the requests of `add_request` that gained a token or ended since the last call, as they stand now."""
        return self._alone(self._step_and_tell, self._told)

    def abort(self, request_id: int) -> None:
        """End a request, with all its samples, with finish_reason "abort". An unknown or ended one is left alone.

        May be called at any moment, by any thread. Within a step it takes effect after it.
        """
        self._check_process()
        self._aborted.append(self._find_samples(operator.index(request_id)))
        self._abort_soon()

    def is_finished(self) -> bool:
        """True if nothing waits, runs or is left for `step` to report, other than what the caller has aborted itself."""
        return not self.requests and all(request.finish_reason == "abort" for request in list(self._told))

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
            num_draft_tokens=scheduler.num_draft_tokens,
            num_accepted_tokens=scheduler.num_accepted_tokens,
        )

    def exit(self) -> None:
        """Give the model's and the cache's memory back and end the other ranks. The engine serves nothing afterwards; a second
        call does nothing."""
        if self._process == os.getpid():  # a forked process has nothing of its own to end
            self._alone(self._shut_down)

    def __enter__(self: Engine) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.exit()

    def _step(self) -> None:
        """One step of whatever is queued."""
        self.ranks.check()
        if seqs := self.scheduler.schedule():
            logits = self.model_runner.run(seqs)
            token_ids, logprobs = self.model_runner.sample(logits, seqs)
            caught_up = self.scheduler.postprocess(seqs, token_ids)
            self._note([self.requests[seq.seq_id] for seq in caught_up], logprobs)

    def _note(self, requests: list[Request], logprobs: Logprobs = None) -> None:
        """Record their new tokens, or ends: from here on these exist."""
        rows = iter(logprobs or ())
        for request in requests:
            request.note(None if logprobs is None else list(islice(rows, 1 + len(request.draft))))
            if request.finish_reason is not None:
                self._remove(request)
            if request.finish_reason == "error":
                warnings.warn(f"request {request.seq_id} ends with an error: its logits are NaN", RuntimeWarning, stacklevel=6)

    def _step_and_tell(self, told: Told) -> list[RequestOutput]:
        """One step. Outputs of the requests in `told` that have since gained a token or ended; the ended ones leave it."""
        self._step()
        outputs = {request: request.output() for request, noted in list(told.items()) if request.noted != noted}
        for request in outputs:
            if request.finish_reason is None:
                told[request] = request.noted
            else:
                del told[request]
        return list(outputs.values())

    def _alone(self, change: Callable[..., Result], *args: Any) -> Result:
        """change(*args), one at a time: other threads wait for their turn. If the last one was cut short, start over first."""
        self._check_process()
        thread = get_ident()
        if thread in self._callers:
            raise RuntimeError("the engine was called from within its own step, where only abort may be")
        if self._callers:  # locks are not fair: without a pause, a thread that asks again at once would get it again
            time.sleep(1e-5)
        try:
            self._callers.add(thread)
            with self._lock:
                if self._is_under_way:
                    self._start_over()
                self._is_under_way = True
                self._end_aborted()
                result = change(*args)
                self._end_aborted()
                self._is_under_way = False
        finally:
            self._callers.discard(thread)
        if change != self._end_aborted:
            self._abort_soon()  # what came between the last look and the release of the lock
        return result

    def _start_over(self) -> None:
        """The cache may list unwritten blocks; sequences may hold tokens that are not noted."""
        for request in list(self.requests.values()):
            request.rewind()
            if request.finish_reason is not None:
                self._remove(request)
        self.scheduler.reset(list(self.requests.values()))

    @contextmanager
    def _queued(self, prompts: list[CheckedPrompt]) -> Iterator[list[Request]]:
        """Queue `prompts`, all or none. Their Requests, n samples of a prompt side by side, which an exception takes back."""
        requests: list[Request] = []
        try:
            self._alone(self._queue, prompts, requests)
            yield requests
        except BaseException:
            self._aborted.append(requests)
            self._abort_soon()
            raise

    def _abort_soon(self) -> None:
        """End what is in `_aborted`: now, or, if there are callers, in their calls. A forked process leaves it alone."""
        while self._aborted and self._process == os.getpid() and not self._callers:
            self._alone(self._end_aborted)

    def _find_samples(self, request_id: int) -> list[Request]:
        """The unfinished samples of a request. The id of a later sample stands for that sample alone."""
        seq_ids = self._samples.get(request_id, [request_id])
        requests = [self.requests.get(seq_id) for seq_id in seq_ids]
        return [request for request in requests if request is not None]

    def _remove(self, request: Request) -> None:
        """Remove a finished request."""
        del self.requests[request.seq_id]
        first_id = request.seq_id - request.sample_index
        if not self._find_samples(first_id):
            del self._samples[first_id]

    def _end_aborted(self) -> None:
        for _ in range(len(self._aborted)):  # not what comes now: other threads may abort faster than this
            for request in self._aborted[0]:
                if request.seq_id in self.requests:
                    self.scheduler.finish(request, "abort")
                    self._note([request])
            self._aborted.popleft()

    def _check_process(self) -> None:
        if self._process not in (None, os.getpid()):
            raise RuntimeError("this process was forked from one that had made an engine: start it by multiprocessing's 'spawn'")

    def _shut_down(self) -> None:
        self.ranks.stop("this engine has been shut down by exit()")
        for owner, name in ((self, "model_runner"), (self.ranks, "executor")):  # which hold the model
            vars(owner).pop(name, None)
        torch.cuda.empty_cache()  # does nothing where there is no GPU

    def _check_prompt(self, prompt: Prompt, params: SamplingParams) -> CheckedPrompt:
        """The prompt as token ids, if this engine can serve it."""
        check_type("sampling_params", params, (SamplingParams,), "SamplingParams")
        if isinstance(prompt, str) and self.tokenizer is not None:
            prompt = self.tokenizer.encode(check_text("a prompt", prompt))
        if isinstance(prompt, str) or (params.stop_strings and self.tokenizer is None):
            raise ValueError("the checkpoint has no tokenizer: a prompt must be token ids, and stop_token_ids take stop's place")
        token_ids = list(map(operator.index, check_type("a prompt", prompt, (list, tuple), "a str or a list of token ids")))
        if not token_ids:
            raise ValueError("a prompt must have at least one token")
        for token_id in (min(token_ids), max(token_ids)):
            check_int("each token id of a prompt", token_id, 0, self.vocab_size - 1)
        if len(token_ids) >= self.max_model_len:
            raise ValueError(f"a prompt of {len(token_ids)} tokens leaves no room within max_model_len={self.max_model_len}")
        if not self.config.enable_chunked_prefill and len(token_ids) > (budget := self.config.max_num_batched_tokens):
            raise ValueError(f"{len(token_ids)} tokens are above max_num_batched_tokens={budget}: set enable_chunked_prefill")
        return token_ids, params

    def _queue(self, prompts: list[CheckedPrompt], requests: list[Request]) -> None:
        self.ranks.check()
        for token_ids, params in prompts:
            ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self.eos_token_ids)}
            stop_token_ids = frozenset(token_id for token_id in ids if token_id < self.vocab_size)
            for index in range(params.n):
                seq_id = next(self._ids)
                seed = _derive_seed(self.config.seed, seq_id) if params.seed is None else _derive_seed(params.seed, index)
                request = Request(seq_id, token_ids, params, seed, stop_token_ids, self.max_model_len, index, self.tokenizer)
                requests.append(request)
                self.scheduler.add(request)
        for request in requests:
            self._samples.setdefault(request.seq_id - request.sample_index, []).append(request.seq_id)
        self.requests.update({request.seq_id: request for request in requests})  # from here on they are queued


def _derive_seed(seed: int, index: int) -> int:
    """The seed of a sample, from its request's seed and its index, or else from the engine's seed and the sample's id."""
    return xxhash.xxh64_intdigest(struct.pack("<QQ", seed % 2**64, index))
