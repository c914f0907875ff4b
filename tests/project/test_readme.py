"""The README's commands and code work, and its quotations are up to date."""

import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from subprocess import PIPE

import pytest

from nanovllm.engine.llm_engine import LLMEngine

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^python3 -m venv .*$", README, flags=re.MULTILINE)


def run(*command, **environment):
    env = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    ).stdout


def test_first_command_is_the_example():
    assert COMMANDS[0].endswith("python example.py")
    said = run("example.py", PYTHONIOENCODING="ascii")  # every terminal can show it
    assert (
        "nanovllm" in said
        and "2, 3, 5, 7, 11" in said
        and "85" in said
        and "t-e-n-a-l-p" in said
        and "num_decode_tokens" in said
    )
    assert re.search(r"[1-9]\d* of \d+ prompt tokens from the prefix cache", said)
    assert (
        "block 14: not listed" in said
        and "block 14: listed" in said
        and said.rstrip().endswith("open timeline.html in a browser")
    )


def test_example_ends_when_nobody_reads_on():
    with subprocess.Popen(
        [sys.executable, "example.py"], cwd=ROOT, stdout=PIPE, stderr=PIPE, text=True
    ) as process:
        process.stdout.close()  # as `| head` does
        assert "Traceback" not in process.stderr.read() and process.wait() == 1


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--max-tokens", "0"], "max_tokens must be at least 1"),
        (["--max-tokens", "x"], "--max-tokens"),
        (["--model", "./nothing"], "no such directory"),
        (["--model", "example.py"], "no such directory"),
    ],
)
def test_example_says_what_is_wrong(arguments, complaint):
    done = subprocess.run(
        [sys.executable, "example.py", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and complaint in done.stderr and "Traceback" not in done.stderr


def test_second_command_is_what_ci_runs():
    assert COMMANDS[1].endswith("python -m pytest")
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
    assert "pip install -q -e '.[test]'" in COMMANDS[1]


def test_readme_code_runs(tmp_path):
    code, with_ray = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert with_ray.startswith("import ray\n")  # which test_ray.py runs
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)


def test_readme_quotes_the_step():
    (quoted,) = re.findall(r"```py\n(.*?)```", README, flags=re.DOTALL)
    assert textwrap.indent(quoted, " " * 8) in inspect.getsource(LLMEngine._step)


def test_the_tour_names_every_module_once():
    package = ROOT / "nanovllm"
    modules = {
        str(path.relative_to(package)) for path in package.rglob("*.py") if path.stat().st_size
    }
    left = {module for module in modules if not module.startswith(("__init__", "demo_model"))}
    tour = README[README.index("## Reading in one evening") : README.index("## Glossary")]
    cells = re.findall(r"^\| (`.*?) \|", tour, flags=re.MULTILINE)
    named = re.findall(r"`(\S+\.py)`", "\n".join(cells[1:]))  # behind the row of the step
    folders = tuple(re.findall(r"`(\w+/)`", "\n".join(cells)))
    left -= set(named)
    assert {module for module in left if not module.startswith(folders)} == set()
    assert len(set(named)) == len(named) and set(named) <= modules


def test_readmes_picture_is_there():
    (picture,) = re.findall(r"--screenshot=(\S+)", README)
    assert f"]({picture})" in README and (ROOT / picture).exists()


def test_readme_shows_what_is_printed():
    ((command, shown),) = re.findall(
        r"```console\n\$ python (.*?) .*?\n(.*?)```", README, flags=re.DOTALL
    )
    assert shown in run(command)


def test_top_level_is_as_designed():
    if not (ROOT / ".git").exists():
        return
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    top = {path.split("/")[0] for path in tracked}
    assert top <= {
        "pyproject.toml",
        "nanovllm",
        "bench.py",
        "example.py",
        "tests",
        "README.md",
        ".ci",
        ".github",
        ".gitignore",
        "LICENSE",
    }
