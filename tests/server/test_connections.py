"""Connections that are too many, too slow or closed on one side, and bodies that are too large."""

import asyncio
import json
import re
import socket
import threading
import time

import pytest
from server_helpers import (
    CLIENT,
    HEADERS,
    NUM_BLOCKS,
    OPTIONS,
    connect,
    post,
    read_all,
    start,
    wait_for_line,
    write_request,
)
from starlette.requests import Request

from nanovllm.server import bodies, openai_api
from nanovllm.server.errors import ApiError

# Clients have little time, and there are few file descriptors.
PROGRAM = """
import resource
from nanovllm.server import connections
from nanovllm.server.__main__ import main

connections.REQUEST_SECONDS = 0.3
_, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard_limit))
main()
"""
SHORT = {"prompt": [5], "max_tokens": 3, "ignore_eos": True}
LONG = {"prompt": [5], "max_tokens": 900, "ignore_eos": True, "n": 8}
HEALTH = b"GET /health HTTP/1.1\r\n\r\n"
REQUEST = write_request(SHORT)
MAX_BODY = openai_api.BASE_BODY_BYTES + openai_api.BODY_BYTES_PER_TOKEN * 1024


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


@pytest.mark.parametrize(
    "data, statuses",
    [
        (b"", [408]),
        (REQUEST[:30], [408]),
        (REQUEST[:-1], [408]),
        (HEALTH + b"\r\n", [200, 408]),
        (HEALTH + REQUEST[:30], [200, 408]),
        (REQUEST.replace(b"Length: ", b"Length: 9999999"), [413, 408]),
        (b"GET /" + b"x" * 2**16, [431]),
        (b"NONSENSE\r\n\r\n", [400]),
    ],
    ids=["nothing", "header", "body", "line", "next", "rejected", "endless", "invalid"],
)
def test_a_client_that_sends_no_complete_request_is_disconnected(url, data, statuses):
    connection = connect(url)
    reply = ""
    if data.startswith(HEALTH):  # what follows is sent after the reply
        connection.sendall(HEALTH)
        reply = connection.recv(2**16).decode()
    connection.sendall(data.removeprefix(HEALTH))
    reply += read_all(connection)
    assert [int(part[:3]) for part in reply.split("HTTP/1.1 ")[1:]] == statuses
    assert json.loads(reply.splitlines()[-1])["error"]["message"]


def test_a_long_reply_is_not_cut(url):
    """The client has already begun to send its next request."""
    body = {**LONG, "n": 1, "stream": True}
    reply = read_all(connect(url, write_request(body) + REQUEST[:30]))
    assert reply.count('"finish_reason": "length"') == 1
    assert "[DONE]" in reply
    assert reply.count("HTTP/1.1 ") == 2


@pytest.mark.parametrize("options", [{}, {"stream": True}, {"max_tokens": 200}])
def test_a_client_that_closes_only_its_side_gets_the_reply(url, options):
    connection = connect(url, write_request({**SHORT, **options}))
    connection.shutdown(socket.SHUT_WR)
    assert '"finish_reason": "length"' in read_all(connection)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("is_stream", [True, False])
def test_the_request_of_a_client_that_vanishes_is_aborted(server, is_stream, version):
    url, process = server
    before = count_decodes(url)
    name = f"vanished-{is_stream}-{version}"
    body = {**LONG, "stream": is_stream}
    connect(url, write_request(body, version, **{"X-Request-Id": name})).close()
    wait_for_line(process, name)
    assert count_decodes(url) - before < 8 * 899


def test_too_many_connections_get_a_503_and_one_line_in_the_log(server):
    url, process = server
    replies = [read_all(each) for each in [connect(url) for _ in range(150)]]
    assert {reply[9:12] for reply in replies} == {"408", "503"}
    post(url, SHORT, **{"X-Request-Id": "after-all"})
    lines = wait_for_line(process, "after-all")
    assert "out of system resource" not in "".join(lines)
    assert sum("503" in line for line in lines) == 1


def test_a_body_that_is_too_large_is_rejected(url):
    head, _, _ = write_request({}).partition(b"\r\n\r\n")
    head = head.replace(b"Length: 2", b"Length: %d" % (MAX_BODY + 1))
    reply = read_all(connect(url, head + b"\r\nConnection: close\r\n\r\n"))
    assert reply.startswith("HTTP/1.1 413")
    assert f"exceeds {MAX_BODY} bytes" in reply
    chunks = (b" " * 2**16 for _ in range(MAX_BODY // 2**16 + 1))  # without Content-Length
    reply = CLIENT.post(f"{url}/v1/completions", content=chunks, headers=HEADERS)
    assert reply.status_code == 413


def test_a_valid_body_fits(url):
    """128 prompts of max_model_len, as token ids and as text that is escaped."""
    body = {"prompt": [[1000] * 1023] * 128, "max_tokens": 1}
    assert len(json.dumps(body)) < MAX_BODY
    body = {"prompt": "\U0001f600" * 250, "max_tokens": 1}
    assert post(url, body).status_code == 200
    assert len(json.dumps("\u2500" * 128)) < openai_api.BODY_BYTES_PER_TOKEN


def test_compiling_grammars_delays_no_other_body():
    reader = bodies.Bodies(10**6)
    released = threading.Event()

    async def read(body):
        data = json.dumps(body).encode()
        scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
        message = {"type": "http.request", "body": data, "more_body": False}

        async def receive():
            return message

        def parse(parsed):
            if "response_format" in parsed:
                released.wait()
            return parsed

        return await reader.read(Request(scope, receive), parse)

    async def read_many():
        large = "x" * bodies.SMALL_BODY_BYTES
        slow = [asyncio.create_task(read({"response_format": large})) for _ in range(50)]
        await asyncio.sleep(0.1)
        try:
            assert await asyncio.wait_for(read({"prompt": large}), 10) == {"prompt": large}
        finally:
            released.set()
        await asyncio.gather(*slow)

    asyncio.run(read_many())


def test_the_memory_of_all_bodies_is_limited(monkeypatch):
    monkeypatch.setattr(bodies, "MAX_TOTAL_BYTES", 200_000)
    reader = bodies.Bodies(10**6)
    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}

    async def read(size, is_complete):
        messages = [{"type": "http.request", "body": b" " * size, "more_body": not is_complete}]

        async def receive():
            if not messages:
                await asyncio.Event().wait()
            return messages.pop()

        return await reader.read(Request(scope, receive), dict)

    async def read_several():
        slow = asyncio.create_task(read(150_000, False))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="too many"):
            await read(100_000, True)
        with pytest.raises(ApiError, match="not JSON"):  # a small one
            await read(10, True)
        slow.cancel()
        await asyncio.wait([slow])
        with pytest.raises(ApiError, match="not JSON"):
            await read(100_000, True)

    asyncio.run(read_several())
    assert reader.total_bytes == 0
