"""Cancels work when its client disconnects, or when the engine stops."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from nanovllm.server.engine_thread import EngineThread
from nanovllm.server.errors import ApiError

T = TypeVar("T")


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
