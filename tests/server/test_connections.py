"""Clients that are slow or that leave, and bodies that are too large."""

import asyncio
import gc
import json
import re
import threading
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from weakref import WeakSet

import pytest
from server_helpers import (
    CLIENT,
    HEADERS,
    NUM_BLOCKS,
    OPTIONS,
    connect,
    read_all,
    start,
    wait_for_line,
    write_request,
)
from starlette.requests import ClientDisconnect, Request

from nanovllm.server import bodies
from nanovllm.server.errors import ApiError

# Clients have little time. GET / counts what a garbage collection visits.
PROGRAM = """
import gc

from starlette.responses import PlainTextResponse

from nanovllm.server import bodies
from nanovllm.server.web_server import Api, main

Api.welcome = lambda self, request: PlainTextResponse(str(len(gc.get_objects())))
bodies.BODY_SECONDS = 0.3
main()
"""
SHORT = {"prompt": [5], "max_tokens": 3, "ignore_eos": True}
LONG = {"prompt": [5], "max_tokens": 900, "ignore_eos": True, "n": 8}
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.fixture(scope="module")
def server():
    with start(*OPTIONS, program=("-c", PROGRAM)) as address_and_process:
        yield address_and_process


@pytest.fixture
def url(server):
    return server[0]


def count_decodes(url):
    """Wait until all blocks are free. Return the number of decode tokens."""
    text = ""
    while f"\nnanovllm_num_free_blocks {NUM_BLOCKS}" not in text:
        time.sleep(0.02)
        text = CLIENT.get(f"{url}/metrics").text
    return float(re.search(r"^nanovllm_num_decode_tokens_total (\S+)", text, re.MULTILINE)[1])


def test_a_body_that_does_not_arrive_is_an_error(url):
    connection = connect(url, write_request(SHORT, Connection="close")[:-1])
    reply = read_all(connection)
    assert reply.startswith("HTTP/1.1 408")
    assert json.loads(reply.splitlines()[-1])["error"]["message"]


def test_a_request_that_asks_for_another_protocol_is_served(url):
    """Java's clients ask for HTTP/2 in this way."""
    upgrade = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEA"}
    request = write_request({"prompt": [5], "max_tokens": 1}, **upgrade)
    with connect(url, request[:-5]) as connection:
        connection.sendall(request[-5:])
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("rest", [b"", HEALTH])
def test_the_request_of_a_client_that_vanishes_is_aborted(server, is_stream, version, rest):
    """Also if the client has already sent its next request."""
    url, process = server
    before = count_decodes(url)
    body = {**LONG, "stream": is_stream}
    connect(url, write_request(body, version) + rest).close()
    wait_for_line(process, "POST")
    assert count_decodes(url) - before < 8 * 899


def test_a_body_that_is_too_large_is_rejected(url):
    limit = 2**21 + 16 * 1024  # for a max_model_len of 1,024
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    without_length = iter([body, b" " * limit])
    for content in (body.ljust(limit + 1), without_length):
        reply = CLIENT.post(f"{url}/v1/completions", content=content, headers=HEADERS)
        assert reply.status_code == 413
        assert f"exceeds {limit} bytes" in reply.json()["error"]["message"]
    reply = CLIENT.post(f"{url}/v1/completions", content=body.ljust(limit), headers=HEADERS)
    assert reply.status_code == 200


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


def test_compiling_grammars_delays_no_other_body():
    released = threading.Event()

    def parse(parsed):
        if "response_format" in parsed:
            released.wait()
        return parsed

    async def read_many():
        reader = make_reader()
        slow = [asyncio.create_task(read(reader, {"response_format": 1}, parse)) for _ in range(50)]
        await asyncio.sleep(0.1)
        try:
            body = {"prompt": "x"}
            assert await asyncio.wait_for(read(reader, body, parse), 10) == body
        finally:
            released.set()
        await asyncio.gather(*slow)

    asyncio.run(read_many())


def test_a_client_that_disconnects_does_not_wait_for_a_thread():
    released = threading.Event()
    parsed = []

    def parse(body):
        parsed.append(body["prompt"])
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
        disconnect()
        with pytest.raises(ClientDisconnect):
            await tasks[3]
        released.set()
        await asyncio.gather(*tasks[:3])

    asyncio.run(leave())
    assert parsed == [0, 1, 2]


def test_garbage_collection_does_not_visit_what_was_imported(url):
    assert int(CLIENT.get(url).text) < 100_000  # torch alone has more


def test_parsing_a_body_leaves_the_garbage_collector_of_other_threads_alone():
    reader = make_reader()
    assert asyncio.run(read(reader, {"prompt": "x"}, lambda _: gc.isenabled()))
