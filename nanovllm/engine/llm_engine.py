"""The engine: requests in, one step at a time, outputs back.

    add_request -> Scheduler.schedule -> ModelRunner.forward, sample -> Scheduler.postprocess
                -> commit -> outputs

    while not engine.is_finished():
        outputs = engine.step()

It serves one thread, and an exception from a step leaves it unusable. The subclass in
features/thread_safety.py adds a lock and the recovery of interrupted calls.
"""

import operator
import warnings
from collections import defaultdict
from typing import TypeVar

import torch

from nanovllm.checkpoints.checkpoint import Checkpoint
from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.extension import Extension
from nanovllm.engine.input_processor import (
    NEEDS_LLM,
    ChooseFactory,
    InputProcessor,
    PreparedPrompt,
    Prompt,
    choose_plain_factory,
)
from nanovllm.engine.model_runner import LogitsProcessor, ModelRunner
from nanovllm.engine.request import Inbox, Request
from nanovllm.engine.scheduler import POLICIES
from nanovllm.engine.sequence import Sequence
from nanovllm.models.architectures import read_spec
from nanovllm.models.spec import ModelSpec
from nanovllm.outputs import Logprobs, RequestOutput, Stats
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import invalid, naming
from nanovllm.worker.device import engine_settings

Engine = TypeVar("Engine", bound="LLMEngine")


