"""Rebuild the engine in eight evenings.

    python tests/course.py start 3 ../my-nanovllm     a copy in which the functions of evening 3 are
                                                      empty; 1-8 empties those of all evenings
    python tests/course.py check 3 [FUNCTION ...]     in the copy: which functions are still empty,
                                                      and the tests of the evening. With functions:
                                                      all others are the reference
    python tests/course.py compare 3 [FUNCTION ...]   in the copy: the reference and your functions

evenings.py lists the functions and tests of each evening. nanovllm/course/ has its text.
"""

import argparse
import ast
import difflib
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from evenings import EVENINGS, Evening

ROOT = Path(__file__).parents[1]
REFERENCE = "reference"  # the tag of the commit from which a copy was made
PYTHON = shlex.quote(sys.executable)


class CourseError(Exception):
    """What prevents a command, for its user."""


# --- Functions in a source


def find_path(name: str) -> str:
    """Return the file of a function `module:qualified name`, relative to the project."""
    return name.partition(":")[0].replace(".", "/") + ".py"


def find_node(source: str | ast.Module, name: str) -> ast.FunctionDef | ast.ClassDef:
    """Find a function or a class in the source of its file."""
    path = find_path(name)
    qualified_name = name.partition(":")[2]
    node: ast.AST = ast.parse(source, path) if isinstance(source, str) else source
    for part in qualified_name.split("."):
        for each in ast.iter_child_nodes(node):
            if isinstance(each, (ast.FunctionDef, ast.ClassDef)) and each.name == part:
                node = each
                break
        else:
            raise CourseError(
                f"{path} has no {qualified_name}: restore it, or correct tests/evenings.py"
            )
    return node


def find_body(source: str, node: ast.FunctionDef) -> slice:
    """Return the lines after the signature and the docstring, also if they begin with comments."""
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        return slice(first.end_lineno, node.end_lineno)
    lines = source.splitlines()
    start = first.lineno - 1
    while lines[start - 1].strip() == "" or lines[start - 1].lstrip().startswith("#"):
        start -= 1
    return slice(start, node.end_lineno)


def empty(source: str, name: str, number: int) -> str:
    """Replace the body of a function. The signature, decorators and docstring stay."""
    node = find_node(source, name)
    message = f"evening {number}: {name.partition(':')[2]}"
    indentation = " " * (node.col_offset + 4)
    lines = source.splitlines(keepends=True)
    lines[find_body(source, node)] = [f'{indentation}raise NotImplementedError("{message}")\n']
    return "".join(lines)


def cut_function(source: str, name: str) -> list[str]:
    """Return the lines of a function, with its decorators."""
    node = find_node(source, name)
    start = min([node.lineno, *[decorator.lineno for decorator in node.decorator_list]])
    return source.splitlines()[start - 1 : node.end_lineno]


def empty_functions(root: Path, evening: Evening) -> None:
    """Empty all functions of an evening in the project at `root`."""
    for name in evening.functions:
        path = root / find_path(name)
        path.write_text(empty(path.read_text(), name, evening.number))


# --- The commands


