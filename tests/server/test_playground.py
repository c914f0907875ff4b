"""The playground shows an engine's steps, holds and replaces it, and keeps foreign pages out."""

import asyncio
import json
import re
import threading
import time

import pytest
from browser import FIND_WIDE, needs_browser, run_script
from server_helpers import CLIENT, post, start, stream

from nanovllm import DEMO_MODEL, SamplingParams
from nanovllm.engine.scheduler import POLICIES
from nanovllm.features.speculation import drafts
from nanovllm.features.speculation.costs import StepCosts
from nanovllm.server import playground
from nanovllm.server.playground import DEFAULTS

GREEDY = {"temperature": 0, "max_tokens": 6}
QUESTION = {"chats": ["What is 12 + 30?"], "params": GREEDY}
PROMPT = {"prompts": [[5, 6, 7]], "params": GREEDY}
HOLD = {"pause": None}
FULL_SPEED = {"pause": 0}


@pytest.fixture(scope="module")
def server():
    with start("--playground", "--dtype", "float32") as (address, _):
        yield address


@pytest.fixture
def url(server):
    """The address of the server, with a new engine."""
    command(server, "pace", FULL_SPEED)
    command(server, "engine", {**DEFAULTS, "policy": "mixed"})
    return server


def command(url, name, body):
    response = post(url, body, f"/playground/{name}")
    assert response.status_code == 200, response.text
    return response.json()


def read_messages(url, num_steps=0):
    """Read messages until they have `num_steps` steps of the newest engine."""
    messages = []
    path = f"{url}/playground/events"
    with CLIENT.stream("GET", path, timeout=20) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                messages.append(json.loads(line.removeprefix("data: ")))
                if messages[-1]["first"] + len(messages[-1]["steps"]) >= num_steps:
                    return messages
    raise AssertionError("the stream has ended")


def list_steps(messages):
    return [step for message in messages for step in message["steps"]]


def test_steps_and_texts_are_sent(url):
    command(url, "prompts", QUESTION)
    messages = read_messages(url, 6)
    assert messages[0]["settings"]["num_blocks"] == 40
    texts = {}
    answer = ""
    for step in list_steps(messages):
        texts |= step.get("texts", {})
        answer += "".join(texts[str(token_id)] for token_id in step["work"][0]["new_token_ids"])
    assert answer == "12 + 30 = "


def test_the_engine_holds_and_takes_single_steps(url):
    command(url, "pace", HOLD)
    command(url, "prompts", PROMPT)
    for num_steps in (0, 2):
        command(url, "pace", {**HOLD, "steps": num_steps})
        read_messages(url, num_steps)
        time.sleep(0.2)
        assert len(read_messages(url)[0]["steps"]) == num_steps
    command(url, "pace", FULL_SPEED)
    read_messages(url, 6)


def test_the_engine_is_replaced(url):
    command(url, "pace", HOLD)
    command(url, "prompts", PROMPT)
    before = read_messages(url)[0]["run"]
    changes = {"policy": "prefill_first", "max_num_batched_tokens": 64}
    command(url, "engine", changes)
    message = read_messages(url)[0]
    assert message["run"] == before + 1
    assert message["settings"]["policy"] == "prefill first"
    assert message["is_idle"]
    for name in ("kvcache_block_size", "random_model", "dtype"):
        response = post(url, {name: 1}, "/playground/engine")
        assert response.status_code == 400
        assert name in response.json()["error"]["message"]
    assert read_messages(url)[0]["run"] == before + 1


def list_admissions(url, number):
    """Wait for so many requests to finish, and return the step that admitted each of them."""
    num_finished = 0
    while num_finished < number:
        steps = list_steps(read_messages(url))
        works = [work for step in steps for work in step["work"]]
        num_finished = sum(work["finish_reason"] is not None for work in works)
    admissions = {}
    for position, step in enumerate(steps):
        for work in step["work"]:
            admissions.setdefault(work["request_id"], position)
    return [admissions[request_id] for request_id in range(number)]


def test_prompts_wait_for_a_step_of_their_engine(url):
    run = command(url, "engine", {})["run"]
    command(url, "pace", HOLD)
    for step in (0, 4, 2, 99):  # 99: joins when the engine would be idle
        command(url, "prompts", {**PROMPT, "run": run, "step": step})
    command(url, "pace", FULL_SPEED)
    assert list_admissions(url, 4) == [0, 2, 4, 10]
    # Prompts of an engine that was replaced belong to nothing that is shown.
    command(url, "pace", HOLD)
    command(url, "prompts", PROMPT)
    command(url, "prompts", {**PROMPT, "run": run, "step": 99})
    assert command(url, "engine", {})["run"] == run + 1
    response = post(url, {**PROMPT, "run": run}, "/playground/prompts")
    assert response.status_code == 400
    assert f"run={run} is not the current engine" in response.json()["error"]["message"]
    command(url, "pace", FULL_SPEED)
    command(url, "prompts", PROMPT)
    assert list_admissions(url, 1) == [0]
    assert read_messages(url)[0]["is_idle"]


