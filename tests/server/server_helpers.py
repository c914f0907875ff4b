"""Starts servers as a user does, and talks to them without a client library."""

import json
import re
import subprocess
import sys
from contextlib import contextmanager

import httpx

KEY = "secret"
NUM_BLOCKS = 512
OPTIONS = ["--dtype", "float32", "--num-kvcache-blocks", str(NUM_BLOCKS)]
OPTIONS += ["--kvcache-block-size", "16", "--max-model-len", "1024", "--api-key", KEY]
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
# Connections stay open, because thousands of requests take seconds on them. The server closes
# those that are idle for 5 seconds.
CLIENT = httpx.Client(timeout=60, limits=httpx.Limits(keepalive_expiry=1))


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


def stream(url, body, timeout=60):
    """Begin to read a completion. Leaving the context disconnects."""
    options = {"json": {"stream": True, **body}, "headers": HEADERS, "timeout": timeout}
    return CLIENT.stream("POST", f"{url}/v1/completions", **options)
