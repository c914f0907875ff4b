"""The READMEs' commands, code and links work, and their quotations match the package."""

import ast
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
from nanovllm.utils import helpers

PACKAGE = ROOT / "nanovllm"
READMES = [ROOT / "README.md", ROOT / ".ci/gpu/README.md", *sorted(PACKAGE.rglob("*.md"))]
README = READMES[0].read_text()
COMMANDS = re.findall(r"^python3 -m venv .*$", README, flags=re.MULTILINE)


def find_code(language, text=README):
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def read(folder):
    return (PACKAGE / folder / "README.md").read_text()


def run(tmp_path, *command):
    done = start(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_first_command_is_the_example(tmp_path):
    assert COMMANDS[0].endswith("python example.py")
    printed = run(tmp_path, ROOT / "example.py")
    for pattern in (
        "2, 3, 5, 7, 11",
        r"\b85\b",
        "t-e-n-a-l-p",
        r"[1-9]\d* of \d+ prompt tokens from the prefix cache",
        "num_decode_tokens",
    ):
        assert re.search(pattern, printed), pattern
    assert not list(tmp_path.iterdir())


def test_readme_shows_what_is_printed(tmp_path):
    (console,) = find_code("console", read("trace"))
    command, _, shown = console.partition("\n")
    assert command.startswith("$ python -m nanovllm.trace.tour")
    printed = run(tmp_path, "-m", "nanovllm.trace.tour")
    assert shown in printed
    for pattern in (r"not cached   \[14, 15\]", r"not cached   \[15\]"):
        assert re.search(pattern, printed), pattern
    assert (tmp_path / "timeline.html").exists()


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--max-tokens", "0"], "max_tokens must be at least 1"),
        (["--max-tokens", "x"], "--max-tokens"),
        (["--model", "./nothing"], "directory"),
    ],
)
def test_example_names_invalid_options(arguments, complaint, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["example.py", *arguments])
    assert complaint in reject(capsys, example.main)


@pytest.mark.parametrize("path", ["example.py", "bench.py", "nanovllm/trace/__main__.py"])
def test_programs_end_if_their_reader_stops(path, monkeypatch):
    """run_program sees to that. test_trace.py starts one of them with a closed pipe."""
    started = []
    monkeypatch.setattr(helpers, "run_program", started.append)
    program = runpy.run_path(str(ROOT / path), run_name="__main__")
    assert started == [program["main"]]


def test_second_command_is_what_ci_runs():
    assert COMMANDS[1].endswith("python -m pytest -n 2")
    assert "pip install -q -e '.[test]'" in COMMANDS[1]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_readme_code_runs(capsys):
    names = {}
    (code,) = find_code("python")
    exec(code, names)
    assert "42" in capsys.readouterr().out
    structured, *_ = find_code("python", read("features"))
    exec(structured, names)
    assert capsys.readouterr().out.strip() == structured.split("# ")[1].strip()


def test_an_engine_as_a_part_runs(capsys):
    (code,) = re.findall(r"```py\n(.*?)```", (PACKAGE / "features/as_a_part.md").read_text(), re.S)
    exec(code, {})
    assert "12 + 30 = 42." in capsys.readouterr().out


def test_readmes_quote_the_package():
    (step,) = find_code("py")
    assert textwrap.indent(step, " " * 12) in inspect.getsource(LLMEngine.step)
    (family,) = find_code("py", read("models"))
    assert family in (PACKAGE / "models/architectures.py").read_text()


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith("http"):
            continue
        name, _, heading = target.partition("#")
        found = path.parent / name if name else path
        assert found.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", found.read_text(), flags=re.MULTILINE)
            links = [re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings]
            assert heading in links, target


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(path):
    """Names are relative to the package, or to the folder of the README, tests/ or the project.

    The last section of an evening names files of vLLM.
    """
    roots = [PACKAGE, path.parent, ROOT, ROOT / "tests"]
    own, _, _ = path.read_text().partition("## Names elsewhere")
    for name in re.findall(r"`([\w./]+(?:\.py|/))[`, ]", own):
        assert any((root / name).exists() for root in roots), name


def show_help(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    with pytest.raises(SystemExit) as end:
        if program.startswith("-m "):
            runpy.run_module(program.removeprefix("-m "), run_name="__main__")
        else:
            runpy.run_path(str(ROOT / program), run_name="__main__")
    assert not end.value.code
    return capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")
def test_programs_take_the_options_that_readmes_show(monkeypatch, capsys):
    """Each `python -m` and each program with options is asked for --help."""
    text = "\n".join(path.read_text() for path in READMES)
    commands = re.findall(
        r"python (-m nanovllm[\w.]+|bench\.py|example\.py)((?: [^`\n|>]*)?)", text
    )
    assert len(commands) > 8
    helps = {}
    for program, rest in commands:
        if program not in helps:
            helps[program] = show_help(program, monkeypatch, capsys)
        for option in re.findall(r"--[a-z][\w-]*", rest):
            assert option in helps[program], (program, option)


@pytest.mark.parametrize("room", [path.parent for path in PACKAGE.rglob("__init__.py")], ids=str)
def test_a_door_sign_names_every_file_of_its_room(room):
    sign = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    if room != PACKAGE and room.name != "demo_model":
        for path in room.glob("*.py"):
            assert path.name in sign or path.name == "__init__.py", path.name
