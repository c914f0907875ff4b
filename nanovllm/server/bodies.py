"""Reads the JSON of requests, within a limit of size and of time.

Work on a request is cancelled when its client disconnects, or when the engine stops. A grammar that
a thread is compiling ends by itself, after two seconds of CPU time at most.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from nanovllm.features.structured_outputs.grammars import compiling
from nanovllm.server.engine_thread import EngineThread
from nanovllm.server.errors import ApiError, JsonObject
from nanovllm.utils.checks import show

T = TypeVar("T")

# A parsed body can take 25 times as many bytes, so it must not be longer than the engine can use.
BYTES_PER_TOKEN = 16  # of a long prompt, also as token ids, or in escapes such as \u4f60
SPARE_BYTES = 2**21  # for tools and schemas, or for several prompts
LARGE_BYTES = 2**18  # longer bodies are parsed one at a time
BODY_SECONDS = 30  # for a body to arrive
CONSTRAINTS = {"response_format", "structured_outputs", "tool_choice"}
MAX_CONSTRAINED = 64  # bodies that may have a constraint, while a grammar is being compiled


class Bodies:
    """Reads bodies, and parses them in threads.

    Those that may have a constraint have threads of their own, because a grammar can take seconds
    to compile. No other request waits for these.
    """

    def __init__(self, engine: EngineThread) -> None:
        self.engine = engine
        self.compilers = ThreadPoolExecutor(2)
        self.large = ThreadPoolExecutor(1)
        self.num_constrained = 0

    async def read(self, request: Request, parse: Callable[[JsonObject], T]) -> T:
        """Return parse(body), called in a thread. Raises ClientDisconnect and ApiError."""
        stop = self.engine.stopping.wait()
        work = self._read(request, parse)
        return await _until(stop, work, lambda: ApiError(str(self.engine.stop_reason), status=503))

    async def _read(self, request: Request, parse: Callable[[JsonObject], T]) -> T:
        max_bytes = SPARE_BYTES + BYTES_PER_TOKEN * self.engine.llm.max_model_len
        data = await receive(request, max_bytes)
        return await until_disconnect(request, self._parse(data, parse))

    async def _parse(self, data: bytearray, parse: Callable[[JsonObject], T]) -> T:
        """Load and parse a body in a thread."""
        run_in = asyncio.get_running_loop().run_in_executor
        executor = self.large if len(data) > LARGE_BYTES else None

        def work() -> T:
            return parse(load(data))

        if not await run_in(executor, has_constraint, data):
            return await run_in(executor, work)
        # Without a grammar that is being compiled, even many bodies wait for milliseconds only.
        if self.num_constrained >= MAX_CONSTRAINED and compiling:
            raise ApiError("too many grammars wait to be compiled: try again later", status=503)
        self.num_constrained += 1
        try:
            return await run_in(self.compilers, work)
        finally:
            self.num_constrained -= 1


async def receive(request: Request, max_bytes: int) -> bytearray:
    """Return a body, which must be declared as JSON.

    Browsers send the content type application/json to another origin only after a preflight
    request, which fails here.
    """
    content_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError("the request needs the header Content-Type: application/json", status=415)
    try:
        return await asyncio.wait_for(_join(request, max_bytes), BODY_SECONDS)
    except asyncio.TimeoutError as error:
        message = f"the body did not arrive within {BODY_SECONDS} seconds"
        raise ApiError(message, status=408) from error


async def _join(request: Request, max_bytes: int) -> bytearray:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            message = f"the body exceeds {max_bytes} bytes: send fewer or shorter prompts"
            raise ApiError(message, status=413)
    return data


def load(data: bytearray) -> JsonObject:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(f"the body must be a JSON object, not {show(body)}")
    return body


def has_constraint(data: bytearray) -> bool:
    """Return whether a body may have a constraint. Its names can be escaped, or in UTF-16."""
    if any(name.encode() in data for name in CONSTRAINTS):
        return True
    is_plain = b"\\u00" not in data and b"\0" not in data
    return not is_plain and not CONSTRAINTS.isdisjoint(load(data))


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
