"""The server as a user starts it: OpenAI's client, raw bytes, disconnects, signals, bad input."""

import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import openai
import psutil
import pydantic
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from project_helpers import reject
from server_helpers import (
    CLIENT,
    KEY,
    OPTIONS,
    connect,
    count_decodes,
    post,
    read_events,
    start,
    stream,
)

from nanovllm import SamplingParams
from nanovllm.server import web_server
from nanovllm.server.parameters import CHAT, COMPLETION, NEUTRAL

LONG = {"prompt": [5], "max_tokens": 900, "ignore_eos": True, "n": 4}
QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def server():
    """The address and the process of the server that most tests share. It has an API key."""
    with start(*OPTIONS) as address_and_process:
        yield address_and_process


@pytest.fixture
def url(server):
    return server[0]


@pytest.fixture
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


# --- replies


def test_replies_are_those_of_the_engine(client, llm):
    prompts = ["one two three", "seven eight"]
    params = SamplingParams(temperature=0.0, max_tokens=16, n=2)
    expected = llm.generate(prompts, params)
    reply = client.completions.create(model="demo_model", prompt=prompts, temperature=0, n=2)
    assert [choice.text for choice in reply.choices] == [output["text"] for output in expected]
    num_tokens = [len(output["prompt_token_ids"]) for output in expected]
    assert reply.usage.prompt_tokens == sum(num_tokens) / 2
    (expected,) = llm.chat(QUESTION, SamplingParams(temperature=0.0), use_tqdm=False)
    reply = client.chat.completions.create(model="", messages=QUESTION, temperature=0)
    assert reply.choices[0].message.content == expected["text"]
    assert reply.choices[0].finish_reason == expected["finish_reason"]
    assert reply.usage.completion_tokens == len(expected["token_ids"])


