"""HTTP around the endpoints: the log, keys, proxies, slow clients, unknown paths, metrics."""

import json
import os
import re
import sys

import httpx
import openai
import pytest
from server_helpers import (
    CLIENT,
    HEADERS,
    KEY,
    OPTIONS,
    connect,
    count_decodes,
    post,
    read_all,
    read_events,
    start,
    wait_for_line,
    write_request,
)
from starlette.requests import Request

import nanovllm
from nanovllm.server import metrics
from nanovllm.server.middleware import is_foreign, log

PAGE = "http://page.example:3000"
MODEL = "org/a model"
# Clients have little time, and grammars few states. GET / counts what a garbage collection visits,
# and GET /?x fails.
PROGRAM = f"""
import gc
import os

from starlette.responses import PlainTextResponse

from nanovllm.features.structured_outputs import grammars
from nanovllm.server import bodies
from nanovllm.server.web_server import Api, main

def welcome(self, request):
    return PlainTextResponse(str(int(request.url.query or len(gc.get_objects()))))

os.environ["NANOVLLM_API_KEY"] = {KEY!r}
bodies.BODY_SECONDS = 1
grammars.MAX_LEXER_STATES = 30
Api.welcome = welcome
main()
"""
SHORT = {"prompt": [5], "max_tokens": 3, "ignore_eos": True}
LONG = {"prompt": [5], "max_tokens": 900, "ignore_eos": True, "n": 8}
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.fixture(scope="module")
def server():
    """A server whose key is in the environment."""
    # An address that is copied from a browser ends with a slash, which an Origin never does.
    origin = f"{PAGE.upper()}/"
    options = [*OPTIONS[:-2], "--served-model-name", MODEL, "--allowed-origins", origin]
    with start(*options, program=("-c", PROGRAM)) as address_and_process:
        yield address_and_process


@pytest.fixture
def url(server):
    return server[0]


def test_each_request_has_a_line_in_the_log(server):
    url, process = server
    post(url, {"prompt": "x"})
    CLIENT.get(f"{url}/health")
    CLIENT.get(f"{url}/a%0a%1b?b")
    lines = wait_for_line(process, "%1B")
    expected = [r"nanovllm: POST /v1/completions 200 \d+\.\d ms\n"]
    expected.append(r"nanovllm: GET /a%0A%1B 404 \d+\.\d ms\n")
    assert len(lines) == 2
    assert all(map(re.fullmatch, expected, lines))


def test_a_log_that_nobody_reads_does_not_block(monkeypatch):
    read_end, write_end = os.pipe()
    stderr = os.dup(2)
    os.dup2(write_end, 2)
    try:
        with open(2, "w", closefd=False) as file:
            monkeypatch.setattr(sys, "stderr", file)
            for number in range(5000):
                log(f"line {number}")
    finally:
        os.dup2(stderr, 2)
    assert os.read(read_end, 30).startswith(b"nanovllm: line 0\n")
    for each in (read_end, write_end, stderr):
        os.close(each)


@pytest.mark.parametrize(
    "value, status",
    [
        (f"bearer {KEY}", 200),
        (f"Basic {KEY}", 401),
        (f"Bearer {KEY}x", 401),
        ("Bearer \xe9".encode("latin-1"), 401),
        ("", 401),
    ],
)
def test_the_scheme_of_a_key_is_case_insensitive(url, value, status):
    response = CLIENT.get(f"{url}/v1/models", headers={"Authorization": value})
    assert response.status_code == status
    assert ("www-authenticate" in response.headers) == (status == 401)


@pytest.mark.parametrize(
    "headers, status",
    [
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://public.example"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Sec-Fetch-Site": "same-site", "Origin": "http://testserver"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Host": "a.b", "Origin": "http://a.b"}, 403),
        ({"Host": "a.b", "Origin": "http://a.b"}, 200),
        ({"Origin": "null"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Authorization": ""}, 401),
        ({}, 200),
    ],
)
def test_foreign_pages_and_missing_keys_are_rejected(url, headers, status):
    """A page behind a proxy is accepted."""
    response = post(url, {"prompt": "x"}, **headers)
    assert response.status_code == status
    assert ("error" in response.json()) == (status != 200)
    assert "access-control-allow-origin" not in response.headers


def test_pages_of_allowed_origins_may_send_requests(url):
    preflight = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    for origin, status in ((PAGE, 200), ("http://page.example", 403), ("null", 403)):
        headers = {"Origin": origin, "Sec-Fetch-Site": "cross-site"}
        asked = CLIENT.options(f"{url}/v1/completions", headers={**headers, **preflight})
        sent = post(url, {"prompt": "x"}, **headers)
        assert [asked.status_code, sent.status_code] == [status, status]
        allowed = PAGE if status == 200 else None
        for reply in (asked, sent):
            assert reply.headers.get("Access-Control-Allow-Origin") == allowed
        if status == 200:
            assert "authorization" in asked.headers["Access-Control-Allow-Headers"]


def test_a_star_allows_all_origins():
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"origin", b"http://x")]}
    assert is_foreign(Request(scope), [PAGE])
    assert not is_foreign(Request(scope), ["*"])


