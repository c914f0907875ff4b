"""One call at a time: makes an engine safe for threads, signal handlers and interrupts.

Calls of several threads are serialized by a lock. The lock is held for at most one step at a time,
so threads share steps. The engine is in one of three states:

    state         lock    _is_under_way   the next call
    idle          free    False           runs
    running       held    True            waits for the lock
    interrupted   free    True            resets the engine, then runs

An interrupted call (Ctrl-C, an error, out of memory) is not rolled back immediately, because the
rollback could be interrupted, too. The reset of the next call returns unfinished requests to the
waiting queue with their committed tokens, and empties the KV cache.

`abort` may be called at any moment, also within a step or a signal handler. A running call cancels
the request after its step, or the next call does if the step fails. Without a running call,
`abort` cancels the request immediately.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import chain
from threading import Lock, get_ident
from typing import Any, ClassVar, TypeVar

from nanovllm.config import Config
from nanovllm.engine.feature import Feature
from nanovllm.engine.input_processor import PreparedPrompt
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.outputs import RequestOutput
from nanovllm.engine.request import Inbox, Request

Result = TypeVar("Result")


class ThreadSafeEngine(LLMEngine):
    """An LLMEngine that any thread may call. Raises RuntimeError in a forked process."""

    # PID of the process that created the first engine. OpenMP and CUDA do not survive fork().
    _process: ClassVar[int | None] = None

    def __init__(self, config: Config, features: Collection[Feature] = ()) -> None:
        self._check_process()
        self._lock = Lock()
        self._threads_inside: set[int] = set()  # those that hold the lock or wait for it
        self._aborted: deque[list[Request]] = deque()  # to be cancelled at the end of a call
        self._is_under_way = False
        super().__init__(config, features)
        ThreadSafeEngine._process = os.getpid()

    def add_feature(self, feature: Feature) -> None:
        self._take_turn(super().add_feature, feature)

    def add_prepared(self, prepared: PreparedPrompt) -> int:
        with self.queued([prepared], self._inbox) as requests:
            return requests[0].seq_id

    @contextmanager
    def queued(self, prompts: list[PreparedPrompt], inbox: Inbox) -> Iterator[list[Request]]:
        """Queue all prompts, or none. An exception inside the block cancels their requests."""
        make_requests = self.input_processor.make_requests
        requests = self._take_turn(make_requests, prompts, self.eos_token_ids, inbox)
        try:
            self._take_turn(self._queue, requests)
            yield requests
        except BaseException:
            for request in requests:
                request.inbox = {}  # the call has failed, so its cancellation is not reported
            self._cancel(requests)
            raise

    def step(self, inbox: Inbox | None = None) -> list[RequestOutput]:
        return self._take_turn(super().step, inbox)

    def abort(self, request_id: int) -> None:
        """As LLMEngine.abort, from any thread at any moment. A running step ends first."""
        self._check_process()
        super().abort(request_id)

    def is_finished(self) -> bool:
        self._check_process()
        return super().is_finished()

    def exit(self) -> None:
        if self._process == os.getpid():  # a forked process owns nothing that could be released
            self._take_turn(self._exit)

    def _exit(self) -> None:
        super().exit()

    def _take_turn(self, call: Callable[..., Result], *args: Any) -> Result:
        """Run call(*args) under the lock, after a reset if the previous call was interrupted.

        This takes a function and is no context manager, because an interrupt between its `yield`
        and the block of the caller could release the lock without clearing `_is_under_way`. `with`
        on a lock written in C cannot be interrupted after it has acquired the lock. (Python 3.14
        has a gap there, CPython #148874.)
        """
        self._check_process()
        thread = get_ident()
        if thread in self._threads_inside:
            raise RuntimeError("reentrant call: only abort() is allowed within a step")
        if self._threads_inside:
            # Locks are not fair. Without a pause, the thread that released the lock would mostly
            # acquire it again.
            time.sleep(1e-5)
        try:
            self._threads_inside.add(thread)
            with self._lock:
                if self._is_under_way:
                    self._reset()
                self._is_under_way = True
                self._cancel_aborted()
                result = call(*args)
                self._cancel_aborted()
                self._is_under_way = False
        finally:
            self._threads_inside.discard(thread)
        # Aborts that came after the last `_cancel_aborted`, which `_cancel_soon` itself repeats.
        if self._aborted and call != self._cancel_aborted:
            self._cancel_soon()
        return result

    def _reset(self) -> None:
        """Recover from an interrupted call.

        Cached blocks may not have been written, and sequences can have tokens that are not
        committed.
        """
        self.in_flight = None
        for request in self._list_requests():
            request.roll_back()
            if request.finish_reason is not None:
                self._remove(request)
        self.scheduler.reset(self._list_requests())

    def _list_requests(self) -> list[Request]:
        """List unfinished requests, oldest first."""
        return list(dict.fromkeys(chain.from_iterable(self.requests.values())))

    def _cancel(self, requests: list[Request]) -> None:
        self._aborted.append(requests)
        self._cancel_soon()

    def _cancel_soon(self) -> None:
        """Cancel aborted requests, unless a call is under way, which cancels them at its end."""
        while self._aborted and self._process == os.getpid() and not self._threads_inside:
            self._take_turn(self._cancel_aborted)

    def _cancel_aborted(self) -> None:
        # A fixed number of times, because other threads may keep adding aborts.
        for _ in range(len(self._aborted)):
            super()._cancel(self._aborted[0])
            self._aborted.popleft()

    def _check_process(self) -> None:
        if self._process not in (None, os.getpid()):
            raise RuntimeError(
                "this process was forked from one that had made an engine, and engines do not"
                " survive fork(): start it with multiprocessing's 'spawn' method"
            )