def test_embeddings(client, url, llm):
    """OpenAI's client asks for base64 unless it is told not to."""
    inputs = ["one two three", "seven eight"]
    expected = llm.embed(inputs)
    for options in ({}, {"encoding_format": "float"}):
        reply = client.embeddings.create(model="demo_model", input=inputs, **options)
        for index, (item, vector) in enumerate(zip(reply.data, expected, strict=True)):
            assert item.index == index
            assert item.embedding == pytest.approx(vector.tolist(), abs=1e-6)
    ids = [llm.tokenizer.encode(text) for text in inputs]
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, ids))
    assert client.embeddings.create(model="", input=ids).data == reply.data
    assert len(client.embeddings.create(model="", input=ids[0]).data) == 1
    for wrong, param in [
        ({"dimensions": 64}, "dimensions"),
        ({"input": []}, "input"),
        ({"input": [[5, 10**6]]}, "input"),
        ({"input": [5] * 1025}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
    ]:
        response = post(url, {"input": "x", **wrong}, "/v1/embeddings")
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


def test_a_stream_adds_up_to_the_reply_and_ends_with_the_usage(url):
    body = {"messages": QUESTION, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    path = "/v1/chat/completions"
    whole = post(url, body, path).json()
    (choice,) = whole["choices"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = post(url, {**body, **options}, path)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = read_events(response.text)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert {chunk["usage"] for chunk in chunks} == {None}
    text = ""
    logprobs = []
    for number, chunk in enumerate(chunks, 1):
        (part,) = chunk["choices"]
        if number == len(chunks):
            assert part == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
            break
        assert part["finish_reason"] is None
        text += part["delta"]["content"]
        logprobs += part["logprobs"]["content"]
    assert text == choice["message"]["content"]
    assert logprobs == choice["logprobs"]["content"]


def test_each_chunk_has_the_usage_of_its_choice(url):
    """As in vLLM. The last chunk has that of all choices, and each prompt counts once."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["a", "a b c"], "n": 2, "max_tokens": 3, "ignore_eos": True}
    body |= {"stream": True, "stream_options": options}
    *chunks, last = read_events(post(url, body).text)
    newest = {chunk["choices"][0]["index"]: chunk["usage"] for chunk in chunks}
    for usage in newest.values():
        assert usage["completion_tokens"] == 3
        assert usage["total_tokens"] == usage["prompt_tokens"] + 3
    assert last["usage"]["completion_tokens"] == 3 * 4
    assert last["usage"]["prompt_tokens"] == sum(newest[i]["prompt_tokens"] for i in (0, 2))
    options["include_usage"] = None  # without it, the other option is ignored
    assert "usage" not in post(url, body).text


def test_echo_scores_the_prompt(client, llm):
    """As lm-evaluation-harness asks for it."""
    prompt = [20, 30, 40, 50]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2, prompt_logprobs=2)
    (expected,) = llm.generate(prompt, params)
    reply = client.completions.create(
        model="", prompt=prompt, temperature=0, max_tokens=1, logprobs=2, echo=True
    )
    (choice,) = reply.choices
    assert choice.text == llm.tokenizer.decode(prompt) + expected["text"]
    assert reply.usage.completion_tokens == 1
    token_ids = prompt + expected["token_ids"]
    entries = expected["prompt_logprobs"] + expected["logprobs"]
    logprobs = [entry[token_id] for token_id, entry in zip(token_ids[1:], entries[1:])]
    first, *others = choice.logprobs.token_logprobs
    assert first is None
    assert others == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("options", [{}, {"logprobs": 2}, {"logprobs": 0, "n": 2}], ids=str)
def test_no_tokens_and_echo_score_the_prompt_only(url, options):
    body = {"prompt": ["What is", [20, 30, 40]], "echo": True, "seed": 3, **options}
    whole = post(url, {**body, "max_tokens": 0}).json()
    longer = post(url, {**body, "max_tokens": 1}).json()
    for choice, other in zip(whole["choices"], longer["choices"], strict=True):
        assert choice["finish_reason"] == "length"
        assert other["text"].startswith(choice["text"])
        for name, values in (choice["logprobs"] or {}).items():
            assert values == other["logprobs"][name][:-1]
    assert whole["usage"]["completion_tokens"] == 0
    assert whole["usage"]["prompt_tokens"] == longer["usage"]["prompt_tokens"]
    chunks = read_events(post(url, {**body, "max_tokens": 0, "stream": True}).text)
    texts = dict.fromkeys(range(len(whole["choices"])), "")
    for chunk in chunks:
        (part,) = chunk["choices"]
        texts[part["index"]] += part["text"]
    assert list(texts.values()) == [choice["text"] for choice in whole["choices"]]


class Sum(pydantic.BaseModel):
    number: Literal[1, 2]
    sign: Literal["+", "-"]


def test_formats_and_required_calls_are_valid_json(client):
    """Also for a template that does not know tools. The client parses what it gets."""
    chat = {"model": "", "messages": QUESTION}
    reply = client.chat.completions.parse(**chat, response_format=Sum)
    assert isinstance(reply.choices[0].message.parsed, Sum)
    tools = {"tools": [openai.pydantic_function_tool(Sum)], "parallel_tool_calls": False}
    reply = client.chat.completions.parse(**chat, **tools, tool_choice="required")
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    message = choice.message
    assert isinstance(message.tool_calls[0].function.parsed_arguments, Sum)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}
    history = [*QUESTION, message.model_dump(exclude_none=True), result]
    client.chat.completions.create(model="", messages=history, max_tokens=1)
    named = {"type": "function", "function": {"name": "Sum"}}
    with client.chat.completions.stream(**chat, **tools, tool_choice=named) as events:
        kinds = [event.type for event in events]
        (choice,) = events.get_final_completion().choices
    assert "tool_calls.function.arguments.delta" in kinds
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Sum)


def test_texts_are_tokenized_and_tokens_detokenized(url, llm):
    prompt = "What is 12 + 30?"
    options = {"add_generation_prompt": False}
    neutral = {"add_special_tokens": False, "return_token_strs": False}
    for body, expected in (
        ({"prompt": prompt}, llm.tokenizer.encode(prompt)),
        ({"prompt": ""}, []),
        ({"messages": QUESTION, **neutral}, llm.encode_chats([QUESTION])[0]),
        ({"messages": QUESTION, **options}, llm.encode_chats([QUESTION], **options)[0]),
    ):
        reply = post(url, body, "/tokenize").json()
        assert reply == {"tokens": expected, "count": len(expected), "max_model_len": 1024}
        text = post(url, {"tokens": expected}, "/detokenize").json()["prompt"]
        assert text == llm.tokenizer.decode(expected)


# --- many clients


def test_64_clients_share_steps(url):
    def ask(seed):
        body = {"prompt": [seed + 5], "seed": seed, "max_tokens": 20, "stream": seed % 2 == 0}
        return post(url, body).text

    before = count_decodes(url)
    with ThreadPoolExecutor(64) as pool:
        assert all("finish_reason" in text for text in pool.map(ask, range(64)))
    assert count_decodes(url) - before <= 64 * 19


# --- what is rejected


@pytest.mark.parametrize(
    "body, message",
    [
        ({"prompt": "x", "temperature": -1}, "temperature must be at least 0.0"),
        ({"prompt": "\ud800"}, "surrogates not allowed"),
        ([], "JSON object"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_errors_have_the_engines_message(url, body, message):
    response = post(url, body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_there_is_no_playground(url):
    assert CLIENT.get(f"{url}/playground/events").status_code == 404
    assert "--playground" in CLIENT.get(url).text


TEXTS = st.text(max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXTS, values, max_size=3),
    max_leaves=6,
)
# Without max_completion_tokens, so that max_tokens keeps replies short.
NEUTRAL_NAMES = {name for _, names in NEUTRAL for name in names.split()}
NAMES = sorted((CHAT | COMPLETION | NEUTRAL_NAMES) - {"max_completion_tokens"})
BODIES = st.dictionaries(st.sampled_from(NAMES) | TEXTS, JSON, max_size=6)
NUM_TOKENS = st.sampled_from([-1, 0, 1, 2, 2.5, "2", [], {}])
PATHS = st.sampled_from(["/v1/completions", "/v1/chat/completions"])
VALID = {"prompt": "x", "messages": QUESTION}


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(st.tuples(BODIES, NUM_TOKENS, PATHS, st.booleans()), min_size=20, max_size=20))
def test_no_body_is_an_internal_error(url, requests):
    """160 generated bodies, half of them nearly valid. They are small, so none is shrunk."""
    for body, num_tokens, path, is_nearly_valid in requests:
        body = {**body, "max_tokens": num_tokens}
        if is_nearly_valid:
            body = {**VALID, **body, "max_tokens": 2}
        response = post(url, body, path)
        assert response.status_code in (200, 400, 404), (body, path)
        if response.status_code != 200:
            assert response.json()["error"]["message"]


# --- start and end


def test_an_idle_server_uses_no_cpu(server):
    url, process = server
    count_decodes(url)
    time.sleep(0.5)  # threads of OpenMP spin for a moment
    before = psutil.Process(process.pid).cpu_times()
    time.sleep(1.0)
    after = psutil.Process(process.pid).cpu_times()
    assert sum(after) - sum(before) < 0.015


IMPORT = """
import os, runpy, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Finder())
runpy.run_module("nanovllm.server", run_name="__main__", alter_sys=True)
"""


def test_a_signal_during_the_imports_ends_the_program():
    program = IMPORT.format(number=int(signal.SIGINT))
    command = [sys.executable, "-c", program, "--port", "0", *OPTIONS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == ""


OPEN = """
import asyncio

from starlette.responses import StreamingResponse

from nanovllm.server import web_server

async def write():
    while True:
        yield "x" * 2**20
        await asyncio.sleep(0)

web_server.GRACE = {grace}
web_server.Api.welcome = lambda self, request: StreamingResponse(write())
web_server.main()
"""


@pytest.mark.parametrize(
    "path, options, grace",
    [("/", [], 1), ("/playground/events", ["--playground"], 1000)],
    ids=["does not read", "watches an idle engine"],
)
def test_a_signal_ends_streams_and_exits_with_0(path, options, grace):
    """A client that watches, or does not read, does not keep the server from its end."""
    with start(*options, program=("-c", OPEN.format(grace=grace))) as (url, process):
        with connect(url, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()) as connection:
            connection.recv(10)
            if not options:
                with stream(url, {**LONG, "max_tokens": 2000}) as response:
                    lines = response.iter_lines()
                    next(lines)
                    process.send_signal(signal.SIGINT)
                    rest = "\n".join(lines)
                assert "the server is shutting down" in rest
                assert rest.rstrip().endswith("[DONE]")
            else:
                process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        assert "Traceback" not in process.stderr.read()


FAILING = """
from nanovllm import LLM
from nanovllm.server.web_server import main

def fail(self):
    raise RuntimeError("rank 1 exited")

LLM.step = fail
main()
"""


def test_a_failed_engine_ends_the_server():
    with start(*OPTIONS, program=("-c", FAILING)) as (url, process):
        response = post(url, {"prompt": "x"})
        assert response.status_code == 503
        assert "rank 1 exited" in response.json()["error"]["message"]
        assert process.wait(20) == 1


def reject_options(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["server", *arguments])
    return reject(capsys, web_server.main)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
        (["nowhere/at/all"], "no such directory"),
        (["--port", "99999"], "--port 99999 is not available"),
        (["--host", "host.invalid", "--port", "0"], "--host host.invalid --port 0"),
        (["--api-key", ""], "NANOVLLM_API_KEY"),
        (["--playground", "--host", "0.0.0.0"], "use --host 127.0.0.1"),
        (["--playground", "--api-key", "secret"], "none of --api-key, --allowed-origins"),
        (["--playground", "--allowed-origins", "*"], "none of --api-key, --allowed-origins"),
    ],
)
def test_invalid_options_are_named(monkeypatch, capsys, arguments, message):
    assert message in reject_options(monkeypatch, capsys, *arguments)


def test_a_port_that_is_taken_is_reported_before_the_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(web_server, "LLM", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = reject_options(monkeypatch, capsys, "--port", str(port))
    assert f"--host 127.0.0.1 --port {port} is not available" in error
