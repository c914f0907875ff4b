"""Starts servers as a user does, and talks to them without a client library."""

import json
import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial

import httpx

from nanovllm.server.chat_completions import parse_chat
from nanovllm.server.completions import parse_completion
from nanovllm.server.errors import blaming

KEY = "secret"
NUM_BLOCKS = 512
OPTIONS = ["--dtype", "float32", "--num-kvcache-blocks", str(NUM_BLOCKS)]
OPTIONS += ["--kvcache-block-size", "16", "--max-model-len", "1024", "--api-key", KEY]
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
# Connections stay open, because thousands of requests take seconds on them.
CLIENT = httpx.Client(timeout=60, limits=httpx.Limits(keepalive_expiry=1))


def parse_body(llm, body, is_chat, parses_reasoning=False):
    """What an endpoint makes of a body, without a server."""
    endpoint = partial(parse_completion, "model")
    if is_chat:
        endpoint = partial(parse_chat, "model", parses_reasoning)
    return call_endpoint(endpoint, body, llm)


def call_endpoint(endpoint, body, llm):
    with blaming(body):
        return endpoint(body, llm)


@contextmanager
def start(*arguments, program=("-m", "nanovllm.server")):
    """Start a server on a free port. Yields its address and its process."""
    command = [sys.executable, *program, "--port", "0", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = None
            while address is None:
                address = re.search(r"http://\S+", process.stderr.readline())
            yield address[0], process
        finally:
            process.kill()


def post(url, body, path="/v1/completions", **headers):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return CLIENT.post(url + path, content=content, headers={**HEADERS, **headers})


def read_events(text):
    """The objects of a stream."""
    *events, done, rest = text.split("\n\n")
    assert done + rest == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def write(reply, outputs):
    """The reply with the outputs of its only choice, or the objects of its stream."""
    if reply.stream.is_stream:
        chunks = [reply.write_chunk({0: output}) for output in outputs]
        return read_events("".join(chunks) + reply.write_end())
    for output in outputs:
        reply.newest.update({0: output})
    return reply.write_whole()


def stream(url, body, timeout=60):
    """Begin to read a completion. Leaving the context disconnects."""
    options = {"json": {"stream": True, **body}, "headers": HEADERS, "timeout": timeout}
    return CLIENT.stream("POST", f"{url}/v1/completions", **options)


def write_request(body, version="1.1", **headers):
    content = json.dumps(body).encode()
    lines = [f"POST /v1/completions HTTP/{version}", "Host: 127.0.0.1"]
    lines.append(f"Content-Length: {len(content)}")
    lines += [f"{name}: {value}" for name, value in {**HEADERS, **headers}.items()]
    return "\r\n".join([*lines, "\r\n"]).encode() + content


def connect(url, data=b""):
    address, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((address, int(port)), timeout=20)
    connection.sendall(data)
    return connection


def read_all(connection):
    """Read until the server closes the connection."""
    with connection:
        return b"".join(iter(lambda: connection.recv(2**16), b"")).decode()


def count_decodes(url):
    """Wait until the engine is idle with all blocks free. Return its number of decode tokens."""
    idle = {"num_running": 0, "num_waiting": 0, "num_free_blocks": NUM_BLOCKS}
    for _ in range(1000):
        text = CLIENT.get(f"{url}/metrics").text
        lines = re.findall(r"^nanovllm_(\w+) (\S+)$", text, re.MULTILINE)
        stats = {name: float(value) for name, value in lines}
        if stats == stats | idle:
            return stats["num_decode_tokens_total"]
        time.sleep(0.02)
    raise AssertionError(stats)


def wait_for_line(process, text):
    """Return the lines that a server has logged, up to one with `text`."""
    lines = [process.stderr.readline()]
    while text not in lines[-1]:
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    return lines
