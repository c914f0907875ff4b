"""Connections that are too many, too slow or closed on one side, and bodies that are too large."""

import asyncio
import gc
import json
import re
import socket
import threading
import time
from contextlib import suppress
from functools import partial

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
from starlette.requests import ClientDisconnect, Request

from nanovllm.server import bodies, connections, openai_api
from nanovllm.server.errors import ApiError

# Clients have little time, and there are few file descriptors. GET / counts what a garbage
# collection visits.
PROGRAM = """
import gc
import resource

from starlette.responses import PlainTextResponse

from nanovllm.server import connections
from nanovllm.server.web_server import Api, main

Api.welcome = lambda self, request: PlainTextResponse(str(len(gc.get_objects())))
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


def write_header(num_bytes, line_bytes):
    """A header that counts as `num_bytes`, in lines of `line_bytes`."""
    lines = ["GET /health HTTP/1.1"]
    num_left = num_bytes - len("/health") - connections.LINE_BYTES
    while num_left > 0:
        size = line_bytes if num_left > 2 * line_bytes else num_left
        lines.append("x:" + "y" * (size - connections.LINE_BYTES - 1))
        num_left -= size
    return "\r\n".join([*lines, "\r\n"]).encode()


@pytest.mark.parametrize("line_bytes", [34, 1000, 30_000])
@pytest.mark.parametrize("segment_bytes", [1000, 2**17])
def test_a_header_has_a_limit_however_it_arrives(url, line_bytes, segment_bytes):
    for num_bytes, expected in ((0, "200"), (1, "431"), (2**16, "431")):
        data = write_header(connections.MAX_HEADER_BYTES + num_bytes, line_bytes)
        connection = connect(url)
        with suppress(ConnectionError):  # the server has closed the connection
            for start in range(0, len(data), segment_bytes):
                connection.sendall(data[start : start + segment_bytes])
        assert connection.recv(2**16)[9:12].decode() == expected
        connection.close()


def test_a_line_of_a_header_has_a_limit(url):
    connection = connect(url, HEALTH + b"GET / HTTP/1.1\r\nx: ")
    assert connection.recv(2**16).startswith(b"HTTP/1.1 200")
    connection.sendall(b"x" * (connections.MAX_HEADER_BYTES + 1))
    assert read_all(connection).startswith("HTTP/1.1 431")


def test_lines_after_a_body_count_as_a_header(url):
    head = b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n"
    head += b"Authorization: Bearer secret\r\nContent-Type: application/json\r\n\r\n"
    body = json.dumps(SHORT).encode()
    head += b"%x\r\n%s\r\n0\r\n" % (len(body), body)
    for num_lines, expected in ((1000, "200"), (3000, "431")):
        connection = connect(url, head + b"x:y\r\n" * num_lines + b"\r\n")
        assert connection.recv(2**16)[9:12].decode() == expected
        connection.close()


def test_a_header_is_counted_without_the_body_before_it(url):
    body = {**SHORT, "user": "x" * 100_000}
    connection = connect(url, write_request(body) + HEALTH[:10])
    reply = connection.recv(2**16)
    connection.sendall(HEALTH[10:-2] + b"Connection: close\r\n\r\n")
    reply += read_all(connection).encode()
    assert reply.count(b"HTTP/1.1 200") == 2


def test_a_request_that_asks_for_another_protocol_is_served(url):
    """Java's clients ask for HTTP/2 in this way."""
    upgrade = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEA"}
    request = write_request({"prompt": [5], "max_tokens": 1}, **upgrade)
    with connect(url, request[:-5]) as connection:
        connection.sendall(request[-5:])
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


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
@pytest.mark.parametrize("rest", [b"", HEALTH])
def test_the_request_of_a_client_that_vanishes_is_aborted(server, is_stream, version, rest):
    """Also if the client has already sent its next request."""
    url, process = server
    before = count_decodes(url)
    name = f"vanished-{is_stream}-{version}-{len(rest)}"
    body = {**LONG, "stream": is_stream}
    connect(url, write_request(body, version, **{"X-Request-Id": name}) + rest).close()
    wait_for_line(process, name)
    assert count_decodes(url) - before < 8 * 899