def run_git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise CourseError("git is not installed: install it, and start again") from None
    if done.returncode != 0:
        raise CourseError(f"git {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout


def require_checkout() -> None:
    if not (ROOT / ".git").exists():
        raise CourseError(f"{ROOT} is not a git checkout: clone the project with git first")


def read_reference(name: str) -> str:
    """Return the source of the file of a function, as it was when the copy was made."""
    require_checkout()
    if REFERENCE not in run_git(ROOT, "tag").split():
        raise CourseError(f"{ROOT} has no reference: run this in a copy that start has made")
    return run_git(ROOT, "show", f"{REFERENCE}:{find_path(name)}")


def find_names(evenings: list[Evening], chosen: list[str]) -> list[str]:
    """Return the functions of evenings, or those with the names in `chosen`."""
    names = [name for evening in evenings for name in evening.functions]
    found: list[str] = []
    for each in chosen:
        matches = [
            name
            for name in names
            if re.split("[:.]", name)[-each.count(".") - 1 :] == each.split(".")
        ]
        if not matches:
            own = [name.rpartition(":")[2] for name in names]
            known = dict.fromkeys([*own, *[name.rpartition(".")[2] for name in own]])
            close = difflib.get_close_matches(each, known) or own
            raise CourseError(f"{each} is no function of this evening. Try {', '.join(close)}")
        found += matches
    return found or names


def start(evenings: list[Evening], directory: Path) -> int:
    """Make a copy without the functions of the evenings, and print what to do."""
    require_checkout()
    if directory.exists():
        raise CourseError(f"{directory} exists: choose a directory that does not exist yet")
    copy = directory.resolve()
    if copy.is_relative_to(ROOT.resolve()):
        raise CourseError(f"{directory} is within {ROOT}: choose one outside of the project")
    is_changed = run_git(ROOT, "status", "--porcelain") != ""
    run_git(ROOT, "clone", "--quiet", str(ROOT), str(copy))
    if REFERENCE not in run_git(copy, "tag").split():  # a copy of a copy keeps the first reference
        run_git(copy, "tag", REFERENCE)
    for evening in evenings:
        empty_functions(copy, evening)
    numbers = ", ".join(str(evening.number) for evening in evenings)
    author = ("-c", "user.name=nanovllm course", "-c", "user.email=course@localhost")
    options = ("--quiet", "--all", "--allow-empty", "--no-verify", "--no-gpg-sign")
    run_git(copy, *author, "commit", *options, "-m", f"Empty the functions of evening {numbers}")
    for evening in evenings:
        print(describe(evening), end="\n\n")
    print(f"The copy is {directory}. It is a git repository: commit what you write.")
    if is_changed:
        print(f"It has the last commit. The uncommitted changes of {ROOT} are not in it.")
    return 0


def describe(evening: Evening) -> str:
    """Say what an evening asks for, in the order in which to do it."""
    number = evening.number
    files: dict[str, list[str]] = {}
    for name in evening.functions:
        files.setdefault(find_path(name), []).append(name.partition(":")[2])
    lines = [
        f"Evening {number}: {evening.title}",
        f"  page      {evening.page}",
        f"  predict   {evening.scene}",
        f"  read      {', '.join(evening.reading)}",
        f"  write     {len(evening.functions)} functions:",
    ]
    for path, names in files.items():
        lines += [f"            {path}", *[f"                {name}" for name in names]]
    lines += [
        f"  test      {PYTHON} tests/course.py check {number}      (in the copy)",
        f"  compare   {PYTHON} tests/course.py compare {number}    (in the copy)",
        f"  exercise  {evening.exercise} of nanovllm/README.md",
    ]
    return "\n".join(lines)


def check(evenings: list[Evening], chosen: list[str]) -> int:
    """Name the functions that are still empty, and run the tests of the evening.

    With functions, all others are the reference, and only tests that need one of these run.
    """
    names = find_names(evenings, chosen)
    references: dict[str, str] = {}
    empties: dict[str, str] = {}
    for evening in evenings:
        for name in evening.functions:
            source = (ROOT / find_path(name)).read_text()
            emptied = empty(source, name, evening.number)
            if name not in names:
                references[name] = read_reference(name)
                continue
            if chosen:
                empties[name] = emptied
            if source == emptied:
                print(f"still empty: {name}")
    tests = dict.fromkeys([test for evening in evenings for test in evening.tests])
    print("+", shlex.join(["python", "-m", "pytest", "-q", "--tb=short", *tests]), flush=True)
    # The package of this folder is imported, also by processes that tests start elsewhere.
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    )
    import bodies  # only here, because it needs pytest

    choices = ROOT / ".git" / "nanovllm-course.json"
    findings = bodies.check(list(tests), names, references, empties, choices)
    subject = f"that need {', '.join(chosen)}" if chosen else "of the evening"
    num_passed = findings.num_tests - len(findings.failed)
    print(f"{num_passed} of {findings.num_tests} tests {subject} pass")
    return 0 if num_passed == findings.num_tests > 0 else 1


def compare(evenings: list[Evening], chosen: list[str]) -> int:
    """Show what distinguishes your functions from the reference, - and +."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends quietly if its reader stops, as head does
    names = find_names(evenings, chosen)
    for name in names:
        reference = cut_function(read_reference(name), name)
        own = cut_function((ROOT / find_path(name)).read_text(), name)
        if own == reference:
            print(f"identical: {name}")
            continue
        num_lines = len(reference) + len(own)
        lines = difflib.unified_diff(reference, own, "reference", "yours", n=num_lines, lineterm="")
        print(f"\n{name}", *lines, "", sep="\n")
    return 0


def parse_numbers(text: str) -> list[Evening]:
    """Parse 3, or a range such as 1-8."""
    first, _, last = text.partition("-")
    numbers = [evening.number for evening in EVENINGS]
    try:
        chosen = range(int(first), int(last or first) + 1)
    except ValueError:
        chosen = range(0)
    if not chosen or not set(chosen) <= set(numbers):
        raise argparse.ArgumentTypeError(
            f"{text} is no evening: give one of {numbers[0]} to {numbers[-1]}, or a range like 1-2"
        )
    return [evening for evening in EVENINGS if evening.number in chosen]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, function in (("start", start), ("check", check), ("compare", compare)):
        command = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        command.add_argument("evenings", type=parse_numbers, help="3, or a range such as 1-8")
    commands.choices["start"].add_argument("directory", type=Path, help="where to make the copy")
    for name in ("check", "compare"):
        commands.choices[name].add_argument(
            "functions", nargs="*", help="only these, such as Scheduler.plan or plan"
        )
    arguments = parser.parse_args()
    try:
        if arguments.command == "start":
            return start(arguments.evenings, arguments.directory)
        if arguments.command == "check":
            return check(arguments.evenings, arguments.functions)
        return compare(arguments.evenings, arguments.functions)
    except SyntaxError as error:
        parser.error(f"{error.filename}, line {error.lineno}: {error.msg}: correct it")
    except CourseError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
