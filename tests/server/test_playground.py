"""The playground shows every step of the engine, holds it and replaces it, and keeps foreign pages
out.
"""

import json
import re
import time
from typing import Any

import httpx
import pytest
from test_server import post, start, wait_until_idle

GREEDY = {"temperature": 0, "max_tokens": 6}
HOLD = {"pause": None, "steps": 0}


@pytest.fixture
def url():
    with start("--playground", "--dtype", "float32") as (address, _):
        yield address


def command(url, name, body):
    response = post(url, body, f"/playground/{name}")
    assert response.status_code == 200, response.text


def read_messages(url, num_steps):
    """Read messages until they have `num_steps` steps of the newest engine."""
    messages: list[Any] = []
    with httpx.stream("GET", f"{url}/playground/events", timeout=20) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                messages.append(json.loads(line.removeprefix("data: ")))
                if messages[-1]["first"] + len(messages[-1]["steps"]) >= num_steps:
                    return messages
    raise AssertionError("the stream has ended")


def test_steps_and_texts_are_sent(url):
    command(url, "prompts", {"chats": ["What is 12 + 30?"], "params": GREEDY})
    messages = read_messages(url, 6)
    steps = [step for message in messages for step in message["steps"]]
    texts = {name: text for step in steps for name, text in step.get("texts", {}).items()}
    new_ids = [token_id for step in steps for token_id in step["rows"][0][1]]
    assert "".join(texts[str(token_id)] for token_id in new_ids) == "12 + 30 = "
    assert messages[0]["settings"]["num_blocks"] == 40
    # A browser that reconnects goes on where it was.
    headers = {"Last-Event-ID": "1:4"}
    with httpx.stream("GET", f"{url}/playground/events", headers=headers) as response:
        data = next(line for line in response.iter_lines() if line.startswith("data: "))
    assert json.loads(data.removeprefix("data: "))["first"] == 4


def test_engine_holds_and_takes_single_steps(url):
    command(url, "pace", HOLD)
    command(url, "prompts", {"prompts": [[5, 6, 7]], "params": GREEDY})
    time.sleep(0.2)
    assert read_messages(url, 0)[0]["steps"] == []
    command(url, "pace", {"pause": None, "steps": 2})
    assert len(read_messages(url, 2)[0]["steps"]) == 2
    time.sleep(0.2)
    assert len(read_messages(url, 2)[0]["steps"]) == 2
    command(url, "pace", {"pause": 0, "steps": 0})
    read_messages(url, 6)


def test_engine_is_replaced(url):
    command(url, "pace", HOLD)
    command(url, "prompts", {"prompts": [[5, 6, 7]], "params": GREEDY})
    options = {"num_kvcache_blocks": 12, "enable_chunked_prefill": False}
    options["max_num_batched_tokens"] = 64
    command(url, "engine", options)
    message = read_messages(url, 0)[0]
    assert message["run"] == 2
    assert message["settings"]["num_blocks"] == 12
    assert message["settings"]["enable_chunked_prefill"] is False
    assert message["is_idle"]
    invalid = post(url, {"kvcache_block_size": 1}, "/playground/engine")
    assert invalid.status_code == 400
    assert "kvcache_block_size" in invalid.json()["error"]["message"]
    assert read_messages(url, 0)[0]["run"] == 2
    assert post(url, {"model": "x"}, "/playground/engine").status_code == 400


def test_api_requests_are_shown_and_fail_if_the_engine_is_replaced(url):
    command(url, "pace", {"pause": 0.05, "steps": 0})
    body = {"prompt": [5], "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as response:
        lines = response.iter_lines()
        next(lines)
        command(url, "engine", {})
        assert "the engine was replaced" in "\n".join(lines)
    command(url, "pace", {"pause": 0, "steps": 0})
    assert post(url, {"prompt": [5], "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "same-site"},
        {"Host": "evil.example"},
    ],
)
def test_foreign_pages_are_rejected(url, headers):
    for path in ("/playground/events", "/v1/models"):
        assert httpx.get(url + path, headers=headers).status_code == 403
    assert post(url, HOLD, "/playground/pace", **headers).status_code == 403
    page = httpx.get(url, headers={"Sec-Fetch-Site": "cross-site"})
    assert page.status_code == 200  # a link to the page
    nonce = re.search(r"'nonce-([^']+)'", page.headers["content-security-policy"])[1]
    assert page.text.count(f'<script nonce="{nonce}">') == 2


def test_other_servers_have_no_playground():
    options = ["--num-kvcache-blocks", "512"]
    with start(*options) as (url, _):
        assert "--playground" in httpx.get(url).text
        assert httpx.get(f"{url}/playground/events").status_code == 404
        wait_until_idle(url)


@pytest.mark.parametrize("arguments", [["--host", "0.0.0.0"], ["--api-key", "secret"]])
def test_playground_is_for_this_machine_only(arguments):
    from nanovllm.server.__main__ import main

    with pytest.raises(SystemExit) as end:
        main(["--playground", *arguments])
    assert end.value.code == 2