def test_too_many_connections_get_a_503_and_one_line_in_the_log(server):
    url, process = server
    replies = [read_all(each) for each in [connect(url) for _ in range(150)]]
    assert {reply[9:12] for reply in replies} == {"408", "503"}
    for reply in replies:
        assert ("retry-after: 5" in reply.lower()) == (reply[9:12] == "503")
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


def make_request(data, rest=""):
    """A request of which `rest` has not arrived. Returns it and a function that disconnects."""
    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    messages = asyncio.Queue()
    messages.put_nowait({"type": "http.request", "body": data, "more_body": bool(rest)})
    disconnect = partial(messages.put_nowait, {"type": "http.disconnect"})
    return Request(scope, messages.get), disconnect


def read(reader, body, parse):
    request, _ = make_request(json.dumps(body).encode())
    return reader.read(request, parse)


def test_compiling_grammars_delays_no_other_body():
    released = threading.Event()

    def parse(parsed):
        if "response_format" in parsed:
            released.wait()
        return parsed

    async def read_many():
        reader = bodies.Bodies(10**6)
        large = "x" * bodies.SMALL_BODY_BYTES
        slow = [
            asyncio.create_task(read(reader, {"response_format": large}, parse)) for _ in range(50)
        ]
        await asyncio.sleep(0.1)
        try:
            body = {"prompt": large}
            assert await asyncio.wait_for(read(reader, body, parse), 10) == body
        finally:
            released.set()
        await asyncio.gather(*slow)

    asyncio.run(read_many())


def test_a_client_that_disconnects_does_not_wait_for_a_thread():
    released = threading.Event()
    parsed = []

    def parse(body):
        parsed.append(body["prompt"][0])
        released.wait()

    async def leave():
        reader = bodies.Bodies(10**6)
        tasks = []
        for name in ("a", "b"):
            body = {"prompt": name * bodies.SMALL_BODY_BYTES}
            request, disconnect = make_request(json.dumps(body).encode())
            tasks.append(asyncio.create_task(reader.read(request, parse)))
            while not parsed:
                await asyncio.sleep(0.001)
        disconnect()
        with pytest.raises(ClientDisconnect):
            await tasks[1]
        released.set()
        await tasks[0]
        await read(reader, {"prompt": "c" * bodies.SMALL_BODY_BYTES}, parse)
        assert reader.total_bytes == 0

    asyncio.run(leave())
    assert parsed == ["a", "c"]


def test_garbage_collection_does_not_visit_what_was_imported(url):
    assert int(CLIENT.get(url).text) < 100_000  # torch alone has more


def test_parsing_a_large_body_leaves_the_garbage_collector_of_other_threads_alone():
    reader = bodies.Bodies(10**6)
    body = {"prompt": "x" * bodies.SMALL_BODY_BYTES}
    assert asyncio.run(read(reader, body, lambda _: gc.isenabled()))


def test_the_memory_of_all_bodies_is_limited(monkeypatch):
    monkeypatch.setattr(bodies, "MAX_TOTAL_BYTES", 200_000)
    reader = bodies.Bodies(10**6)

    def read(size, rest=""):
        request, _ = make_request(b" " * size, rest)
        return reader.read(request, dict)

    async def read_several():
        slow = asyncio.create_task(read(150_000, rest="x"))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="too many"):
            await read(100_000)
        with pytest.raises(ApiError, match="not JSON"):  # a small one
            await read(10)
        slow.cancel()
        await asyncio.wait([slow])
        with pytest.raises(ApiError, match="not JSON"):
            await read(100_000)

    asyncio.run(read_several())
    assert reader.total_bytes == 0
