"""Grammars that clients wait for: other requests, too many of them, and the end of the server."""

import json
import signal
import subprocess
import time

import psutil
import pytest
from server_helpers import OPTIONS, connect, post, read_all, start, write_request

from nanovllm.features.structured_outputs import grammars

# Takes all of its two seconds of CPU time.
HOSTILE = "start: A\nA: " + " & ".join(f"/.*a.{{{i}}}b.*/" for i in range(10, 40))


@pytest.fixture
def endless(tmp_path, monkeypatch):
    """Checks that do not end by themselves."""
    program = tmp_path / "endless.py"
    program.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(grammars, "CHECK_PROGRAM", str(program))


def test_an_interrupt_ends_the_process_of_a_check(endless, monkeypatch):
    processes = []

    def interrupt(process, *_, **__):
        processes.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        grammars.check_in_process("start: /endless/")
    assert processes[0].returncode == -signal.SIGKILL
    assert not grammars.compiling


# --- a server


def write(**outputs):
    return write_request({"prompt": "x", "structured_outputs": outputs})


def write_hostile(number):
    return write(grammar=f"{HOSTILE} // {number}")


def wait_until(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(condition)


def test_other_requests_do_not_wait_for_64_hostile_grammars():
    """A signal ends requests that wait, also for a body."""
    with start(*OPTIONS) as (url, process):
        list_checks = psutil.Process(process.pid).children
        known = {"prompt": "x", "structured_outputs": {"regex": "known"}}
        assert post(url, known).json()["choices"][0]["text"] == "known"
        waiting = [connect(url, write_hostile(number)) for number in range(64)]
        wait_until(lambda: len(list_checks()) == 2)
        before = time.monotonic()
        reply = post(url, {"prompt": "x", "max_tokens": 1})
        assert reply.status_code == 200
        assert time.monotonic() - before < 30
        rejected = post(url, known)
        assert rejected.status_code == 503
        assert "too many grammars" in rejected.json()["error"]["message"]
        for connection in waiting[:62]:
            connection.close()
        for check in list_checks():  # they would end by themselves
            check.kill()
        wait_until(lambda: post(url, known).status_code == 200)

        requests = [write_hostile(number) for number in range(100, 104)]
        requests.append(write(regex="known")[:-1])
        requests.append(requests[-1].replace(b"/v1/completions", b"/tokenize"))
        waiting += [connect(url, data) for data in requests]
        wait_until(lambda: len(list_checks()) == 2)
        checks = list_checks()
        process.send_signal(signal.SIGTERM)
        for connection in waiting[-len(requests) :]:
            reply = read_all(connection)
            assert reply.startswith("HTTP/1.1 503")
            error = json.loads(reply.splitlines()[-1])["error"]
            assert error["message"] == "the server is shutting down"
        assert process.wait(30) == 0
        wait_until(lambda: not any(check.is_running() for check in checks))
        assert "Traceback" not in process.stderr.read()
