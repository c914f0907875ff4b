"""OpenAI's error objects, and errors of clients."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from nanovllm.text.prompt_encoder import PromptTooLong

JsonObject = dict[str, Any]

MAX_MESSAGE = 450  # characters of an error, because a client's input can be part of it
# What a constraint can come from, and what can be a prompt. The first that a body has is at fault.
CONSTRAINTS = ("structured_outputs", "response_format", "tools")
PROMPTS = ("messages", "prompt", "tokens", "input")


@dataclass(eq=False)
class ApiError(Exception):
    """An error for the client, with the fields of OpenAI's error object."""

    message: str
    param: str | None = None  # the parameter at fault
    code: str | None = None
    status: int = 400
    headers: Mapping[str, str] | None = None  # of the response

    def describe(self) -> JsonObject:
        """Return OpenAI's error object."""
        message = self.message[:MAX_MESSAGE]
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        param = self.param and self.param[:MAX_MESSAGE]
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}


@contextmanager
def blaming(body: JsonObject) -> Iterator[None]:
    """Turn errors about the client's input into ApiErrors.

    The parameter at fault is the one that the error names, such as messages[1].content. An error
    that names no parameter of this body is about its prompt.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        message = str(error)
        param = getattr(error, "name", "")
        if param == "structured_outputs":  # the engine's name for all constraints
            param = next(filter(body.get, CONSTRAINTS), param)
            message = message.replace("structured_outputs", param, 1)
        if re.split(r"[.\[]", param)[0] not in (*body, *PROMPTS):
            param = next((name for name in PROMPTS if name in body), None)
        code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
        raise ApiError(message, param, code) from error


def respond(
    content: JsonObject, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return JSON in ASCII, which can hold any str, also lone surrogates."""
    return Response(json.dumps(content), status, headers, "application/json")


def respond_error(error: ApiError) -> Response:
    return respond(error.describe(), error.status, error.headers)


async def handle_error(request: Request, error: Exception) -> Response:
    """Turn an exception into an error object. uvicorn logs the traceback of unexpected ones."""
    if isinstance(error, HTTPException):  # an unknown path or method
        message = f"{error.detail}: {request.method} {show_path(request)}"
        if error.status_code == 404:  # often, a client's base_url lacks /v1
            paths = [route.path for route in request.app.routes if route.path.startswith("/v1/")]
            message += f". The endpoints are {', '.join(paths)}"
        error = ApiError(message, status=error.status_code, headers=error.headers)
    elif isinstance(error, ClientDisconnect):
        error = ApiError("the client has disconnected", status=499)
    elif not isinstance(error, ApiError):
        error = ApiError("internal error", status=500)
    return respond_error(error)


def show_path(request: Request) -> str:
    """Return the path for a message: in ASCII, on one line."""
    return quote(request.scope["path"][:200])
