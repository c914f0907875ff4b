"""The README's replicas under Ray Data give every answer once, although one replica is killed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nanovllm import DEMO_MODEL, LLM, SamplingParams

pytest.importorskip("ray.data", reason="ray is not installed")

(SCRIPT,) = re.findall(
    r"```python\n(import ray\n.*?)```",
    (Path(__file__).parents[2] / "README.md").read_text(),
    flags=re.DOTALL,
)


def test_a_replica_is_killed(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {
        **os.environ,
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-u", "script.py"]
    lines: list[str] = []
    errors = (tmp_path / "errors").open("w")
    with (
        errors,
        subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            for line in process.stdout:
                lines += [line.rstrip("\n")] * line.startswith("What is")
                if len(lines) == 20:
                    replicas = [
                        child
                        for child in psutil.Process(process.pid).children(recursive=True)
                        if "Replica" in child.cmdline()[0]
                    ]
                    assert len(replicas) == 2
                    replicas[0].kill()
        finally:
            process.kill()
    assert process.returncode == 0, (tmp_path / "errors").read_text()
    questions = [f"What is {i} + 30?" for i in range(300)]
    chats = [[{"role": "user", "content": question}] for question in questions]
    outputs = LLM(DEMO_MODEL).chat(
        chats, SamplingParams(temperature=0.0, max_tokens=32), use_tqdm=False
    )
    assert sorted(lines) == sorted(
        f"{question} {output['text']}" for question, output in zip(questions, outputs)
    )
