"""The server as a user starts it: OpenAI's client, raw bytes, disconnects, signals, and hostile
bodies.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm import DEMO_MODEL, LLM, SamplingParams
from nanovllm.server.openai_api import MAX_BODY_BYTES

NUM_BLOCKS = 512
OPTIONS = ["--dtype", "float32", "--num-kvcache-blocks", str(NUM_BLOCKS)]
OPTIONS += ["--kvcache-block-size", "16", "--max-model-len", "1024"]
LONG = {"max_tokens": 900, "ignore_eos": True}
QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]


@contextmanager
def start(*arguments, script=""):
    """Start a server on a free port. Yields its address and its process."""
    command = [sys.executable, "-m", "nanovllm.server"]
    if script:
        command = [sys.executable, "-c", script]
    command += ["--port", "0", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stderr:
                address = re.search(r"http://\S+", line)
                if address:
                    break
            yield address[0], process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def url():
    with start(*OPTIONS) as (address, _):
        yield address


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


def read_stats(url):
    stats: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        name, _, value = line.partition(" ")
        if not line.startswith("#"):
            stats[name.removeprefix("nanovllm_")] = float(value)
    return stats


def wait_until_idle(url):
    for _ in range(200):
        stats = read_stats(url)
        if stats["num_running"] == stats["num_waiting"] == 0:
            break
        time.sleep(0.02)
    assert stats["num_running"] == 0
    assert stats["num_waiting"] == 0
    assert stats["num_free_blocks"] == NUM_BLOCKS


def post(url, body, path="/v1/completions", **headers):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers}
    return httpx.post(url + path, content=content, headers=headers, timeout=60)


def read_events(text):
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_answers_are_those_of_the_engine(client):
    prompts = ["one two three", "seven eight"]
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    with LLM(DEMO_MODEL, dtype="float32", num_kvcache_blocks=64) as llm:
        expected = [out["text"] for out in llm.generate(prompts, greedy, use_tqdm=False)]
        chat = llm.chat(QUESTION, greedy, use_tqdm=False)[0]
    reply = client.completions.create(
        model="demo_model", prompt=prompts, temperature=0, max_tokens=12
    )
    assert [choice.text for choice in reply.choices] == expected
    reply = client.chat.completions.create(
        model="demo_model", messages=QUESTION, temperature=0, max_completion_tokens=12
    )
    assert reply.choices[0].message.content == chat["text"]
    assert reply.choices[0].finish_reason == chat["finish_reason"]
    assert reply.usage.prompt_tokens == len(chat["prompt_token_ids"])
    assert reply.usage.completion_tokens == len(chat["token_ids"])


def test_stream_has_a_chunk_per_token_then_usage(url):
    body = {"messages": QUESTION, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = post(url, body, "/v1/chat/completions").json()
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    response = post(url, body, "/v1/chat/completions")
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = read_events(response.text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    message = whole["choices"][0]["message"]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta["content"] for delta in deltas) == message["content"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    logprobs: list[Any] = []
    for chunk in chunks:
        assert chunk["usage"] is None
        logprobs += chunk["choices"][0]["logprobs"]["content"]
    assert logprobs == whole["choices"][0]["logprobs"]["content"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]


def test_echo_scores_the_prompt(client):
    """As lm-evaluation-harness asks for it."""
    prompt = [20, 30, 40, 50]
    params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=2, prompt_logprobs=2)
    with LLM(DEMO_MODEL, dtype="float32", num_kvcache_blocks=64) as llm:
        (expected,) = llm.generate(prompt, params, use_tqdm=False)
        text = llm.tokenizer.decode(prompt)
    entries = expected["prompt_logprobs"] + expected["logprobs"]
    for num_tokens in (2, 0):
        reply = client.completions.create(
            model="",
            prompt=prompt,
            temperature=0,
            max_tokens=num_tokens,
            logprobs=2,
            echo=True,
        )
        (choice,) = reply.choices
        assert choice.text == text + (expected["text"] if num_tokens else "")
        assert reply.usage.completion_tokens == num_tokens
        assert choice.finish_reason == "length"
        found = choice.logprobs
        token_ids = (prompt + expected["token_ids"])[: len(prompt) + num_tokens]
        logprobs = [entry and entry[token_id] for token_id, entry in zip(token_ids, entries)]
        assert found.token_logprobs == pytest.approx(logprobs, abs=1e-4)
        assert found.text_offset[0] == 0
        assert len(found.tokens) == len(found.text_offset) == len(token_ids)
        assert found.top_logprobs[0] is None
        for chosen, top, entry in zip(logprobs[1:], found.top_logprobs[1:], entries[1:]):
            assert max(top.values()) == pytest.approx(max(entry.values()), abs=1e-4)
            assert min(abs(value - chosen) for value in top.values()) < 1e-4


def test_samples_of_a_seed_are_repeated(client):
    options: Any = {"model": "", "prompt": [5, 6, 7], "seed": 3, "n": 3, "logprobs": 1}
    first, second = [client.completions.create(**options) for _ in range(2)]
    assert [choice.text for choice in first.choices] == [choice.text for choice in second.choices]
    assert len({choice.text for choice in first.choices}) > 1
    assert first.choices[0].logprobs.text_offset[0] == 0
    assert first.usage.prompt_tokens == 3


@pytest.mark.parametrize(
    "body, status, message",
    [
        ({"prompt": "x", "temperature": -1}, 400, "temperature must be at least 0.0"),
        ({"prompt": "x", "n": 10**9}, 400, "prompts times n"),
        ({"prompt": "x", "logit_bias": {"5": 1}}, 400, "'logit_bias'"),
        ({"prompt": "x", "logprobs": 21}, 400, "logprobs must be"),
        ({"prompt": "x", "prompt_logprobs": 1}, 400, "'prompt_logprobs'"),
        ({"prompt": "x", "echo": True, "stream": True}, 400, "'echo'"),
        ({"prompt": "x", "echo": "yes"}, 400, "echo must be"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens must be at least 1"),
        ({"prompt": ["x", 3]}, 400, "a prompt must be"),
        ({"prompt": [99999]}, 400, "each token id"),
        ({"prompt": "\ud800"}, 400, "lone surrogate"),
        ({}, 400, "prompts must be"),
        ([], 400, "JSON object"),
        (b"{", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        ({"prompt": "x", "model": "gpt-4"}, 404, "demo_model"),
        (b" " * (MAX_BODY_BYTES + 1), 413, "exceeds"),
    ],
)
def test_errors_have_the_engines_message(url, body, status, message):
    response = post(url, body)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]


def test_neutral_values_are_accepted(url):
    body = {"prompt": "x", "max_tokens": 1, "logit_bias": {}, "tools": None, "best_of": 1}
    assert post(url, {**body, "user": "me", "suffix": ""}).status_code == 200


def test_other_pages_and_content_types_are_rejected(url):
    body = {"prompt": "x"}
    assert post(url, body, Origin="http://evil.example").status_code == 403
    assert post(url, body, **{"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert post(url, body, Origin=url).status_code == 200
    assert httpx.post(f"{url}/v1/completions", content="{}").status_code == 415
    assert httpx.get(f"{url}/v1/completions").status_code == 405
    assert httpx.get(f"{url}/nowhere").json()["error"]["message"] == "Not Found"
    assert "access-control-allow-origin" not in post(url, body).headers


@pytest.mark.parametrize("is_stream", [True, False])
def test_disconnecting_aborts(url, is_stream):
    body = {"prompt": [5, 6], "n": 4, "stream": is_stream, **LONG}
    with httpx.Client() as client:
        try:
            with client.stream("POST", f"{url}/v1/completions", json=body, timeout=0.3) as response:
                next(response.iter_lines())
        except httpx.ReadTimeout:
            pass
    wait_until_idle(url)


def test_64_clients_share_steps(url):
    def ask(seed):
        body = {"prompt": [seed + 5], "seed": seed, "max_tokens": 20, "stream": seed % 2 == 0}
        return post(url, body).text

    before = read_stats(url)
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(ask, range(64)))
    after = read_stats(url)
    assert all("finish_reason" in text for text in together)
    num_tokens = after["num_decode_tokens_total"] - before["num_decode_tokens_total"]
    assert num_tokens <= 64 * 19
    wait_until_idle(url)


TEXTS = st.text(max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXTS, values, max_size=3),
    max_leaves=6,
)
NAMES = ["prompt", "messages", "n", "temperature", "top_p", "seed", "stop", "stream"]
NAMES += ["logprobs", "top_logprobs", "stream_options", "model", "min_tokens", "stop_token_ids"]
NAMES += ["tools", "logit_bias", "echo", "top_k", "min_p", "repetition_penalty", "best_of"]
FIELDS = st.dictionaries(st.sampled_from(NAMES) | TEXTS, JSON, max_size=6)
# Few tokens, so that most of the time goes into bodies.
NUM_TOKENS = st.sampled_from([-1, 0, 1, 2, 2.5, "2", [], {}])
BODIES = st.builds(lambda fields, num: {**fields, "max_tokens": num}, FIELDS, NUM_TOKENS)
PATHS = st.sampled_from(["/v1/completions", "/v1/chat/completions"])


@pytest.fixture(scope="module")
def connection():
    """A connection that stays open, on which thousands of requests take seconds."""
    with httpx.Client(timeout=60) as client:
        yield client


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(BODIES, PATHS, st.booleans()), min_size=20, max_size=20))
def test_no_body_is_an_internal_error(url, connection, requests):
    for body, path, is_nearly_valid in requests:
        if is_nearly_valid:
            body = {"prompt": "x", "messages": QUESTION, **body, "max_tokens": 2}
        content = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        response = connection.post(url + path, content=content, headers=headers)
        assert response.status_code in (200, 400, 404), (body, path)
        if response.status_code != 200:
            assert response.json()["error"]["message"]


def test_api_key_is_required():
    with start(*OPTIONS, "--api-key", "secret") as (url, _):
        response = post(url, {"prompt": "x"})
        assert response.status_code == 401
        assert "API key" in response.json()["error"]["message"]
        assert post(url, {"prompt": "x"}, Authorization="Bearer secret").status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_streams_and_exits_with_0(number):
    with start(*OPTIONS) as (url, process):
        body = {"prompt": [5], "stream": True, **LONG, "n": 8}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(number)
            rest = "\n".join(lines)
        assert "the server is shutting down" in rest
        assert rest.rstrip().endswith("[DONE]")
        assert process.wait(20) == 0


FAILING = """
from nanovllm import LLM
from nanovllm.server.__main__ import main

def fail(self):
    raise RuntimeError("rank 1 exited")

LLM.step = fail
main()
"""


def test_failed_engine_ends_the_server():
    with start(*OPTIONS, script=FAILING) as (url, process):
        response = post(url, {"prompt": "x"})
        assert response.status_code == 503
        assert "rank 1 exited" in response.json()["error"]["message"]
        assert process.wait(20) == 1


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads /proc")
def test_idle_server_uses_no_cpu():
    with start(*OPTIONS) as (url, process):
        post(url, {"prompt": "x"})

        def read_ticks():
            with open(f"/proc/{process.pid}/stat") as file:
                user, system = file.read().rpartition(")")[2].split()[11:13]
            return int(user) + int(system)

        time.sleep(0.5)  # threads of OpenMP spin for a moment
        before = read_ticks()
        time.sleep(1.0)
        assert read_ticks() - before <= 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
        (["nowhere/at/all"], "no such directory"),
        (["--dtype", "int8"], "dtype must be one of"),
    ],
)
def test_invalid_options_are_named(arguments, message):
    command = [sys.executable, "-m", "nanovllm.server", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