@pytest.mark.parametrize(
    "name, body, message",
    [
        ("engine", {}, "the engine was replaced"),
        ("abort", {"request_id": 0}, "the request was aborted on the page"),
    ],
)
def test_requests_of_the_api_fail_if_the_page_ends_them(url, name, body, message):
    command(url, "pace", {"pause": 0.05})
    with stream(url, {"prompt": [5], "max_tokens": 100, "ignore_eos": True}) as response:
        lines = response.iter_lines()
        next(lines)
        command(url, name, body)
        assert message in "\n".join(lines)
    command(url, "pace", FULL_SPEED)
    assert post(url, {"prompt": [5], "max_tokens": 2}).status_code == 200


def test_a_request_that_waits_while_the_engine_is_replaced_is_served():
    """The engine thread replaces the engine before it queues the request."""

    async def submit():
        engine = playground.Playground(DEMO_MODEL, {"dtype": "float32"})
        engine.start_on(asyncio.get_running_loop())
        gate = threading.Barrier(2)

        def replace():
            gate.wait()  # until the request waits, too
            engine.change_engine({})

        replacing = asyncio.create_task(asyncio.to_thread(engine.call, replace))
        while gate.n_waiting == 0:
            await asyncio.sleep(0.001)
        params = SamplingParams(**GREEDY, ignore_eos=True)
        async with engine.submit(engine.llm.prepare_prompts([5], params)) as requests:
            gate.wait()
            async for outputs in requests:
                output = outputs[0]
        await replacing
        engine.stop("done")
        await asyncio.to_thread(engine.join)
        return output

    assert len(asyncio.run(submit())["token_ids"]) == GREEDY["max_tokens"]


def test_drafts_do_not_depend_on_the_speed_of_the_machine(monkeypatch):
    """Otherwise, the scene "drafts" has none where measured costs decide against them."""
    monkeypatch.setattr(drafts, "measure_costs", lambda *_: StepCosts(per_token=9.0))
    options = {"dtype": "float32", "num_speculative_tokens": 4}
    llm = playground.Playground(DEMO_MODEL, options).llm
    llm.generate("x-y-z-x-y-z-x-y-z-x-y-z-x", SamplingParams(temperature=0, max_tokens=40))
    assert llm.stats["num_accepted_tokens"] > 0


def test_foreign_pages_are_rejected(server):
    for headers in (
        {"Origin": "http://evil.example"},
        {"Host": "evil.example"},
        {"Host": "evil.example:99999"},
    ):
        assert CLIENT.get(f"{server}/playground/events", headers=headers).status_code == 403
        assert post(server, HOLD, "/playground/pace", **headers).status_code == 403


def test_the_page_runs_only_its_scripts_and_shows_all_policies(server):
    """The page may be opened by a link of another page."""
    page = CLIENT.get(server, headers={"Sec-Fetch-Site": "cross-site"})
    assert page.status_code == 200
    nonce = re.search(r"'nonce-([^']+)'", page.headers["content-security-policy"])[1]
    assert page.text.count(f'<script nonce="{nonce}">') == 2
    for name, policy in POLICIES.items():  # each can be chosen
        assert f'<option value="{name}">{policy.title}</option>' in page.text


# Delivers recorded messages in place of the server, all at once, and looks at the page.
STUB = """
class EventSource {
  constructor() { EventSource.source = this; }
}
const MESSAGES = %s;
"""
LOOK = """
for (const message of MESSAGES) EventSource.source.onmessage({ data: JSON.stringify(message) });
const places = [$("place").textContent];
const words = [$("words").textContent];
go({ step: 1 });
places.push($("place").textContent);
words.push($("words").textContent);
const answer = document.querySelector(".answer").textContent;
places.push(location.hash);
go({ step: 0 });
places.push($("place").textContent);
words.push($("words").textContent);
places.push(document.querySelector(".timeline h2 small").textContent.split(".")[0]);
return [words, places, answer, document.images.length, $("trouble").textContent];
"""


def save_live_page(directory, url, messages):
    data = json.dumps(messages).replace("</", "<\\/")
    before, tag, live = CLIENT.get(url).text.rpartition("<script")
    path = directory / "live.html"
    path.write_text(f"{before}<script>{STUB % data}</script>{tag}{live}", "utf-8")
    return path


@needs_browser
def test_the_page_follows_and_goes_back(url, tmp_path):
    hostile = {"prompts": ["</script><img src=x onerror=alert(1)>"], "params": GREEDY}
    messages = read_messages(url)
    for prompts, num_steps in ((QUESTION, 6), (hostile, 12)):
        command(url, "prompts", prompts)
        messages += read_messages(url, num_steps)
    path = save_live_page(tmp_path, url, messages)
    (last, first, start), *rest = run_script(path, LOOK)
    assert start.startswith("The engine has started.")
    assert "Step 11." in last
    assert "A is admitted. This step computes all 20 tokens of its prompt." in first
    assert rest == [["11 / 11", "0 / 11", "#run=0&step=0", "start", "12 steps"], "1", 0, ""]


