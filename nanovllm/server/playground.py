"""The engine behind `python -m nanovllm.server --playground`. Its live page is in live_page.py.

Its steps are recorded for the page. It can be slowed down, held, single-stepped and replaced by
another engine.
"""

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from shutil import copytree, ignore_patterns
from tempfile import TemporaryDirectory
from typing import Any

from nanovllm import DEMO_MODEL, LLM
from nanovllm.config import Config
from nanovllm.features.speculation.costs import StepCosts
from nanovllm.features.speculation.drafts import Drafts
from nanovllm.server.engine_thread import EngineThread, Stream
from nanovllm.server.errors import JsonObject
from nanovllm.trace.recorder import Recorder
from nanovllm.trace.step import TracedStep
from nanovllm.utils.checks import check_choice
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

    def add(self, stream: Stream) -> None:
        """Queue the requests of a stream, which may have been prepared for another engine."""
        if any(len(prompt.token_ids) >= self.llm.max_model_len for prompt in stream.prompts):
            self.fail([stream], "the engine was replaced by a smaller one: send it again")
        else:
            super().add(stream)

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

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return function(*args), run in the engine thread between two steps. It can raise.

        Call it in a thread that can wait, which is neither the engine's nor the event loop's.
        """
        future: Future[Any] = Future()

        def command() -> None:
            try:
                future.set_result(function(*args))
            except Exception as error:
                future.set_exception(error)

        self.queue(command)
        while not future.done():
            wait([future], timeout=0.1)
            self.raise_if_stopped()  # the thread can end without running the command
        self.announce()
        return future.result()

    def announce(self) -> None:
        """Wake the pages that wait for new steps."""

        def wake() -> None:
            self.changed.set()
            self.changed = asyncio.Event()

        self.loop.call_soon_threadsafe(wake)
