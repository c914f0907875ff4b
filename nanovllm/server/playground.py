"""The engine behind `python -m nanovllm.server --playground`, and the endpoints of its live page.

Its steps are recorded for the page. It can be slowed down, held, single-stepped and replaced by
another engine. The page shows all prompts, so the server listens on this machine only.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from shutil import copytree, ignore_patterns
from tempfile import TemporaryDirectory
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from nanovllm import DEMO_MODEL, LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine.scheduler import POLICIES
from nanovllm.features.speculation.costs import StepCosts
from nanovllm.features.speculation.drafts import Drafts
from nanovllm.server.engine_thread import EngineThread, Stream
from nanovllm.server.errors import JsonObject, blaming
from nanovllm.server.openai_api import Endpoint
from nanovllm.trace.page import read_template
from nanovllm.trace.recorder import Recorder
from nanovllm.trace.step import TracedStep
from nanovllm.utils.checks import (
    check_choice,
    check_int,
    check_names,
    check_number,
)
from nanovllm.utils.helpers import read_json

# The options that the page can change. Its scenes start from these values.
DEFAULTS: dict[str, Any] = {
    "kvcache_block_size": 4,
    "num_kvcache_blocks": 40,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 6,
    "policy": "mixed",
    "enable_prefix_caching": True,
    "num_speculative_tokens": 0,
    "random_model": "",  # "" or a name of RANDOM_MODELS
}
# Models with recurrent states and with windows: what their config.json has in place of the demo
# model's. Their weights are random, so their answers make no sense.
RANDOM_MODELS: dict[str, JsonObject] = {
    "Qwen3.5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "model_type": "qwen3_5_text",
    },
    "Gemma 3": {
        "architectures": ["Gemma3ForCausalLM"],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "model_type": "gemma3_text",
        "rope_parameters": None,
        "sliding_window": 10,
    },
}
MAX_STEPS = 10_000  # longest recording; after it, the engine is replaced once it is idle
MESSAGE_INTERVAL = 0.05  # seconds, because a page need not be drawn more often
SECURITY_POLICY = (
    "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; base-uri 'none';"
    " script-src 'nonce-NONCE'; frame-ancestors 'none'; form-action 'none'"
)


class LiveRecorder(Recorder):
    """Keeps the steps of an engine in memory, as JSON for the page."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def write(self, step: TracedStep) -> None:
        self.steps.append(json.dumps(step, default=vars))


