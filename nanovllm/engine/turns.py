"""One call at a time: makes an engine safe for threads, signal handlers and interrupts.

Calls of several threads are serialized by a lock. It is held for at most one step at a time, so
threads share steps.

An interrupted call (Ctrl-C, an error, out of memory) is not rolled back immediately. The next call
first resets: unfinished requests return to the waiting queue with their committed tokens, and the
KV cache is emptied.

`abort` may be called at any moment, also within a step or a signal handler. A running call cancels
the request after its step. Without one, `abort` does so at once.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any, ClassVar, TypeVar

from nanovllm.config import Config
from nanovllm.engine.input_processor import CheckedPrompt, Prompt
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.request import Inbox, Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

Result = TypeVar("Result")


class SharedEngine(LLMEngine):
    """An LLMEngine that any thread may call. Raises RuntimeError in a forked process."""

    # PID of the process that created the first engine. OpenMP and CUDA do not survive fork().
    _process: ClassVar[int | None] = None

    def __init__(
        self,
        config: Config,
        scheduler_class: type[Scheduler],
        model_runner_class: type[ModelRunner],
    ) -> None:
        self._check_process()
        super().__init__(config, scheduler_class, model_runner_class)
        SharedEngine._process = os.getpid()
        self._lock = Lock()
        self._callers: set[int] = set()  # threads that hold the lock or wait for it
        self._aborted: deque[list[Request]] = deque()  # to be cancelled at the end of a call
        # True while a call runs. If a new call finds it set, the previous one was interrupted.
        self._is_under_way = False

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue a prompt and return its request id. The ids of n samples are consecutive.

        Raises ValueError or TypeError for a prompt that can never be served.
        """
        checked = self.input_processor.check(prompt, sampling_params)
        with self._queued([checked], self._inbox) as requests:
            return requests[0].seq_id

    def step(self) -> list[RequestOutput]:
        """Run one step. Return the requests that gained tokens or finished since the last call."""
        self._run_step()
        return self._take_turn(self._report, self._inbox)

    def _run_step(self) -> None:
        self._take_turn(self._step)
        self._issue_warnings()

    def abort(self, request_id: int) -> None:
        """Cancel a request with all its samples. No effect if it is unknown or finished.

        Any thread may call it at any moment. During a step it takes effect after the step.
        """
        self._check_process()
        self._aborted.append(self._find_samples(request_id))
        self._cancel_soon()

    def exit(self) -> None:
        """Release memory and stop the other ranks. A second call has no effect."""
        if self._process == os.getpid():  # a forked process owns nothing that could be released
            self._take_turn(super().exit)

    @contextmanager
    def _queued(self, prompts: list[CheckedPrompt], inbox: Inbox) -> Iterator[list[Request]]:
        """Queue all prompts, or none. An exception inside the block cancels their requests."""
        make_requests = self.input_processor.make_requests
        requests = self._take_turn(make_requests, prompts, self.eos_token_ids, inbox)
        try:
            self._take_turn(self._queue, requests)
            yield requests
        except BaseException:
            for request in requests:
                request.inbox = {}  # the call has failed, so its cancellation is not reported
            self._aborted.append(requests)
            self._cancel_soon()
            raise

    def _take_turn(self, call: Callable[..., Result], *args: Any) -> Result:
        """Run call(*args) under the lock, after a reset if the previous call was interrupted."""
        self._check_process()
        thread = get_ident()
        if thread in self._callers:
            raise RuntimeError("reentrant call: only abort() is allowed within a step")
        if self._callers:
            # Locks are not fair. Without a pause, a thread that asks again at once would win.
            time.sleep(1e-5)
        try:
            self._callers.add(thread)
            with self._lock:
                if self._is_under_way:
                    self._reset()
                self._is_under_way = True
                self._cancel_aborted()
                result = call(*args)
                self._cancel_aborted()
                self._is_under_way = False
        finally:
            self._callers.discard(thread)
        if call != self._cancel_aborted:
            self._cancel_soon()  # aborts that came while the lock was released
        return result

    def _reset(self) -> None:
        """Recover from an interrupted call.

        The prefix cache can list blocks that were never written, and sequences can have tokens that
        are not committed.
        """
        for request in list(self.requests.values()):
            request.roll_back()
            if request.finish_reason is not None:
                self._remove(request)
        self.scheduler.reset(list(self.requests.values()))

    def _cancel_soon(self) -> None:
        """Cancel aborted requests, unless a call is under way, which cancels them at its end."""
        while self._aborted and self._process == os.getpid() and not self._callers:
            self._take_turn(self._cancel_aborted)

    def _cancel_aborted(self) -> None:
        # A fixed number of times, because other threads may keep adding aborts.
        for _ in range(len(self._aborted)):
            for request in self._aborted[0]:
                self._cancel(request)
            self._aborted.popleft()

    def _check_process(self) -> None:
        if self._process not in (None, os.getpid()):
            raise RuntimeError(
                "this process was forked from one that had made an engine, and engines do not"
                " survive fork(): start it with multiprocessing's 'spawn' method"
            )
