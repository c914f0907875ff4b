"""A thread that owns an engine, for callers on an event loop.

    async with engine.submit(prompts) as stream       event loop
        EngineThread.add -> LLM.add_prepared         engine thread, between two steps
    async for outputs in stream                       event loop
        Stream <- LLM.step                            engine thread, after a step

The event loop never waits for a step. The thread steps while there are unfinished requests and
sleeps on a condition otherwise. Requests that arrive during a step join the next one.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial

from nanovllm import LLM
from nanovllm.engine.input_processor import PreparedPrompt
from nanovllm.engine.outputs import RequestOutput
from nanovllm.server.errors import ApiError

Outputs = dict[int, RequestOutput]  # index of a choice -> its newest output


class Stream:
    """Carries the outputs of one HTTP request from the engine thread to the event loop.

    Only the newest output of each choice is kept. A slow client therefore gets fewer and longer
    chunks, and no outputs accumulate for it.
    """

    def __init__(self, prompts: list[PreparedPrompt]) -> None:
        self.prompts = prompts
        self.request_ids: list[int] = []  # one per choice, written by the engine thread
        self.newest: Outputs = {}
        self.error: str | None = None
        self.has_news = asyncio.Event()

    def put(self, outputs: Outputs, error: str | None = None) -> None:
        """Called on the event loop."""
        self.newest.update(outputs)
        self.error = self.error or error
        self.has_news.set()

    async def __aiter__(self) -> AsyncIterator[Outputs]:
        """Yield new outputs until all choices have finished. Raises ApiError."""
        num_unfinished = sum(prompt.params.n for prompt in self.prompts)
        while num_unfinished > 0:
            await self.has_news.wait()
            self.has_news.clear()
            outputs = self.newest
            self.newest = {}
            for output in outputs.values():
                if output["finish_reason"] is not None:
                    num_unfinished -= 1
            if outputs:
                yield outputs
            if self.error is not None and num_unfinished > 0:
                raise ApiError(self.error, status=503)


def _put_all(news: dict[Stream, Outputs]) -> None:
    for stream, outputs in news.items():
        stream.put(outputs)


class EngineThread(threading.Thread):
    """Owns an engine and steps it while there are unfinished requests.

    A subclass can act at two points of its loop, `delay_step` and `stepped`. By `queue` it runs
    functions in this thread, such as `add`, `abort` and `replace`.
    """

    # Between two hand-overs, for each unfinished choice: the chunks of 64 streams are 32 ms apart.
    # Twice as long gave 2% more tokens/s in a measurement on two cores.
    seconds_per_choice = 0.0005

    def __init__(self, llm: LLM) -> None:
        super().__init__(name="engine")
        self.llm = llm
        self.stop_reason: str | None = None
        self.stopping = asyncio.Event()  # set soon after stop_reason, on the event loop
        self.loop: asyncio.AbstractEventLoop  # from start_on
        self._condition = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()  # to run between two steps
        self._streams: set[Stream] = set()  # open ones
        self._choices: dict[int, tuple[Stream, int]] = {}  # request id -> stream, index of choice
        self._news: dict[Stream, Outputs] = {}  # not handed over yet
        self._next_hand_over = 0.0

    # On the event loop.

    def start_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread. It ends after `stop`, or if the engine fails."""
        self.loop = loop
        self.start()

    @asynccontextmanager
    async def submit(self, prompts: list[PreparedPrompt]) -> AsyncIterator[Stream]:
        """Queue prompts of `LLM.prepare_prompts`. Leaving the context aborts what is unfinished."""
        stream = Stream(prompts)
        with self._condition:
            # A stream that is open when the engine stops ends with an error.
            self.raise_if_stopped()
            self._streams.add(stream)
            self.queue(partial(self.add, stream))
        try:
            yield stream
        finally:
            with self._condition:
                self._streams.discard(stream)
                self.queue(partial(self._abort, stream))

    # In any thread.

    def queue(self, command: Callable[[], None]) -> None:
        """Run a command between two steps, unless the engine stops before. An error stops it."""
        with self._condition:
            self._commands.append(command)
            self._condition.notify()

    def raise_if_stopped(self) -> None:
        """Raise ApiError if the engine no longer serves requests."""
        if self.stop_reason is not None:
            raise ApiError(self.stop_reason, status=503)

    def stop(self, reason: str) -> None:
        """Make the thread end all streams, shut the engine down, and end. `join` waits for that."""
        with self._condition:
            if self.stop_reason is None:
                self.stop_reason = reason
            self._condition.notify()
        self.loop.call_soon_threadsafe(self.stopping.set)

    # In the engine thread.

    def run(self) -> None:
        try:
            while self.stop_reason is None:
                with self._condition:
                    self._condition.wait_for(self._is_due, self._seconds_to_step())
                while self._commands:
                    command = self._commands.popleft()
                    command()
                if self.stop_reason is None and self._seconds_to_step() == 0:
                    with suppress(RuntimeWarning):  # concerns one request; raised with -W error
                        self._hand_over(self.llm.step())
                    self.stepped()
        except Exception as error:
            self.stop(f"the engine failed: {error!r}")
            raise  # threading.excepthook prints the traceback
        finally:
            with self._condition:
                self.fail(self._streams, self.stop_reason)
            self.llm.exit()

    def _is_due(self) -> bool:
        is_due = bool(self._commands) or self.stop_reason is not None
        return is_due or self._seconds_to_step() == 0

    def _seconds_to_step(self) -> float | None:
        """Return when the next step is due, from now. None: not before a command."""
        return None if self.llm.is_finished() else self.delay_step()

    def delay_step(self) -> float | None:
        """Return for how many seconds to hold an engine that can step. None: until a command."""
        return 0.0

    def stepped(self) -> None:
        """A step has been taken, and its outputs have been handed over."""

    def add(self, stream: Stream) -> None:
        """Queue the requests of a stream."""
        for prompt in stream.prompts:
            first_id = self.llm.add_prepared(prompt)
            for request_id in range(first_id, first_id + prompt.params.n):
                self._choices[request_id] = (stream, len(stream.request_ids))
                stream.request_ids.append(request_id)

    def _abort(self, stream: Stream) -> None:
        for request_id in stream.request_ids:
            choice = self._choices.get(request_id)
            if choice is not None and choice[0] is stream:
                del self._choices[request_id]
                self.llm.abort(request_id)

    def abort(self, request_id: int, reason: str) -> None:
        """Abort a request, and end its stream with an error."""
        self.llm.abort(request_id)
        choice = self._choices.pop(request_id, None)
        if choice is not None:
            self.fail([choice[0]], reason)

    def replace(self, llm: LLM, reason: str) -> None:
        """Go on with another engine, and end the streams that this one generates for.

        Streams whose requests are not queued yet are served by the other engine.
        """
        self.fail({stream for stream, _ in self._choices.values()}, reason)
        self._choices.clear()
        self._news = {}
        self.llm.exit()
        self.llm = llm

    def _hand_over(self, outputs: list[RequestOutput]) -> None:
        """Give each stream its outputs, in one call of the event loop for all streams.

        First and last tokens are handed over immediately. With many streams, other tokens wait for
        the next steps, because each chunk takes time from the cores that the engine computes on.
        """
        is_urgent = False
        for output in outputs:
            request_id = output["request_id"]
            if request_id not in self._choices:
                continue
            stream, index = self._choices[request_id]
            self._news.setdefault(stream, {})[index] = output
            if output["finish_reason"] is not None:
                del self._choices[request_id]
                is_urgent = True
            elif len(output["token_ids"]) == 1:
                is_urgent = True
        now = time.monotonic()
        if self._news and (is_urgent or now >= self._next_hand_over):
            self.loop.call_soon_threadsafe(_put_all, self._news)
            self._news = {}
            self._next_hand_over = now + self.seconds_per_choice * len(self._choices)

    def fail(self, streams: Iterable[Stream], error: str | None) -> None:
        """End streams with an error."""
        for stream in streams:
            self.loop.call_soon_threadsafe(stream.put, {}, error)