def test_the_version_and_pings_need_no_key(url):
    assert CLIENT.get(f"{url}/version").json() == {"version": nanovllm.__version__}
    for path in ("ping", "health"):
        assert CLIENT.get(f"{url}/{path}").status_code == 200


def test_a_model_can_be_retrieved_by_its_name(url):
    """openai-python quotes the slashes of a name."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    (model,) = client.models.list()
    assert client.models.retrieve(MODEL) == model
    assert CLIENT.get(f"{url}/v1/models/{MODEL}", headers=HEADERS).json()["id"] == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"
    assert CLIENT.get(f"{url}/v1/models/{MODEL}").status_code == 401
    assert CLIENT.get(f"{url}/v1/models/", headers=HEADERS).json()["object"] == "list"


def test_unknown_paths_and_methods_are_named(url):
    response = CLIENT.get(f"{url}/v1/images")
    assert response.status_code == 404
    message = response.json()["error"]["message"]
    expected = "Not Found: GET /v1/images. The endpoints are /v1/completions, /v1/chat/comp"
    assert message.startswith(expected)
    response = CLIENT.post(f"{url}/v1/completions/", headers={"Host": "other"}, json={})
    assert response.status_code == 404, "it is not redirected to a host of the client's choice"
    assert "The endpoints are" in response.json()["error"]["message"]
    response = CLIENT.get(f"{url}/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    message = response.json()["error"]["message"]
    assert message == "Method Not Allowed: GET /v1/completions"
    assert len(CLIENT.get(f"{url}/{'x' * 10_000}").text) < 1000


def test_an_unexpected_error_is_logged_and_not_shown(server):
    """Also a ValueError, which is not always about the client's input."""
    url, process = server
    response = httpx.get(f"{url}/?x")  # uvicorn closes the connection
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["type"] == "server_error"
    assert error["message"] == "internal error"
    lines = wait_for_line(process, "ValueError: invalid literal")
    assert any("Traceback" in line for line in lines)


def test_an_unknown_model_is_an_error_with_a_code(url):
    reply = post(url, {"model": "some/" + "x" * 5000, "prompt": "x"})
    assert reply.status_code == 404
    error = reply.json()["error"]
    assert error["code"] == "model_not_found"
    assert len(error["message"]) < 500


def test_a_limit_of_the_grammar_is_an_error_in_words(url):
    body = {"prompt": "x", "max_tokens": 60, "structured_outputs": {"regex": "[a-c]{40}x"}}
    whole = post(url, body)
    assert whole.status_code == 400
    error = whole.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "too many states" in error["message"]
    *chunks, last = read_events(post(url, {**body, "stream": True}).text)
    assert last["error"] == error
    assert {chunk["choices"][0]["finish_reason"] for chunk in chunks} == {None}


def test_metrics_are_described_in_words(url):
    def read(name):
        return float(re.search(rf"^nanovllm_{name} (\S+)", text, re.MULTILINE)[1])

    post(url, {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "n": 2})
    CLIENT.get(f"{url}/nothing")
    text = CLIENT.get(f"{url}/metrics").text
    assert "stats[" not in text
    assert 'nanovllm_requests_total{status="404"}' in text
    assert "process_resident_memory_bytes" in text
    assert 1 <= read("request_seconds_count") <= read("time_to_first_token_seconds_count")
    assert 0 < read("time_to_first_token_seconds_sum") < read("request_seconds_sum")
    for name in metrics.GAUGES:
        assert f"# TYPE nanovllm_{name} gauge" in text


# --- clients that are slow or leave


def test_a_body_that_does_not_arrive_is_an_error(url):
    connection = connect(url, write_request(SHORT, Connection="close")[:-1])
    reply = read_all(connection)
    assert reply.startswith("HTTP/1.1 408")
    assert json.loads(reply.splitlines()[-1])["error"]["message"]


@pytest.mark.parametrize(
    "is_stream, version, rest",
    [(True, "1.0", b""), (False, "1.0", b""), (True, "1.1", HEALTH), (False, "1.1", HEALTH)],
)
def test_the_request_of_a_client_that_vanishes_is_aborted(server, is_stream, version, rest):
    """Also if the client has already sent its next request."""
    url, process = server
    before = count_decodes(url)
    body = {**LONG, "stream": is_stream}
    connect(url, write_request(body, version) + rest).close()
    wait_for_line(process, "POST")
    assert count_decodes(url) - before < 8 * 899


def test_a_body_that_is_too_large_is_rejected(url):
    limit = 2**21 + 16 * 1024  # for a max_model_len of 1,024
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    without_length = iter([body, b" " * limit])
    for content in (body.ljust(limit + 1), without_length):
        reply = CLIENT.post(f"{url}/v1/completions", content=content, headers=HEADERS)
        assert reply.status_code == 413
        assert f"exceeds {limit} bytes" in reply.json()["error"]["message"]
    reply = CLIENT.post(f"{url}/v1/completions", content=body.ljust(limit), headers=HEADERS)
    assert reply.status_code == 200


def test_garbage_collection_does_not_visit_what_was_imported(url):
    assert int(CLIENT.get(url).text) < 100_000  # torch alone has more
