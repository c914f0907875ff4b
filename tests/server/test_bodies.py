"""How bodies are read, without HTTP."""

import asyncio
import gc
import json
import threading
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from weakref import WeakSet

import pytest
from starlette.requests import ClientDisconnect, Request

from nanovllm.server import bodies
from nanovllm.server.errors import ApiError


def make_reader():
    llm = SimpleNamespace(max_model_len=1024)
    return bodies.Bodies(SimpleNamespace(llm=llm, stopping=asyncio.Event()))


def make_request(data):
    """Return a request and a function that disconnects."""
    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    messages = asyncio.Queue()
    messages.put_nowait({"type": "http.request", "body": data})
    disconnect = partial(messages.put_nowait, {"type": "http.disconnect"})
    return Request(scope, messages.get), disconnect


def read(reader, body, parse):
    request, _ = make_request(json.dumps(body).encode())
    return reader.read(request, parse)


class Parsed:
    pass


def test_large_bodies_are_parsed_one_at_a_time():
    """An error keeps none of them alive. That would add up to gigabytes."""
    alive = WeakSet()
    numbers = []

    def parse(body):
        parsed = Parsed()
        alive.add(parsed)
        time.sleep(0.01)  # another thread would add its own
        numbers.append(len(alive))
        raise ApiError("invalid")

    async def reject(reader):
        with suppress(ApiError):
            await read(reader, {"prompt": "x" * bodies.LARGE_BYTES}, parse)

    async def read_many():
        reader = make_reader()
        await asyncio.gather(*[reject(reader) for _ in range(5)])

    gc.disable()
    try:
        asyncio.run(read_many())
    finally:
        gc.enable()
    assert len(numbers) == 5
    assert max(numbers) <= 2


def test_compiling_grammars_delays_neither_other_bodies_nor_clients_that_disconnect():
    released = threading.Event()
    parsed = []

    def parse(body):
        parsed.append(body["prompt"])
        if "response_format" in body:
            released.wait()

    async def leave():
        reader = make_reader()
        tasks = []
        for number in range(4):  # two of them wait for a thread
            body = {"prompt": number, "response_format": 1}
            request, disconnect = make_request(json.dumps(body).encode())
            tasks.append(asyncio.create_task(reader.read(request, parse)))
            while len(parsed) < min(number + 1, 2):
                await asyncio.sleep(0.001)
        await asyncio.wait_for(read(reader, {"prompt": "x"}, parse), 10)
        disconnect()
        with pytest.raises(ClientDisconnect):
            await tasks[3]
        released.set()
        await asyncio.gather(*tasks[:3])

    asyncio.run(leave())
    assert parsed == [0, 1, "x", 2]


@pytest.mark.parametrize(
    "data, expected",
    [
        (b'{"response_format": 1}', True),
        (b'{"response\\u005fformat": 1}', True),
        (json.dumps({"tool_choice": 1}).encode("utf-16"), True),
        (b'{"prompt": "response\\u005fformat"}', False),
        (json.dumps({"prompt": "\u00e9 \u4f60"}).encode(), False),
        (b'{"prompt": "x"}', False),
    ],
)
def test_a_body_with_a_constraint_is_recognized(data, expected):
    """It has threads of its own, also if its names are escaped."""
    assert bodies.has_constraint(bytearray(data)) == expected


def test_parsing_a_body_leaves_the_garbage_collector_of_other_threads_alone():
    reader = make_reader()
    assert asyncio.run(read(reader, {"prompt": "x"}, lambda _: gc.isenabled()))
