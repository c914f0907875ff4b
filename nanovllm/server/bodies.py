"""Reads the JSON of requests, within a limit of size and of time.

Work on a request is cancelled when its client disconnects, or when the engine stops.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import copy_context
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from nanovllm.features.structured_outputs.grammars import GrammarCheck, run_check
from nanovllm.server.engine_thread import EngineThread
from nanovllm.server.errors import ApiError, JsonObject
from nanovllm.server.grammar_checks import GrammarChecks
from nanovllm.utils.checks import show

T = TypeVar("T")

# A parsed body can take 25 times as many bytes, so it must not be longer than the engine can use.
BYTES_PER_TOKEN = 16  # of a long prompt, also as token ids, or in escapes such as \u4f60
SPARE_BYTES = 2**21  # for tools and schemas, or for several prompts
LARGE_BYTES = 2**18  # longer bodies are parsed one at a time
BODY_SECONDS = 30  # for a body to arrive
CONSTRAINTS = (b'"response_format"', b'"structured_outputs"', b'"tool_choice"')


class UncheckedGrammar(Exception):
    """A request needs a grammar that no process has compiled yet. The argument is its check."""


class Bodies:
    """Reads and parses bodies.

    Those that may have a constraint have two threads of their own, because a grammar can take
    seconds to compile.
    """

    def __init__(self, engine: EngineThread) -> None:
        self.engine = engine
        self.compilers = ThreadPoolExecutor(2)
        self.large = asyncio.Lock()
        self.grammar_checks = GrammarChecks()

    async def read(self, request: Request, parse: Callable[[JsonObject], T]) -> T:
        """Return parse(body), called in a thread. Raises ClientDisconnect and ApiError."""
        stop = self.engine.stopping.wait()
        work = self._read(request, parse)
        return await _until(stop, work, lambda: ApiError(str(self.engine.stop_reason), status=503))

    async def _read(self, request: Request, parse: Callable[[JsonObject], T]) -> T:
        """Read a body, which must be declared as JSON.

        Browsers send the content type application/json to another origin only after a preflight
        request, which fails here.
        """
        content_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise ApiError(
                "the request needs the header Content-Type: application/json", status=415
            )
        try:
            data = await asyncio.wait_for(self._receive(request), BODY_SECONDS)
        except asyncio.TimeoutError as error:
            message = f"the body did not arrive within {BODY_SECONDS} seconds"
            raise ApiError(message, status=408) from error
        executor = self.compilers if any(name in data for name in CONSTRAINTS) else None
        turn = self.large if len(data) > LARGE_BYTES else None
        work = self.call(lambda: parse(_load(data)), executor, turn)
        return await until_disconnect(request, work)

    async def _receive(self, request: Request) -> bytearray:
        data = bytearray()
        max_bytes = SPARE_BYTES + BYTES_PER_TOKEN * self.engine.llm.max_model_len
        async for chunk in request.stream():
            data += chunk
            if len(data) > max_bytes:
                message = f"the body exceeds {max_bytes} bytes: send fewer or shorter prompts"
                raise ApiError(message, status=413)
        return data

    async def call(
        self,
        prepare: Callable[[], T],
        executor: ThreadPoolExecutor | None,
        turn: asyncio.Lock | None,
    ) -> T:
        """Return prepare(), called in a thread, while `turn` is locked.

        If it needs a grammar that is not checked, it ends, so that the thread is free. It is called
        again after the check. Cancelling this call cancels the check.
        """
        problems: dict[bytes, BaseException] = {}

        def report_problem(check: GrammarCheck) -> None:
            raise problems.get(check.digest) or UncheckedGrammar(check)

        run_check.set(report_problem)
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with turn or nullcontext():
                    return await loop.run_in_executor(executor, copy_context().run, prepare)
            except UncheckedGrammar as unchecked:
                check: GrammarCheck = unchecked.args[0]
            # After the `except` block, because its traceback keeps the parsed body alive.
            problem = await self.grammar_checks.run(check)
            if problem is not None:
                problems[check.digest] = problem


def _load(data: bytearray) -> JsonObject:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(f"the body must be a JSON object, not {show(body)}")
    return body


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, or cancel it and raise ClientDisconnect when the client disconnects."""
    # After the body, the only message is a disconnect.
    return await _until(request.receive(), work, ClientDisconnect)


async def _until(
    end: Awaitable[Any], work: Coroutine[Any, Any, T], make_error: Callable[[], Exception]
) -> T:
    """Await `work`, or cancel it and raise an error at the end of `end`."""
    task = asyncio.create_task(work)
    ending = asyncio.ensure_future(end)
    try:
        await asyncio.wait({task, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise make_error()
        return task.result()
    finally:
        task.cancel()
        ending.cancel()
        del task  # whose error would refer to this frame, and to itself
