"""The README's commands and code work, and its quotations match the package."""

import inspect
import os
import re
import runpy
import sys
import textwrap

import pytest
from project_helpers import ROOT, reject, start

import example
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.utils import terminal

PACKAGE = ROOT / "nanovllm"
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^python3 -m venv .*$", README, flags=re.MULTILINE)


def find_code(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    done = start(ROOT / "example.py", cwd=tmp_path_factory.mktemp("example"))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_first_command_is_the_example(printed):
    assert COMMANDS[0].endswith("python example.py")
    for pattern in (
        "2, 3, 5, 7, 11",
        r"\b85\b",
        "t-e-n-a-l-p",
        r"[1-9]\d* of \d+ prompt tokens from the prefix cache",
        "num_decode_tokens",
        "block 14: not cached",
        "block 14: cached",
        "timeline.html",
    ):
        assert re.search(pattern, printed), pattern


def test_readme_shows_what_is_printed(printed):
    (console,) = find_code("console")
    command, _, shown = console.partition("\n")
    assert command.startswith("$ python example.py")
    assert shown in printed


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--max-tokens", "0"], "max_tokens must be at least 1"),
        (["--max-tokens", "x"], "--max-tokens"),
        (["--model", "./nothing"], "directory"),
        (["--model", "example.py"], "directory"),
    ],
)
def test_example_names_invalid_options(arguments, complaint, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["example.py", *arguments])
    assert complaint in reject(capsys, example.main)


@pytest.mark.parametrize("path", ["example.py", "bench.py", "nanovllm/trace/__main__.py"])
def test_programs_end_if_their_reader_stops(path, monkeypatch):
    """run_program sees to that. test_trace.py starts one of them with a closed pipe."""
    started = []
    monkeypatch.setattr(terminal, "run_program", started.append)
    program = runpy.run_path(str(ROOT / path), run_name="__main__")
    assert started == [program["main"]]


def test_second_command_is_what_ci_runs():
    assert COMMANDS[1].endswith("python -m pytest -n 2")
    assert "pip install -q -e '.[test]'" in COMMANDS[1]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_readme_code_runs(capsys):
    code, structured, with_ray = find_code("python")
    names = {}
    exec(code, names)
    assert "42" in capsys.readouterr().out
    exec(structured, names)
    assert capsys.readouterr().out.strip() == structured.split("# ")[1].strip()
    assert with_ray.startswith("import ray\n")  # test_ray.py runs it


def test_readme_quotes_the_step():
    (quoted,) = find_code("py")
    assert textwrap.indent(quoted, " " * 12) in inspect.getsource(LLMEngine.step)


def test_the_tour_names_every_module_once():
    """A row names modules or folders. The row of step names a module for a second time."""
    tour = README[README.index("## Reading in one evening") : README.index("## Glossary")]
    _, *cells = re.findall(r"^\| (`.*?) \|", tour, flags=re.MULTILINE)
    column = "\n".join(cells)
    named = re.findall(r"`(\S+\.py)`", column)
    folders = re.findall(r"`(\w+/)`", column)
    assert len(set(named)) == len(named)
    for path in PACKAGE.rglob("*.py"):
        module = str(path.relative_to(PACKAGE))
        if module in named:
            named.remove(module)
        elif path.name != "__init__.py":
            assert module.startswith(("demo_model", *folders)), module
    assert named == []


def test_readmes_pictures_are_there():
    pictures = re.findall(r"\]\((\.github/[^)]+)\)", README)
    assert pictures
    for picture in pictures:
        assert (ROOT / picture).exists()
