"""The live page of the playground: its HTML, the steps that it follows, and its commands.

The page shows all prompts, so the server listens on this machine only.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from nanovllm import LLM, SamplingParams
from nanovllm.engine.scheduler import POLICIES
from nanovllm.server.engine_thread import Stream
from nanovllm.server.errors import JsonObject
from nanovllm.server.openai_api import Endpoint
from nanovllm.server.playground import DEFAULTS, Playground
from nanovllm.server.replies import write_event
from nanovllm.trace.page import read_template
from nanovllm.utils.checks import check_int, check_names, check_number

MESSAGE_INTERVAL = 0.05  # seconds, because a page need not be drawn more often
SECURITY_POLICY = (
    "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; base-uri 'none';"
    " script-src 'nonce-NONCE'; frame-ancestors 'none'; form-action 'none'"
)


@dataclass
class LivePage:
    """The endpoints of the page."""

    engine: Playground

    def routes(self, post: Callable[[str, Endpoint], Route]) -> list[Route]:
        """Return the routes of the page. `post` makes that of an endpoint that takes JSON."""
        return [
            Route("/", self.show),
            Route("/playground/events", self.follow),
            post("/playground/prompts", self.add_prompts),
            post("/playground/abort", self.abort),
            post("/playground/pace", self.set_pace),
            post("/playground/engine", self.change_engine),
        ]

    async def show(self, request: Request) -> Response:
        live = Path(__file__).with_name("live.html").read_text("utf-8")
        live = live.replace("ENGINE_DEFAULTS", json.dumps(DEFAULTS))
        options = [
            f'<option value="{name}">{each.title}</option>' for name, each in POLICIES.items()
        ]
        live = live.replace("POLICY_OPTIONS", "".join(options))
        page = read_template().replace("TIMELINES", "[]") + live
        nonce = secrets.token_urlsafe()
        headers = {"Content-Security-Policy": SECURITY_POLICY.replace("NONCE", nonce)}
        return HTMLResponse(page.replace("<script>", f'<script nonce="{nonce}">'), headers=headers)

    async def follow(self, request: Request) -> Response:
        """Send all recorded steps, then each new one, as server-sent events."""
        return StreamingResponse(self._messages(), media_type="text/event-stream")

    async def _messages(self) -> AsyncIterator[str]:
        engine = self.engine
        run_number = 0
        position = 0
        while engine.stop_reason is None:
            changed = engine.changed
            if run_number != engine.run_number:
                run_number = engine.run_number
                position = 0
            steps = engine.recorder.steps[position:]
            state = json.dumps({**self._describe(), "first": position})
            position += len(steps)
            yield write_event(f'{state[:-1]}, "steps": [{", ".join(steps)}]}}')
            await changed.wait()
            await asyncio.sleep(MESSAGE_INTERVAL)

    def _describe(self) -> JsonObject:
        engine = self.engine
        waiting = list(engine.llm.scheduler.waiting)[:20]
        return {
            "run": engine.run_number,
            "settings": engine.recorder.trace.settings,
            "options": {name: engine.options[name] for name in DEFAULTS},
            "pause": engine.pause,
            "is_idle": engine.llm.is_finished(),
            "arrivals": [(seq.seq_id, len(seq.token_ids)) for seq in waiting],
        }

    # Commands, each in a thread that reads a body.

    def add_prompts(self, body: JsonObject, llm: LLM) -> JsonObject:
        """Queue prompts: {"chats": [text], "params": {...}}, or "prompts" without a template.

        "step" is the step that they join, and "run" the engine that they are meant for, whose
        number the reply to "engine" carries.
        """
        run = body.get("run", self.engine.run_number)
        step = check_int("step", body.get("step", 0), 0)
        params = SamplingParams(**body.get("params", {}))
        prompts: Any = body.get("prompts")
        if prompts is None:
            texts = body.get("chats", [])
            prompts = llm.encode_chats([[{"role": "user", "content": text}] for text in texts])
        stream = Stream(llm.prepare_prompts(prompts, params))
        self.engine.call(self.engine.add_late, run, step, stream)
        return {}

    def abort(self, body: JsonObject, llm: LLM) -> JsonObject:
        request_id = check_int("request_id", body.get("request_id"), 0)
        self.engine.call(self.engine.abort, request_id, "the request was aborted on the page")
        return {}

    def set_pace(self, body: JsonObject, llm: LLM) -> JsonObject:
        pause = body.get("pause")
        if pause is not None:
            pause = check_number("pause", pause, 0.0, 60.0)
        num_single_steps = check_int("steps", body.get("steps", 0), 0)
        self.engine.call(self.engine.set_pace, pause, num_single_steps)
        return {}

    def change_engine(self, body: JsonObject, llm: LLM) -> JsonObject:
        check_names(body, DEFAULTS)
        return {"run": self.engine.call(self.engine.change_engine, body)}
