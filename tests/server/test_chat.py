"""The chat in the terminal answers from the prefix cache, and survives Ctrl-C."""

import signal
import subprocess
import sys

import pytest

from nanovllm import chat

SLOWLY = """
import signal, time
from nanovllm import LLM, chat

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
step = LLM.step
LLM.step = lambda llm, inbox: (time.sleep(0.01), step(llm, inbox))[1]  # leaves time for Ctrl-C
chat.main()
"""


def test_a_conversation_with_an_answer_that_ctrl_c_stops():
    command = [sys.executable, "-c", SLOWLY]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        process.stdin.write("What is 3 + 4?\nWhat is 12 + 30?\nintroduce yourself\n")
        process.stdin.flush()
        shown = ""
        while "I am" not in shown:
            shown += process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate("What is 5 + 4?\n", timeout=60)
    assert "3 + 4 = 7." in shown
    assert "12 + 30 = 42." in shown
    first, second = [line for line in shown.splitlines() if "first token" in line]
    assert " 0 of " in first
    assert " 0 of " not in second
    assert "[stopped]" in rest
    assert "5 + 4 = 9." in rest
    assert process.returncode == 0


def test_an_invalid_option_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["chat", "nowhere/at/all"])
    with pytest.raises(SystemExit, match="2"):
        chat.main()
    assert "no such directory" in capsys.readouterr().err
