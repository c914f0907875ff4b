"""The worker's README under Ray Data gives every answer once, although one replica is killed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import greedy

from nanovllm import DEMO_MODEL, LLM

pytest.importorskip("ray.data", reason="ray is not installed")

README = (Path(__file__).parents[2] / "nanovllm/worker/README.md").read_text()
(SCRIPT,) = re.findall(r"```python\n(import ray\n.*?)```", README, flags=re.DOTALL)


def kill_a_replica(process):
    children = psutil.Process(process.pid).children(recursive=True)
    replicas = [child for child in children if "Replica" in child.cmdline()[0]]
    assert len(replicas) == 2
    replicas[0].kill()


def test_a_replica_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-u", "script.py"]
    errors = tmp_path / "errors"
    pipes = {"stdout": subprocess.PIPE, "stderr": errors.open("w"), "text": True}
    answers = []
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as process:
        try:
            for line in process.stdout:
                if line.startswith("What is"):
                    answers.append(line.rstrip("\n"))
                    if len(answers) == 20:
                        kill_a_replica(process)
        finally:
            process.kill()
    assert process.returncode == 0, errors.read_text()
    questions = [f"What is {i} + 30?" for i in range(300)]
    chats = [[{"role": "user", "content": question}] for question in questions]
    outputs = LLM(DEMO_MODEL).chat(chats, greedy(32), use_tqdm=False)
    expected = [f"{question} {output['text']}" for question, output in zip(questions, outputs)]
    assert sorted(answers) == sorted(expected)
