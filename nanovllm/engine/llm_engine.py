"""The engine: requests in, one step at a time, outputs back.

    add_request -> Scheduler.schedule -> ModelRunner.forward, sample, read
                -> Scheduler.advance, postprocess -> commit -> outputs

    while not engine.is_finished():
        outputs = engine.step()

It serves one thread, and an exception from a step leaves it unusable. The subclass in
features/thread_safety.py adds a lock and the recovery of interrupted calls.

On a GPU, steps overlap. The host launches the forward pass of a step before it reads the tokens of
the previous step, and `advance` comes before `read`. Pending tokens stand for the tokens that are
not read (sequence.py). Only the forward pass has to start so early. Sampling needs masks and
penalties, which depend on these tokens, and can wait until they are read, because the device is
busy with the forward pass:

    host     | plan 2, launch 2 | read 1, record 1 | sample 2 | plan 3, launch 3 | read 2, ...
    device     ... forward 1, sample 1 | forward 2 ..................... | sample 2 | forward 3 ...

When step 1 turns out to end a sequence, step 2 is in flight and still writes to its blocks. Step 3
may take these blocks nevertheless, because the device runs all steps in the order of one stream.
"""

import math
import warnings
from collections import deque
from collections.abc import Collection
from typing import TypeVar, cast

import torch

from nanovllm.checkpoints.checkpoint import Checkpoint
from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.feature import Feature, check_served
from nanovllm.engine.input_processor import InputProcessor, PreparedPrompt, Prompt
from nanovllm.engine.model_runner import ModelRunner, Sampled
from nanovllm.engine.outputs import Logprobs, RequestOutput, Stats
from nanovllm.engine.request import Inbox, Request
from nanovllm.engine.scheduler import POLICIES
from nanovllm.engine.step import Step
from nanovllm.models.architectures import read_spec
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompt_encoder import PromptEncoder
from nanovllm.utils.checks import check_choice, check_int
from nanovllm.utils.helpers import report
from nanovllm.worker.device import engine_settings

Engine = TypeVar("Engine", bound="LLMEngine")


