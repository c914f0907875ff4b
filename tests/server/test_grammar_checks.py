"""Grammars that clients wait for: their queue, clients that leave, and the end of the server."""

import asyncio
import json
import signal
import subprocess
import threading
import time

import psutil
import pytest
from server_helpers import OPTIONS, connect, post, read_all, start, write_request

from nanovllm.features.structured_outputs import grammars
from nanovllm.features.structured_outputs.grammars import GrammarCheck, check_in_process
from nanovllm.server import bodies
from nanovllm.server.grammar_checks import GrammarChecks

ENDLESS = "import time; time.sleep(600)"  # a check that never ends
# Three grammars can wait. The one of "known" has passed.
PROGRAM = """
from nanovllm.features.structured_outputs import grammars
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.server import grammar_checks
from nanovllm.server.web_server import main

known = grammars.make_grammar(StructuredOutputsParams(regex="known"))
grammars.check_in_process(known)
grammars.CHECK_PROGRAM = {program!r}
grammar_checks.MAX_CHECKS = 4
main()
"""


class StubCheck:
    """A check that runs until it is released or cancelled."""

    def __init__(self, name):
        self.digest = name
        self.problem = None
        self.started = threading.Event()
        self.released = threading.Event()
        self.is_cancelled = False

    def run(self):
        self.started.set()
        assert self.released.wait(60)
        if self.problem is not None:
            raise self.problem

    def cancel(self):
        self.is_cancelled = True
        self.released.set()


@pytest.fixture
def endless(tmp_path, monkeypatch):
    program = tmp_path / "endless.py"
    program.write_text(ENDLESS)
    monkeypatch.setattr(grammars, "CHECK_PROGRAM", str(program))
    return str(program)


def wait_until(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(condition)


async def start_checks(queue, *checks):
    tasks = []
    for check in checks:
        tasks.append(asyncio.create_task(queue.run(check)))
        await asyncio.sleep(0)
    return tasks


def test_a_client_that_leaves_takes_its_check_out_of_the_queue():
    async def leave():
        queue = GrammarChecks()
        a, b, c, d = checks = [StubCheck(name) for name in "abcd"]
        tasks = await start_checks(queue, *checks)
        assert a.started.wait(60) and b.started.wait(60)
        for task in reversed(tasks[:3]):
            task.cancel()
            await asyncio.wait([task])
        assert await asyncio.to_thread(d.started.wait, 60)
        assert a.is_cancelled and b.is_cancelled and not d.is_cancelled
        assert not c.started.is_set()
        d.problem = ValueError("too complex")
        d.released.set()
        assert await tasks[3] is d.problem
        assert not queue.checks

    asyncio.run(leave())


def test_clients_with_the_same_grammar_share_a_check():
    async def share():
        queue = GrammarChecks()
        check, same, late = (StubCheck("a") for _ in range(3))
        first, second = await start_checks(queue, check, same)
        assert check.started.wait(60)
        first.cancel()
        await asyncio.wait([first])
        assert not check.is_cancelled and not same.started.is_set()
        check.released.set()
        assert await second is None
        late.released.set()
        assert await queue.run(late) is None
        assert late.started.is_set()

    asyncio.run(share())


def test_a_body_is_parsed_again_after_the_checks_of_its_grammars(monkeypatch):
    """Meanwhile the thread parses bodies whose grammars are known.

    The problem of one grammar is not that of another.
    """
    checks = {}

    def make_check(grammar):
        return checks.setdefault(grammar, StubCheck(grammar.encode()))

    monkeypatch.setattr(grammars, "GrammarCheck", make_check)
    monkeypatch.setattr(grammars, "checked", {b"known": ""})
    parsed = []

    def prepare(*names):
        parsed.append(names)
        if "invalid" in names:
            with pytest.raises(ValueError, match="too complex"):
                check_in_process("invalid")
        check_in_process(names[-1])
        return names

    async def prepare_several():
        reader = bodies.Bodies(None)

        def call(*names):
            return asyncio.create_task(reader.call(lambda: prepare(*names), None, None))

        both = call("invalid", "valid")
        while "invalid" not in checks:
            await asyncio.sleep(0.001)
        assert await asyncio.wait_for(call("known"), 60) == ("known",)
        checks["invalid"].problem = ValueError("too complex")
        checks["invalid"].released.set()
        while "valid" not in checks:
            await asyncio.sleep(0.001)
        grammars.checked[b"valid"] = ""
        checks["valid"].released.set()
        assert await both == ("invalid", "valid")

    asyncio.run(prepare_several())
    assert parsed == [("invalid", "valid"), ("known",), *[("invalid", "valid")] * 2]


def test_a_check_that_is_cancelled_before_it_starts_ends_its_process(endless):
    check = GrammarCheck("start: /endless/")
    check.cancel()
    with pytest.raises(ValueError):
        check.run()
    assert check.process.returncode == -signal.SIGKILL


def test_an_interrupt_ends_the_process_of_a_check(endless, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupt)
    check = GrammarCheck("start: /endless/")
    with pytest.raises(KeyboardInterrupt):
        check.run()
    assert check.process.returncode == -signal.SIGKILL


# --- a server


def write(regex):
    body = {"prompt": "x", "max_tokens": 9, "structured_outputs": {"regex": regex}}
    return write_request(body)


def connect_and_read(url, data):
    data = data.replace(b"Content-Length", b"Connection: close\r\nContent-Length")
    return read_all(connect(url, data))


def test_requests_that_wait_for_grammars_and_the_end_of_the_server(endless):
    """A known grammar waits for no other. A signal ends requests that wait, also for a body."""
    with start(*OPTIONS, program=("-c", PROGRAM.format(program=endless))) as (url, process):
        list_checks = psutil.Process(process.pid).children
        waiting = [connect(url, write(f"unknown{number}")) for number in range(4)]
        wait_until(lambda: len(list_checks()) == 2)
        assert '"text": "known"' in connect_and_read(url, write("known"))
        wait_until(lambda: "503" in connect_and_read(url, write("one more")).split("\r\n")[0])
        reply = connect_and_read(url, write("one more"))
        assert "too many grammars" in json.loads(reply.splitlines()[-1])["error"]["message"]
        for connection in waiting:
            connection.close()
        wait_until(lambda: not list_checks())

        requests = [write(f"other{number}") for number in (0, 1, 2, 3, 3)]
        requests.append(write("known")[:-1])
        requests.append(requests[-1].replace(b"/v1/completions", b"/tokenize"))
        waiting = [connect(url, data) for data in requests]
        wait_until(lambda: len(list_checks()) == 2)
        assert post(url, {"prompt": "x"}).status_code == 200
        checks = list_checks()
        process.send_signal(signal.SIGTERM)
        for connection in waiting:
            reply = read_all(connection)
            assert reply.startswith("HTTP/1.1 503")
            error = json.loads(reply.splitlines()[-1])["error"]
            assert error["message"] == "the server is shutting down"
        assert process.wait(20) == 0
        assert not any(check.is_running() for check in checks)
        assert "Traceback" not in process.stderr.read()