@needs_browser
def test_the_page_says_what_an_idle_engine_waits_for(url, tmp_path):
    """Also to readers of a phone."""
    path = save_live_page(tmp_path, url, read_messages(url))
    seen = run_script(
        path,
        """
        for (const message of MESSAGES) {
          EventSource.source.onmessage({ data: JSON.stringify(message) });
        }
        const seen = [$("state").textContent];
        let answer;
        fetch = () => new Promise((resolve) => { answer = resolve; });
        const bodies = [{}, { params: { structured_outputs: { regex: "a" } } }];
        for (const body of bodies) {
          const posted = post("prompts", body);
          seen.push($("state").textContent);
          answer({ json: async () => ({}) });
          await posted;
        }
        seen.push($("state").textContent);
        FIND_WIDE
        return [seen, findWide()];
        """.replace("FIND_WIDE", FIND_WIDE),
        "--window-size=500,900",
    )
    assert seen == [["idle", "preparing a request", "compiling a grammar", "idle"], []]


# Plays all scenes before the page has received an engine of them, and returns what it sends.
RECORD = """
const deliver = (message) => EventSource.source.onmessage({ data: JSON.stringify(message) });
const scenes = {};
for (const scene of SCENES) {
  const sent = [];
  fetch = async (path, { body }) => {
    sent.push([path.split("/").pop(), JSON.parse(body)]);
    return { json: async () => ({ run: 7 }) };
  };
  await playScene(scene);
  MESSAGES.forEach(deliver);
  scenes[scene.name] = { hint: $("hint").textContent, sent };
}
return scenes;
"""
# Shows what the engine did in each scene: the words of each step, and what of the page is visible.
WATCH = """
const shown = {};
for (const [name, { hint, watched, messages }] of Object.entries(MESSAGES)) {
  for (const message of messages) EventSource.source.onmessage({ data: JSON.stringify(message) });
  $("hint").textContent = hint;
  const words = [];
  let bottom = 0;
  for (view.step = 1; view.step <= lastStep(); view.step++) {
    draw();
    words.push($("words").textContent.replace(/\\s+/g, " "));
    for (const part of document.querySelectorAll(watched)) {
      bottom = Math.max(bottom, part.getBoundingClientRect().bottom);
    }
  }
  const answers = runs[0].tokens;
  shown[name] = { words, answers, bottom };
}
return { shown, width: innerWidth };
"""
# For each scene: what the hint tells to look at, a step that it names, and the words of that step.
WATCHED = {
    "shared prefix": ("#words", 3, "B is admitted with a prefix hit.*C .*hit.*D .*hit"),
    "long prompt, mixed steps": (
        ".timeline",
        3,
        "C is admitted.* a chunk of 14 of",
    ),
    "long prompt, prefill first": (
        ".timeline",
        3,
        "C .* the other 45 .*A and B are not scheduled",
    ),
    "small pool": (".timeline", 17, "no block is free. C, the newest sequence, is preempted"),
    "drafts": (".timeline", None, "A decodes with 4 draft tokens: all are accepted"),
    "one seed, twice": ('[aria-label*="used by B"]', 16, "B is admitted.*C is adm.*D is adm"),
    "JSON schema": (".choice", None, "does not allow the token"),
    "recurrent states": ("#states", 3, "B is admitted.*keeps this state as a snapshot"),
    "sliding windows": ("#windows", None, "The window of A has moved, so it has released"),
}


def play(url, sent):
    """Send what the page sends for a scene, without pauses. Returns the number of requests."""
    run = None
    num_requests = 0
    for name, body in sent:
        if name == "prompts":
            assert body["run"] == 7
            num_requests += len(body.get("chats") or body["prompts"])
            body = {**body, "run": run}
        if name == "pace" and body["pause"]:
            body = FULL_SPEED
        reply = command(url, name, body)
        if name == "engine":
            run = reply["run"]
    return num_requests


@needs_browser
def test_scenes_show_what_their_hints_say(url, tmp_path):
    command(url, "prompts", QUESTION)
    scenes = run_script(save_live_page(tmp_path, url, read_messages(url, 6)), RECORD)
    assert scenes.keys() == WATCHED.keys()
    for name, scene in scenes.items():
        scene["admissions"] = list_admissions(url, play(url, scene["sent"]))
        scene["messages"] = read_messages(url)
        scene["watched"] = WATCHED[name][0]
    page = save_live_page(tmp_path, url, scenes)
    seen = run_script(page, WATCH, "--window-size=1280,800")
    assert seen["width"] == 1280
    for name, (_, step, pattern) in WATCHED.items():
        shown = seen["shown"][name]
        assert 0 < shown["bottom"] <= 800, name
        words = " ".join(shown["words"])
        if step is not None:
            assert f"step {step}" in scenes[name]["hint"].lower()
            words = shown["words"][step]
        assert re.search(pattern, words), f"{name}: {words}"
        steps = [body.get("step", 0) for kind, body in scenes[name]["sent"] if kind == "prompts"]
        assert set(steps) <= {0, step, 3}
        assert set(steps) <= set(scenes[name]["admissions"]), name
    tokens = seen["shown"]["one seed, twice"]["answers"]
    assert tokens["0"] == tokens["1"]
    assert scenes["one seed, twice"]["admissions"] == [0, 16, 16, 16, 16]