class LLMEngine:
    """Serves one model, with the features that it is given. LLM, a subclass, has all of them.

    Raises ValueError for an option or a model that this machine or these features cannot serve, and
    for a missing, damaged or unsupported checkpoint.
    Raises RuntimeError if another rank does not start.
    """

    def __init__(self, config: Config, features: Collection[Feature] = ()) -> None:
        self.config = config
        check_choice("policy", config.policy, tuple(POLICIES))
        policy = POLICIES[config.policy]
        checkpoint = Checkpoint.open(config)
        spec = read_spec(
            checkpoint.hf_config,
            checkpoint.dtype,
            num_ranks=config.tensor_parallel_size,
            quantization=config.quantization,
            max_model_len=config.max_model_len,
            model_impl=config.model_impl,
        )
        check_served(config.needs + spec.needs, features)
        self.tokenizer = checkpoint.tokenizer
        # Ids above the vocabulary cannot be sampled.
        self.eos_token_ids = frozenset(i for i in checkpoint.eos_token_ids if i < spec.vocab_size)
        self.model_runner = ModelRunner(config, spec, checkpoint.directory)
        self.device = self.model_runner.device
        self.executor = self.model_runner.executor
        worker = self.executor.worker
        self.vocab_size = spec.vocab_size
        self.max_model_len = worker.max_model_len
        self.scheduler = policy(
            BlockManager(worker.plan.num_blocks, worker.block_size, config.enable_prefix_caching),
            worker.plan.num_lanes,
            worker.max_num_batched_tokens,
        )
        max_step_len = None if policy.splits_prompts else worker.max_num_batched_tokens
        self.features = self.model_runner.features
        self.scheduler.features = self.features
        self.input_processor = InputProcessor(
            PromptEncoder(self.tokenizer, spec.vocab_size, self.max_model_len, max_step_len),
            checkpoint.default_params,
            config.seed,
            self.features,
        )
        # Unfinished samples by id, oldest first. The id of a request is that of its first sample,
        # and stands for all of them. The id of a later one stands for this sample only.
        self.requests: dict[int, dict[Request, None]] = {}
        self._inbox: Inbox = {}  # of the callers of add_request
        self.warnings = deque[str | RuntimeWarning]()  # to be issued after the step
        self.in_flight: Sampled | None = None  # what the newest step has sampled, not read yet
        # Whether a step is launched before the tokens of the previous step are read.
        self.overlaps = self.device.type == "cuda"
        for feature in features:
            self.add_feature(feature)

    def add_feature(self, feature: Feature) -> None:
        """Add a feature after the others, if this engine uses it, between two steps.

        A feature with state of sequences must come before the first request.
        """
        if not feature.start(self):
            return
        if self.overlaps and not feature.can_overlap:
            with engine_settings(self.device):
                self._complete()
            self.overlaps = False
            report(f"steps do not overlap, because of {feature.serves}")
        self.features.append(feature)

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
            for request_id in request.ids:
                self.requests.setdefault(request_id, {request: None})[request] = None

    def step(self, inbox: Inbox | None = None) -> list[RequestOutput]:
        """Run one step. Return the requests that gained tokens or finished since the last call.

        With `inbox`, they are only requests that report there. Without it, they are those of
        add_request.
        """
        self.executor.raise_if_stopped()
        with engine_settings(self.device):
            step = self.scheduler.schedule()
            if step.seqs:
                logits = self.model_runner.forward(step)
            self._complete()  # the previous step, while the device computes this one
            if step.seqs:
                self.in_flight = self.model_runner.sample(logits, step)
                if self.overlaps:
                    self.scheduler.advance(step)
                else:
                    self._complete()
        # Warnings come first, because one that is an error (-W error) would lose the outputs.
        while self.warnings:
            warnings.warn(self.warnings.popleft(), RuntimeWarning, stacklevel=2)
        if inbox is None:
            inbox = self._inbox
        outputs = [request.output() for request in inbox]
        inbox.clear()
        return outputs

    def _complete(self) -> None:
        """Read the tokens of the step in flight, if there is one, and record them."""
        if self.in_flight is None:
            return
        step = self.in_flight.step
        sampled, logprobs = self.model_runner.read(self.in_flight)
        self.in_flight = None
        if not self.overlaps:
            self.scheduler.advance(step)
        self.scheduler.postprocess(step, sampled)
        self._commit(step, logprobs)

    def _commit(self, step: Step, logprobs: Logprobs) -> None:
        """Commit new tokens and finish reasons. They survive an interrupt from here on."""
        for index, (seq, _, num_logits) in enumerate(step):
            request = cast(Request, seq)
            # No token was sampled, or the request was aborted while the step was in flight.
            if num_logits == 0 or request.has_ended:
                continue
            request.commit(logprobs[index] if logprobs is not None else None)
            if request.finish_reason is not None:
                self._remove(request)
                if request.finish_reason == "error":
                    reason = request.explain_error()
                    message = f"request {request.seq_id} ends with an error: {reason}"
                    warning = RuntimeWarning(message)
                    warning.__cause__ = request.failure
                    self.warnings.append(warning)

    def abort(self, request_id: int) -> None:
        """Abort a request with all its samples. No effect if it is unknown or finished."""
        request_id = check_int("request_id", request_id, -math.inf)
        self._cancel(list(self.requests.get(request_id, ())))

    def _cancel(self, requests: list[Request]) -> None:
        """Cancel the unfinished ones among `requests`."""
        for request in requests:
            if request in self.requests.get(request.seq_id, ()):
                self.scheduler.finish(request, "abort")
                request.commit()
                self._remove(request)

    def _remove(self, request: Request) -> None:
        """Remove a finished request, which an interrupt may have removed in part.

        No entry is ever left empty, because `is_finished` would wait for it.
        """
        for request_id in request.ids:
            samples = self.requests.get(request_id, {})
            if samples.keys() <= {request}:
                self.requests.pop(request_id, None)
            else:
                samples.pop(request, None)

    def is_finished(self) -> bool:
        """Return whether all requests have finished and `step` has returned their last outputs."""
        return not self.requests and not self._inbox

    @property
    def stats(self) -> Stats:
        scheduler = self.scheduler
        stats = {
            "num_prefill_tokens": scheduler.num_prefill_tokens,
            "num_decode_tokens": scheduler.num_decode_tokens,
            "num_cached_tokens": scheduler.num_cached_tokens,
            "num_preemptions": scheduler.num_preemptions,
            "num_waiting": len(scheduler.waiting),
            "num_running": len(scheduler.running),
            "num_free_blocks": len(scheduler.block_manager.free_block_ids),
            "num_blocks": scheduler.block_manager.num_blocks,
        }
        for feature in self.features:
            stats |= feature.stats()
        # Counters of features that this engine does not use are 0.
        return cast(Stats, dict.fromkeys(Stats.__annotations__, 0) | stats)

    def exit(self) -> None:
        """Release memory, and stop the other ranks. A second call has no effect."""
        self.executor.stop("this engine has been shut down by exit()")
        self.in_flight = None
        vars(self).pop("model_runner", None)
        vars(self.executor).pop("worker", None)  # both refer to the model
        torch.cuda.empty_cache()  # no effect without a GPU
        for feature in self.features:
            feature.exit()

    def __enter__(self: Engine) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.exit()
