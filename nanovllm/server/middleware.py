"""Middleware: the check of Host and Origin, the log."""

import re
import select
import time
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.server.errors import ApiError, respond_error, show_path
from nanovllm.server.metrics import Metrics
from nanovllm.utils.helpers import report

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")  # with brackets in the header Host
QUIET = ("/health", "/metrics", "/ping")  # polled every few seconds, so neither logged nor counted


class Middleware:
    """Rejects requests of foreign web pages, and logs and counts requests.

    Pages of `allowed_origins` are not foreign, and "*" stands for all. If `is_local`, the Host must
    be a loopback address: a page can let its own host name point to 127.0.0.1 (DNS rebinding).
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, allowed_origins: Sequence[str], is_local: bool
    ) -> None:
        self.app = app
        # As browsers write them.
        self.allowed_origins = [origin.lower().rstrip("/") for origin in allowed_origins]
        if allowed_origins:  # browsers ask what such pages may do
            self.app = CORSMiddleware(app, self.allowed_origins, ["*"], ["*"])
        self.is_local = is_local
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start = time.perf_counter()
        request = Request(scope)
        status = 500

        async def send_and_record(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        app = self.app
        host = re.sub(r":\d*$", "", request.headers.get("Host", ""))
        is_rebound = self.is_local and host not in LOOPBACK
        if is_rebound or is_foreign(request, self.allowed_origins):
            message = "requests from other web pages, or to another host name, are rejected"
            app = respond_error(ApiError(message, status=403))
        try:
            await app(scope, receive, send_and_record)
        finally:
            if scope["path"] not in QUIET:
                self.metrics.requests.labels(status).inc()
                duration = 1000 * (time.perf_counter() - start)
                log(f"{request.method} {show_path(request)} {status} {duration:.1f} ms")


def is_foreign(request: Request, allowed_origins: Sequence[str]) -> bool:
    """Return whether a browser sends the request for a page of another origin.

    Without CORS headers such a page cannot read a reply. This keeps it from sending requests, too.
    Following a link to `GET /` is allowed.

    Pages cannot set Sec-Fetch-Site. Browsers send it to https addresses and to this machine. Only
    without it, Origin is compared with Host, which proxies replace by the name of their upstream.
    """
    origin = request.headers.get("Origin")
    is_welcome = origin in allowed_origins or "*" in allowed_origins
    if is_welcome or (request.method == "GET" and request.scope["path"] == "/"):
        return False
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None:
        return site not in ("none", "same-origin")
    return origin is not None and origin.partition("://")[2] != request.headers.get("Host", "")


def log(line: str) -> None:
    """Print a line to stderr.

    The line is dropped if stderr is a full pipe, because a write would block the event loop.
    """
    _, writable, _ = select.select([], [2], [], 0)
    if writable:
        report(line)
