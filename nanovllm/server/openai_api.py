"""The endpoints of OpenAI's API, over an EngineThread: their routes.

An endpoint that takes JSON is a function, see `Endpoint`, and a line of `Api.make_app`.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import prometheus_client as prometheus
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from nanovllm import LLM, __version__
from nanovllm.engine.outputs import NAN_LOGITS
from nanovllm.server.bodies import Bodies, until_disconnect
from nanovllm.server.chat_completions import parse_chat
from nanovllm.server.completions import parse_completion
from nanovllm.server.embeddings import parse_embeddings
from nanovllm.server.engine_thread import EngineThread, Outputs
from nanovllm.server.errors import ApiError, JsonObject, blaming, handle_error, respond
from nanovllm.server.metrics import Metrics
from nanovllm.server.middleware import Middleware
from nanovllm.server.replies import END, Generation, write_event
from nanovllm.server.tokenization import detokenize, tokenize
from nanovllm.utils.checks import show

# What an endpoint makes of the JSON of a request: the reply, or what the engine must generate for
# it. It is called in a thread, because tokenizing a long prompt would delay other requests. For
# invalid parameters it raises ValueError or TypeError.
Endpoint = Callable[[JsonObject, LLM], JsonObject | Generation]

WELCOME = """nanovllm serves OpenAI's API under /v1. To watch an engine step by step, start

    python -m nanovllm.server --playground

and open this page.
"""


@dataclass
class Api:
    """The endpoints for one model."""

    engine: EngineThread
    model: str  # its name
    root: str  # the checkpoint, another valid name
    api_key: str | None = None
    allowed_origins: Sequence[str] = ()  # origins of web pages
    parses_reasoning: bool = False

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.engine)
        self.bodies = Bodies(self.engine)

    def make_app(self, routes: Sequence[Route] = (), is_local: bool = False) -> ASGIApp:
        """Make the app. `routes` come before the API's. `is_local`: see Middleware."""
        routes = [
            *routes,
            self.post("/v1/completions", partial(parse_completion, self.model)),
            self.post(
                "/v1/chat/completions", partial(parse_chat, self.model, self.parses_reasoning)
            ),
            self.post("/v1/embeddings", partial(parse_embeddings, self.model)),
            self.post("/tokenize", tokenize),
            self.post("/detokenize", detokenize),
            Route("/v1/models", self.list_models),
            Route("/v1/models/{name:path}", self.show_model),
            Route("/version", respond({"version": __version__}), methods=["GET"]),
            Route("/ping", self.check_health),
            Route("/health", self.check_health),
            Route("/metrics", self.write_metrics),
            Route("/", self.welcome),
        ]
        errors = (HTTPException, ClientDisconnect, ApiError, Exception)
        handlers: Any = dict.fromkeys(errors, handle_error)
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False  # a redirect has no JSON, and names any host
        return Middleware(app, self.metrics, self.allowed_origins, is_local)

    def post(self, path: str, endpoint: Endpoint) -> Route:
        """Make the route of an endpoint that takes JSON."""

        def parse(body: JsonObject) -> JsonObject | Generation:
            self._check_model(body.get("model"))
            with blaming(body):
                return endpoint(body, self.engine.llm)

        async def respond_to(request: Request) -> Response:
            self._authorize(request)
            result = await self.bodies.read(request, parse)
            if not isinstance(result, Generation):
                return respond(result)
            self.engine.raise_if_stopped()
            if result.reply.stream.is_stream:
                # The second header is for nginx.
                headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
                return StreamingResponse(self._stream(result), 200, headers, "text/event-stream")
            return await until_disconnect(request, self._answer(result))

        return Route(path, respond_to, methods=["POST"])

    async def _serve(self, generation: Generation) -> AsyncIterator[Outputs]:
        """Yield new outputs. Raises ApiError."""
        async with self.engine.submit(generation.prompts) as stream:
            async for outputs in self.metrics.measure(stream):
                for output in outputs.values():
                    if output["error"] is not None:
                        # Only NaN logits are no fault of the client's constraint.
                        status = 500 if output["error"] == NAN_LOGITS else 400
                        raise ApiError(f"the reply ended early: {output['error']}", status=status)
                yield outputs

    async def _stream(self, generation: Generation) -> AsyncIterator[str]:
        try:
            async for outputs in self._serve(generation):
                yield generation.reply.write_chunk(outputs)
        except ApiError as error:
            yield write_event(json.dumps(error.describe())) + END
        else:
            yield generation.reply.write_end()

    async def _answer(self, generation: Generation) -> Response:
        async for outputs in self._serve(generation):
            generation.reply.newest.update(outputs)
        # In a thread, because a thousand embeddings take a second.
        return await asyncio.to_thread(lambda: respond(generation.reply.write_whole()))

    def _check_model(self, name: object) -> None:
        if name not in (None, "", self.model, self.root):
            message = f"the model {show(name)} does not exist: this server has {self.model!r}"
            raise ApiError(message, "model", "model_not_found", status=404)

    async def list_models(self, request: Request) -> Response:
        self._authorize(request)
        return respond({"object": "list", "data": [self._describe_model()]})

    async def show_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name == "":  # a slash behind "models"
            return await self.list_models(request)
        self._authorize(request)
        self._check_model(name)
        return respond(self._describe_model())

    def _describe_model(self) -> JsonObject:
        return {
            "id": self.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "nanovllm",
            "root": self.root,  # vllm bench serve loads its tokenizer from here
            "max_model_len": self.engine.llm.max_model_len,
        }

    async def check_health(self, request: Request) -> Response:
        self.engine.raise_if_stopped()
        return PlainTextResponse("")

    async def welcome(self, request: Request) -> Response:
        return PlainTextResponse(WELCOME)

    async def write_metrics(self, request: Request) -> Response:
        text = prometheus.generate_latest(self.metrics.registry)
        return Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)

    def _authorize(self, request: Request) -> None:
        if self.api_key is None:
            return
        scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
        is_key = secrets.compare_digest(sent.strip().encode("latin-1"), self.api_key.encode())
        if scheme.lower() != "bearer" or not is_key:
            message = "this server needs its API key: Authorization: Bearer KEY"
            raise ApiError(message, status=401, headers={"WWW-Authenticate": "Bearer"})
