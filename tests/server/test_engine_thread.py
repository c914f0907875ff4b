"""The thread that owns the engine, without HTTP."""

import asyncio
import sys
import warnings

from conftest import disturb_logits

from nanovllm import DEMO_MODEL, LLM, SamplingParams
from nanovllm.engine.input_processor import PreparedPrompt
from nanovllm.server import middleware
from nanovllm.server.engine_thread import EngineThread
from nanovllm.utils.helpers import report


def test_a_warning_that_is_an_error_ends_one_request_only(monkeypatch):
    """Its logits are NaN. The other request shares its steps."""
    llm = LLM(DEMO_MODEL, dtype="float32", num_kvcache_blocks=64)
    disturb_logits(llm, lambda seq: seq.seq_id == 0)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    reasons = {}

    async def serve():
        engine = EngineThread(llm)
        engine.start_on(asyncio.get_running_loop())
        async with engine.submit(
            [PreparedPrompt([5], params, {}), PreparedPrompt([6], params, {})]
        ) as stream:
            async for outputs in stream:
                reasons.update((i, output["finish_reason"]) for i, output in outputs.items())
        engine.stop("done")
        await asyncio.to_thread(engine.join)

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        asyncio.run(serve())
    assert reasons == {0: "error", 1: "length"}


def test_a_line_of_the_log_without_a_reader_is_dropped(monkeypatch):
    def fail(*args, **options):
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", fail)
    middleware.log("x")


def test_reports_without_stderr_do_not_go_to_stdout(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    report("x")
    assert capsys.readouterr().out == ""
