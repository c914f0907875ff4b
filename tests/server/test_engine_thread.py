"""The thread that owns the engine, without HTTP."""

import asyncio
import sys
import warnings

import httpx
from conftest import disturb_logits

from nanovllm import DEMO_MODEL, LLM
from nanovllm.engine.outputs import NAN_LOGITS
from nanovllm.server import middleware
from nanovllm.server.engine_thread import EngineThread
from nanovllm.server.openai_api import Api
from nanovllm.utils.helpers import report


def test_nan_logits_end_one_request_with_an_error_of_the_server():
    """Also if warnings are errors. The other request shares its steps."""
    llm = LLM(DEMO_MODEL, dtype="float32", num_kvcache_blocks=64)
    disturb_logits(llm, lambda seq: seq.seq_id == 0)

    async def serve():
        engine = EngineThread(llm)
        engine.start_on(asyncio.get_running_loop())
        app = Api(engine, "model", "model").make_app()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            posts = [client.post("/v1/completions", json={"prompt": "x"}) for _ in range(2)]
            responses = await asyncio.gather(*posts)
        engine.stop("done")
        await asyncio.to_thread(engine.join)
        return responses

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        responses = asyncio.run(serve())
    valid, failed = sorted(responses, key=lambda response: response.status_code)
    assert valid.status_code == 200
    assert failed.status_code == 500
    assert NAN_LOGITS in failed.json()["error"]["message"]


def test_a_line_of_the_log_without_a_reader_is_dropped(monkeypatch):
    def fail(*args, **options):
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", fail)
    middleware.log("x")


def test_reports_without_stderr_do_not_go_to_stdout(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    report("x")
    assert capsys.readouterr().out == ""
