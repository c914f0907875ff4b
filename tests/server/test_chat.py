"""The chat in the terminal answers, reports its figures, and survives Ctrl-C."""

import signal
import subprocess
import sys

COMMAND = [sys.executable, "-m", "nanovllm.chat"]


def test_conversation_continues_from_the_prefix_cache():
    questions = "What is 3 + 4?\nWhat is 12 + 30?\n"
    done = subprocess.run(COMMAND, input=questions, capture_output=True, text=True, check=True)
    assert "3 + 4 = 7." in done.stdout
    assert "12 + 30 = 42." in done.stdout
    first, second = [line for line in done.stdout.splitlines() if "first token" in line]
    assert " 0 of " in first
    assert " 0 of " not in second


def test_ctrl_c_stops_an_answer_and_not_the_program():
    with subprocess.Popen(
        COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        process.stdin.write("introduce yourself\n")
        process.stdin.flush()
        shown = ""
        while "I am" not in shown:
            shown += process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate("What is 3 + 4?\n", timeout=60)
    assert "[stopped]" in rest
    assert "3 + 4 = 7." in rest
    assert process.returncode == 0


def test_invalid_options_are_named():
    done = subprocess.run([*COMMAND, "nowhere/at/all"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no such directory" in done.stderr