class Playground(EngineThread):
    """An engine whose steps can be watched and held."""

    seconds_per_choice = 0.0  # a client sees the same steps as the page

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self.model = model
        # One option chooses the policy, because the page can change it.
        policy = Config.from_options(model, **options).policy
        chosen = {"policy": policy, "enable_chunked_prefill": True}
        self.options = {**DEFAULTS, **options, **chosen}
        # Number of the engine. A change also tells a page that the server was restarted.
        self.run_number = int(time.time())
        self.pause: float | None = 0.0  # seconds between two steps, None to hold
        self.num_single_steps = 0  # to be taken while the engine holds
        self.late: dict[Stream, int] = {}  # prompts, and the step that they wait for
        self.next_time = 0.0
        self.changed = asyncio.Event()  # set and replaced when there is something to show
        super().__init__(self.make_llm(**self.options))
        self.record()

    def make_llm(self, random_model: str, **options: Any) -> LLM:
        """Start an engine of the given model, or of a tiny random one."""
        check_choice("random_model", random_model, ("", *RANDOM_MODELS))
        if not random_model:
            return LLM(self.model, **options)
        with TemporaryDirectory() as directory:
            without_weights = ignore_patterns("*.safetensors")
            copytree(DEMO_MODEL, directory, ignore=without_weights, dirs_exist_ok=True)
            path = Path(directory, "config.json")
            config = {**read_json(path), **RANDOM_MODELS[random_model]}
            path.write_text(json.dumps(config))
            return LLM(directory, **{**options, "load_format": "dummy"})

    def record(self) -> None:
        """Record the steps of a new engine."""
        self.recorder = LiveRecorder()
        self.llm.add_feature(self.recorder)
        for feature in self.llm.features:
            if isinstance(feature, Drafts):
                # Measured costs would decide against drafts on a slow or busy machine.
                feature.costs = StepCosts(per_token=0.0)

    # In the engine thread.

    def change_engine(self, changes: dict[str, Any]) -> int:
        """Start another engine and return its number.

        For invalid options, raise an error and keep this one.
        """
        options = {**self.options, **changes}
        self.replace(self.make_llm(**options), "the engine was replaced")
        self.record()
        self.options = options
        self.late.clear()
        self.run_number += 1
        return self.run_number

    def add_late(self, run: object, step: int, stream: Stream) -> None:
        """Queue prompts when engine number `run` has done `step` steps, or is idle before that."""
        if run != self.run_number:
            raise ValueError(f"run={run} is not the current engine: omit it, or read its number")
        self.late[stream] = step
        self.add_due()

    def add_due(self) -> None:
        for stream, step in list(self.late.items()):
            if step <= len(self.recorder.steps) or self.llm.is_finished():
                del self.late[stream]
                self.add(stream)

    def set_pace(self, pause: float | None, num_single_steps: int) -> None:
        self.pause = pause
        self.num_single_steps = num_single_steps

    def delay_step(self) -> float | None:
        if self.num_single_steps > 0:
            return 0.0
        return None if self.pause is None else max(0.0, self.next_time - time.monotonic())

    def stepped(self) -> None:
        self.num_single_steps = max(0, self.num_single_steps - 1)
        self.next_time = time.monotonic() + (self.pause or 0.0)
        self.add_due()
        if len(self.recorder.steps) > MAX_STEPS and self.llm.is_finished():
            self.change_engine({})
        self.announce()

    # In any thread.

    def stop(self, reason: str) -> None:
        super().stop(reason)
        self.announce()  # to pages, which wait for the next step

    def announce(self) -> None:
        """Wake the pages that wait for new steps."""

        def wake() -> None:
            self.changed.set()
            self.changed = asyncio.Event()

        self.loop.call_soon_threadsafe(wake)

    # On the event loop.

    def routes(self, post: Callable[[str, Endpoint], Route]) -> list[Route]:
        """Return the routes of the page. `post` makes that of an endpoint that takes JSON."""
        routes = [Route("/", self.show_page), Route("/playground/events", self.follow)]
        commands = {
            "prompts": self.take_prompts,
            "abort": self.take_abort,
            "pace": self.take_pace,
            "engine": self.take_options,
        }
        for name, command in commands.items():
            routes.append(post(f"/playground/{name}", partial(self.take, command)))
        return routes

    async def show_page(self, request: Request) -> Response:
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
        run_number = 0
        position = 0
        while self.stop_reason is None:
            changed = self.changed
            if run_number != self.run_number:
                run_number = self.run_number
                position = 0
            steps = self.recorder.steps[position:]
            state = json.dumps({**self._describe(), "first": position})
            position += len(steps)
            yield f'data: {state[:-1]}, "steps": [{", ".join(steps)}]}}\n\n'
            await changed.wait()
            await asyncio.sleep(MESSAGE_INTERVAL)

    def _describe(self) -> JsonObject:
        waiting = list(self.llm.scheduler.waiting)[:20]
        return {
            "run": self.run_number,
            "settings": self.recorder.trace.settings,
            "options": {name: self.options[name] for name in DEFAULTS},
            "pause": self.pause,
            "is_idle": self.llm.is_finished(),
            "arrivals": [(seq.seq_id, len(seq.token_ids)) for seq in waiting],
        }

    # In a thread that reads a body.

    def take(self, command: Callable[[JsonObject], Any], body: JsonObject, llm: LLM) -> JsonObject:
        with blaming(body):
            reply = command(body)
        self.announce()
        return reply or {}

    def take_prompts(self, body: JsonObject) -> None:
        """Queue prompts: {"chats": [text], "params": {...}}, or "prompts" without a template.

        "step" is the step that they join, and "run" the engine that they are meant for, whose
        number the reply to "engine" carries.
        """
        run = body.get("run", self.run_number)
        step = check_int("step", body.get("step", 0), 0)
        llm = self.llm
        params = SamplingParams(**body.get("params", {}))
        prompts: Any = body.get("prompts")
        if prompts is None:
            texts = body.get("chats", [])
            prompts = llm.encode_chats([[{"role": "user", "content": text}] for text in texts])
        self.call(self.add_late, run, step, Stream(llm.prepare_prompts(prompts, params)))

    def take_abort(self, body: JsonObject) -> None:
        request_id = check_int("request_id", body.get("request_id"), 0)
        self.call(self.abort, request_id, "the request was aborted on the page")

    def take_pace(self, body: JsonObject) -> None:
        pause = body.get("pause")
        if pause is not None:
            pause = check_number("pause", pause, 0.0, 60.0)
        self.call(self.set_pace, pause, check_int("steps", body.get("steps", 0), 0))

    def take_options(self, body: JsonObject) -> JsonObject:
        check_names(body, DEFAULTS)
        return {"run": self.call(self.change_engine, body)}