class LLMEngine:
    """Serves one model.

    LLM, a subclass, adds optional features: drafts, traces, recurrent states, sliding windows,
    structured outputs, and log probabilities of prompts. LLMEngine alone rejects what needs them.

    Raises ValueError for an option that this machine cannot provide (device, attention_backend,
    max_model_len, size of the KV cache).
    Raises ValueError for a missing, damaged or unsupported checkpoint.
    Raises RuntimeError if another rank does not start.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        checkpoint = Checkpoint.open(config)
        spec = read_spec(
            checkpoint.hf_config,
            checkpoint.dtype,
            num_ranks=config.tensor_parallel_size,
            quantization=config.quantization,
            max_model_len=config.max_model_len,
        )
        self.check_features(spec)
        self.tokenizer = checkpoint.tokenizer
        # Ids above the vocabulary cannot be sampled.
        self.eos_token_ids = frozenset(i for i in checkpoint.eos_token_ids if i < spec.vocab_size)
        self.model_runner = ModelRunner(config, spec, checkpoint.directory)
        self.device = self.model_runner.device
        self.executor = self.model_runner.executor
        worker = self.executor.worker
        self.vocab_size = spec.vocab_size
        self.max_model_len = worker.max_model_len
        blocks = BlockManager(worker.num_blocks, worker.block_size, config.enable_prefix_caching)
        policy = POLICIES[config.policy_name]
        self.scheduler = policy(
            blocks,
            self.model_runner.num_lanes,
            worker.max_num_batched_tokens,
            self.make_extensions(spec),
        )
        self.model_runner.extensions = self.scheduler.extensions
        self.model_runner.processors = self.make_processors()
        self.input_processor = InputProcessor(
            config,
            tokenizer=self.tokenizer,
            default_params=checkpoint.default_params,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            max_prompt_len=None if policy.splits_prompts else worker.max_num_batched_tokens,
            choose_factory=self.make_factory_chooser(),
        )
        self.requests: dict[int, Request] = {}  # unfinished samples by seq_id, oldest first
        # The same by the seq_id of the first sample.
        self.samples_by_request = defaultdict[int, dict[Request, None]](dict)
        self._inbox: Inbox = {}  # of the callers of add_request

    def check_features(self, spec: ModelSpec) -> None:
        """Raise ValueError for a model or an option that needs a feature of LLM."""
        if self.config.num_speculative_tokens:
            raise invalid("num_speculative_tokens", NEEDS_LLM)
        if self.config.trace is not None:
            raise invalid("trace", NEEDS_LLM)
        if spec.has_states:
            raise invalid("a model with recurrent states", NEEDS_LLM)
        if spec.window is not None:
            raise invalid("a model with sliding windows", NEEDS_LLM)

    def make_extensions(self, spec: ModelSpec) -> list[Extension]:
        """Make the optional features. LLM overrides this."""
        return []

    def make_processors(self) -> list[LogitsProcessor]:
        """Return what changes the logits before a token is sampled, in order."""
        return self.model_runner.processors

    def make_factory_chooser(self) -> ChooseFactory:
        """Return the function that chooses the class of a request. LLM overrides this."""
        return choose_plain_factory

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue a prompt and return its request id. The ids of n samples are consecutive.

        Raises ValueError or TypeError for a prompt that can never be served.
        """
        (prepared,) = self.input_processor.prepare([prompt], sampling_params)
        return self.add_prepared(prepared)

    def add_prepared(self, prepared: PreparedPrompt) -> int:
        """As add_request, for a prompt that was prepared before."""
        make_requests = self.input_processor.make_requests
        requests = make_requests([prepared], self.eos_token_ids, self._inbox)
        self._queue(requests)
        return requests[0].seq_id

    def _queue(self, requests: list[Request]) -> None:
        self.executor.raise_if_stopped()
        for request in requests:
            self.scheduler.add(request)
            self.requests[request.seq_id] = request
            self.samples_by_request[request.first_seq_id][request] = None

    def step(self, inbox: Inbox | None = None) -> list[RequestOutput]:
        """Run one step. Return the requests that gained tokens or finished since the last call.

        With `inbox`, they are only requests that report there. Without it, they are those of
        add_request.
        """
        self.executor.raise_if_stopped()
        with engine_settings(self.device):
            seqs = self.scheduler.schedule()
            if seqs:
                logits = self.model_runner.forward(seqs)
                sampled, logprobs = self.model_runner.sample(logits, seqs)
                self.scheduler.postprocess(seqs, sampled)
                self._commit(seqs, logprobs)
        return self._report(self._inbox if inbox is None else inbox)

    def _commit(self, seqs: list[Sequence], logprobs: Logprobs) -> None:
        """Commit new tokens and finish reasons. They survive an interrupt from here on."""
        for index, seq in enumerate(seqs):
            if seq.num_logits == 0:
                continue  # no token was sampled
            request = self.requests[seq.seq_id]
            request.commit(logprobs[index] if logprobs is not None else None)
            if request.finish_reason is not None:
                self._remove(request)
                if request.finish_reason == "error":
                    reason = request.explain_error()
                    self._warn(f"request {request.seq_id} ends with an error: {reason}")

    def _warn(self, message: str) -> None:
        warnings.warn(message, RuntimeWarning, stacklevel=4)  # the caller of step

    def _report(self, inbox: Inbox) -> list[RequestOutput]:
        """Return the requests with progress that was not reported yet."""
        outputs = [request.output() for request in inbox]
        inbox.clear()
        return outputs

    def abort(self, request_id: int) -> None:
        """Abort a request with all its samples. No effect if it is unknown or finished."""
        self._cancel(self._find_samples(request_id))

    def _find_samples(self, request_id: int) -> list[Request]:
        """Return the unfinished samples of a request, or one sample by the id of a later one."""
        if isinstance(request_id, bool):
            raise TypeError(f"request_id must be an int, not {request_id}")
        with naming("request_id", TypeError, kind=TypeError):
            request_id = operator.index(request_id)
        samples = self.samples_by_request.get(request_id)  # [] would add an empty entry
        if samples is not None:
            return list(samples)
        request = self.requests.get(request_id)
        return [] if request is None else [request]

    def _cancel(self, requests: list[Request]) -> None:
        """Cancel the unfinished ones among `requests`."""
        for request in requests:
            if request.seq_id in self.requests:
                self.scheduler.finish(request, "abort")
                request.commit()
                self._remove(request)

    def _remove(self, request: Request) -> None:
        """Remove a finished request from both dicts. An interrupted `_queue` may have filled one.

        `requests` comes last, because a reset after an interrupt removes what is still in it.
        """
        samples = self.samples_by_request.get(request.first_seq_id, {})
        samples.pop(request, None)
        if not samples:
            self.samples_by_request.pop(request.first_seq_id, None)
        self.requests.pop(request.seq_id, None)

    def is_finished(self) -> bool:
        """Return whether all requests have finished and `step` has returned their last outputs."""
        return not self.requests and not self._inbox

    @property
    def stats(self) -> Stats:
        scheduler = self.scheduler
        return Stats(
            num_prefill_tokens=scheduler.num_prefill_tokens,
            num_decode_tokens=scheduler.num_decode_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            num_free_blocks=len(scheduler.block_manager.free_block_ids),
            num_blocks=scheduler.block_manager.num_blocks,
            num_draft_tokens=scheduler.num_draft_tokens,
            num_accepted_tokens=scheduler.num_accepted_tokens,
            num_window_blocks=0,  # LLM overrides both
            num_free_window_blocks=0,
        )

    def exit(self) -> None:
        """Release memory and stop the other ranks. A second call has no effect."""
        self.executor.stop("this engine has been shut down by exit()")
        vars(self).pop("model_runner", None)
        vars(self.executor).pop("worker", None)  # both refer to the model
        torch.cuda.empty_cache()  # no effect without a GPU

    def __enter__(self: Engine) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.exit()
