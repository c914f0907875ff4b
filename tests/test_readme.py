"""The README's commands are the ones that work, and the example says something."""

import ast
import inspect
import io
import os
import re
import subprocess
import sys
import textwrap
import tokenize
from pathlib import Path
from subprocess import PIPE

import pytest

from nanovllm.engine.llm_engine import LLMEngine

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^python3 -m venv .*$", README, flags=re.MULTILINE)


def run(*command: str, **environment: str) -> str:
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout


def test_first_command_is_the_example() -> None:
    assert COMMANDS[0].endswith("python example.py")
    said = run("example.py", PYTHONIOENCODING="ascii")  # every terminal can show it
    assert (
        "nanovllm" in said and "2, 3, 5, 7, 11" in said and "85" in said and "t-e-n-a-l-p" in said and "num_decode_tokens" in said
    )
    assert re.search(r"[1-9]\d* of \d+ prompt tokens from the cache", said)
    assert "block 14: no hash" in said and "block 14: hash" in said and said.rstrip().endswith("open timeline.html in a browser")


def test_example_ends_when_nobody_reads_on() -> None:
    with subprocess.Popen([sys.executable, "example.py"], cwd=ROOT, stdout=PIPE, stderr=PIPE, text=True) as process:
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
def test_example_says_what_is_wrong(arguments: list[str], complaint: str) -> None:
    done = subprocess.run([sys.executable, "example.py", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and complaint in done.stderr and "Traceback" not in done.stderr


def test_second_command_is_what_ci_runs() -> None:
    assert COMMANDS[1].endswith("python -m pytest")
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
    assert "pip install -q -e '.[test]'" in COMMANDS[1]


def test_readme_code_runs(tmp_path: Path) -> None:
    code, with_ray = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert with_ray.startswith("import ray\n")  # which test_ray.py runs
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)


def test_readme_quotes_the_step() -> None:
    (quoted,) = re.findall(r"```py\n(.*?)```", README, flags=re.DOTALL)
    assert len(quoted.splitlines()) == 5
    assert textwrap.indent(quoted, " " * 8) in inspect.getsource(LLMEngine._step)


def count_lines(path: Path) -> int:
    """Code lines: no blanks, no comments, no docstrings."""
    source = path.read_text()
    if path.suffix != ".py":
        return sum(not line.strip().startswith("//") for line in source.splitlines() if line.strip())
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.string.strip() and token.type != tokenize.COMMENT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_the_tour_is_of_these_files() -> None:
    """Each module stands in one row, and each row says how many lines it has."""
    package = ROOT / "nanovllm"
    counts = {str(path.relative_to(package)): count_lines(path) for path in package.rglob("*.py")}
    left = {path for path, count in counts.items() if count and not path.startswith(("__init__", "demo_model"))}
    tour = README[README.index("## A tour") : README.index("## Eight questions")]
    rows = re.findall(r"^\| (.*?`.*?) \| ([\d,]+)(?: and ([\d,]+) of \S+)? \|", tour, flags=re.MULTILINE)
    named = set(re.findall(r"`(\S+\.py)`", tour))
    for cell, num_lines, num_others in rows[1:]:  # behind the step
        folders = tuple(re.findall(r"`(\w+/)`", cell))
        paths = {path for path in left if path.startswith(folders) and path not in named} | set(re.findall(r"`(\S+\.py)`", cell))
        others = [package / "page.html"] if "page.html" in cell else []
        if "kernels/" in folders:
            others = [path for path in package.rglob("*.*") if path.suffix in (".h", ".cpp")]
        assert sum(counts[path] for path in paths) - 5 * ("the rest" in cell) == int(num_lines.replace(",", "")), cell
        assert sum(map(count_lines, others)) == int((num_others or "0").replace(",", "")), cell
        left -= paths
    assert left == set()


def test_readme_is_short_and_its_picture_is_there() -> None:
    assert len(README.splitlines()) <= 240
    (picture,) = re.findall(r"--screenshot=(\S+)", README)
    assert f"]({picture})" in README and (ROOT / picture).exists()


def test_readme_shows_what_is_printed() -> None:
    ((command, shown),) = re.findall(r"```console\n\$ python (.*?) .*?\n(.*?)```", README, flags=re.DOTALL)
    assert shown in run(command)


def test_top_level_is_as_designed() -> None:
    if not (ROOT / ".git").exists():
        return
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
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
