"""The endpoints of OpenAI's API, over an EngineThread.

protocol.py has the objects that are sent.
"""

import asyncio
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from nanovllm.checks import check_type
from nanovllm.engine.input_processor import CheckedPrompt
from nanovllm.server.engine_thread import EngineThread, Outputs, Unavailable
from nanovllm.server.parameters import InvalidRequest, Object, parse_request
from nanovllm.server.protocol import (
    END,
    Reply,
    describe_error,
    write_event,
)

MAX_BODY_BYTES = 32 * 2**20
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
GAUGES = {"num_waiting", "num_running", "num_free_blocks", "num_blocks"}
WELCOME = """nanovllm serves OpenAI's API under /v1. To watch an engine step by step, start

    python -m nanovllm.server --playground

and open this page.
"""


class Api:
    """The endpoints for one model."""

    def __init__(self, engine: EngineThread, model: str, root: str, api_key: str | None) -> None:
        """Serve `engine` under the name `model`. `root` is the checkpoint, another valid name."""
        self.engine = engine
        self.model = model
        self.root = root
        self.api_key = api_key
        self.created = int(time.time())
        self.registry = prometheus.CollectorRegistry()
        self.registry.register(self)  # calls `collect`
        options: Any = {"buckets": BUCKETS, "registry": self.registry}
        self.time_to_first_token = prometheus.Histogram(
            "nanovllm_time_to_first_token_seconds", "Time to first token", **options
        )
        self.request_time = prometheus.Histogram(
            "nanovllm_request_seconds", "Time until the last token", **options
        )

    def make_app(self, routes: Sequence[Route] = (), hosts: Sequence[str] = ()) -> ASGIApp:
        """Make the app. `routes` come before the API's. `hosts`, if given, are the valid Hosts."""
        routes = [
            *routes,
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
            Route("/v1/models", self.list_models),
            Route("/health", self.check_health),
            Route("/metrics", self.write_metrics),
            Route("/", self.welcome),
        ]
        errors = (HTTPException, ClientDisconnect, Unavailable, ValueError, TypeError, Exception)
        handlers: Any = dict.fromkeys(errors, handle_error)
        return SameOriginOnly(Starlette(routes=routes, exception_handlers=handlers), hosts)

    async def complete(self, request: Request) -> Response:
        self._authorize(request)
        body = await read_json(request)
        is_chat = request.url.path == "/v1/chat/completions"
        model = body.get("model")
        if model not in (None, "", self.model, self.root):
            message = f"the model {model!r} does not exist: this server has {self.model!r}"
            return respond(describe_error(404, message, "model_not_found"), 404)
        llm = self.engine.llm
        # In a thread, because tokenizing a long prompt would delay other requests.
        given, prompts = await asyncio.to_thread(parse_request, body, is_chat, llm)
        reply = Reply(given, self.model, is_chat, llm)
        self.engine.check()
        if reply.is_stream:
            # The second header is for nginx.
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            events = self._stream(prompts, reply)
            return StreamingResponse(events, 200, headers, "text/event-stream")
        return await until_disconnect(request, self._answer(prompts, reply))

    async def _serve(self, prompts: list[CheckedPrompt]) -> AsyncIterator[Outputs]:
        """Yield the outputs of the prompts, and measure their latency."""
        start = time.perf_counter()
        is_first = True
        async with self.engine.submit(prompts) as stream:
            async for outputs in stream:
                if is_first:
                    self.time_to_first_token.observe(time.perf_counter() - start)
                    is_first = False
                yield outputs
        self.request_time.observe(time.perf_counter() - start)

    async def _stream(self, prompts: list[CheckedPrompt], reply: Reply) -> AsyncIterator[str]:
        try:
            async for outputs in self._serve(prompts):
                yield reply.write_chunk(outputs)
        except Unavailable as error:
            yield write_event(json.dumps(describe_error(503, str(error)))) + END
        else:
            yield reply.write_end()

    async def _answer(self, prompts: list[CheckedPrompt], reply: Reply) -> Response:
        async for outputs in self._serve(prompts):
            reply.newest.update(outputs)
        return respond(reply.write_whole())

    async def list_models(self, request: Request) -> Response:
        self._authorize(request)
        card = {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "nanovllm",
            "root": self.root,  # vllm bench serve loads its tokenizer from here
            "max_model_len": self.engine.llm.max_model_len,
        }
        return respond({"object": "list", "data": [card]})

    async def check_health(self, request: Request) -> Response:
        self.engine.check()
        return PlainTextResponse("")

    async def welcome(self, request: Request) -> Response:
        return PlainTextResponse(WELCOME)

    async def write_metrics(self, request: Request) -> Response:
        text = prometheus.generate_latest(self.registry)
        return Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)

    def collect(self) -> list[Metric]:
        """Return the engine's statistics as metrics. Prometheus calls this for each scrape."""
        metrics: list[Metric] = []
        stats: Object = {**self.engine.llm.stats}
        for name, value in stats.items():
            family = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            metrics.append(family(f"nanovllm_{name}", f"LLM.stats[{name!r}]", value=value))
        return metrics

    def _authorize(self, request: Request) -> None:
        if self.api_key is None:
            return
        sent = request.headers.get("Authorization", "").encode("latin-1")
        expected = f"Bearer {self.api_key}".encode()
        if not secrets.compare_digest(sent, expected):
            raise HTTPException(401, "this server needs its API key: Authorization: Bearer KEY")


