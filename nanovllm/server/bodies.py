"""Reads the JSON of requests, within limits on the size of one body and on the memory of all.

Work on a request is cancelled when its client disconnects, or when the engine stops.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from nanovllm.features.structured_outputs.grammars import GrammarCheck, run_check
from nanovllm.server.engine_thread import EngineThread
from nanovllm.server.errors import ApiError, JsonObject
from nanovllm.server.grammar_checks import GrammarChecks
from nanovllm.utils.checks import show

T = TypeVar("T")

SMALL_BODY_BYTES = 2**16
MAX_TOTAL_BYTES = 2**28
CONSTRAINTS = (b'"response_format"', b'"structured_outputs"', b'"tool_choice"')


@dataclass(eq=False)
class UncheckedGrammar(Exception):
    """A request needs a grammar that no process has compiled yet."""

    check: GrammarCheck


class Bodies:
    """Reads and parses bodies of up to `max_bytes`.

    Parsed JSON takes up to 30 times as much memory as its text, so large bodies are parsed one at a
    time. The text that waits for that is limited to MAX_TOTAL_BYTES. Bodies that may have a
    constraint have two threads of their own and do not wait for others, because a grammar can take
    seconds to compile.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.total_bytes = 0  # bodies that are being received or parsed
        self.large = ThreadPoolExecutor(1)
        self.compilers = ThreadPoolExecutor(2)
        self.grammar_checks = GrammarChecks()

    async def read(self, request: Request, parse: Callable[[JsonObject], T]) -> T:
        """Return parse(body), called in a thread. Raises ClientDisconnect.

        Browsers send the content type application/json to another origin only after a preflight
        request, which fails here.
        """
        content_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise ApiError(
                "the request needs the header Content-Type: application/json", status=415
            )
        encoding = request.headers.get("Content-Encoding", "")
        if encoding.lower() not in ("", "identity"):
            name = f"Content-Encoding: {encoding[:100]}"
            raise ApiError(f"{name} is not supported: send the body uncompressed", status=415)
        self._check(int(request.headers.get("Content-Length", 0)))
        data = bytearray()
        try:
            async for chunk in request.stream():
                data += chunk
                self.total_bytes += len(chunk)
                self._check(len(data))
            return await until_disconnect(request, self._parse(data, parse))
        finally:
            self.total_bytes -= len(data)

    async def _parse(self, data: bytearray, parse: Callable[[JsonObject], T]) -> T:
        executor = self.large if len(data) > SMALL_BODY_BYTES else None
        if any(name in data for name in CONSTRAINTS):
            executor = self.compilers
        return await self.call(lambda: parse(_load(data)), executor)

    async def call(self, prepare: Callable[[], T], executor: ThreadPoolExecutor | None = None) -> T:
        """Return prepare(), called in a thread.

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
                return await loop.run_in_executor(executor, copy_context().run, prepare)
            except UncheckedGrammar as unchecked:
                problem = await self.grammar_checks.run(unchecked.check)
                if problem is not None:
                    problems[unchecked.check.digest] = problem

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            message = f"the body exceeds {self.max_bytes} bytes: send fewer or shorter prompts"
            raise ApiError(message, status=413)
        if num_bytes > SMALL_BODY_BYTES and self.total_bytes > MAX_TOTAL_BYTES:
            raise ApiError("too many large bodies arrive at once: try again later", status=503)


def _load(data: bytearray) -> JsonObject:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(f"the body must be a JSON object, not {show(body)}")
    return body


async def until_stop(engine: EngineThread, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, or cancel it and raise ApiError when the engine stops."""
    return await _until(
        engine.stopping.wait(), work, lambda: ApiError(str(engine.stop_reason), status=503)
    )


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, or cancel it and raise ClientDisconnect when the client disconnects."""
    # After the body, the only message is a disconnect.
    return await _until(request.receive(), work, ClientDisconnect)


async def _until(
    end: Awaitable[Any], work: Coroutine[Any, Any, T], make_error: Callable[[], Exception]
) -> T:
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