class SameOriginOnly:
    """Rejects requests from other web pages that are open in the user's browser.

    There are no CORS headers, so such a page cannot read a reply. This keeps it from sending
    requests, too. Following a link to `GET /` is allowed. A page can also let its own host name
    point to 127.0.0.1 (DNS rebinding). `hosts`, if given, are the only ones that are served.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self.app = app
        self.hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http":
            request = Request(scope)
            is_other_host = bool(self.hosts) and read_host(request) not in self.hosts
            if is_other_host or is_foreign(request):
                message = "requests from other web pages, or to another host name, are rejected"
                app = respond(describe_error(403, message), 403)
        await app(scope, receive, send)


def read_host(request: Request) -> str:
    """Return the Host header without a port. request.url would replace an invalid one."""
    name = re.sub(r":\d*$", "", request.headers.get("Host", ""))
    return name.removeprefix("[").removesuffix("]")


def is_foreign(request: Request) -> bool:
    """Return whether a browser sends the request for a page of another origin."""
    if request.method == "GET" and request.scope["path"] == "/":
        return False
    site = request.headers.get("Sec-Fetch-Site", "none")
    origin = request.headers.get("Origin")
    host = request.headers.get("Host", "")
    has_other_origin = origin is not None and origin.partition("://")[2] != host
    return site not in ("none", "same-origin") or has_other_origin


async def read_json(request: Request) -> Object:
    """Read the body, a JSON object of at most MAX_BODY_BYTES.

    Browsers send the content type application/json to another origin only after a preflight
    request, which fails here.
    """
    content_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise HTTPException(415, "the request needs the header Content-Type: application/json")
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body exceeds {MAX_BODY_BYTES} bytes")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {error}") from error
    return check_type("the body", body, (dict,), "a JSON object")


async def until_disconnect(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """Await `answer`, or cancel it if the client disconnects."""
    task = asyncio.create_task(answer)
    # After the body, the only message is a disconnect.
    disconnect = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return Response(status_code=499)  # not received by anyone
    finally:
        task.cancel()
        disconnect.cancel()


def respond(content: Object, status: int = 200) -> Response:
    """Return JSON in ASCII, which can hold any str, also lone surrogates."""
    return Response(json.dumps(content), status, media_type="application/json")


async def handle_error(request: Request, error: Exception) -> Response:
    """Turn an exception into an error object. Starlette prints the traceback of unexpected ones."""
    status = 500
    message = "internal error"
    code: str | None = None
    param: str | None = None
    if isinstance(error, HTTPException):
        status = error.status_code
        message = error.detail
    elif isinstance(error, Unavailable):
        status = 503
        message = str(error)
    elif isinstance(error, (ValueError, TypeError, ClientDisconnect)):
        status = 400
        message = str(error)
        if isinstance(error, InvalidRequest):
            code = error.code
            param = error.param
    return respond(describe_error(status, message, code, param), status)
