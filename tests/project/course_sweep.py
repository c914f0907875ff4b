"""Gives the functions of one evening other bodies, one at a time: does a test of the evening fail?

    python tests/project/course_sweep.py 3        no body, the bodies of wrong_bodies.diff, and
                                                  some changes: of a comparison, a number, a
                                                  statement
    python tests/project/course_sweep.py 3 all    all changes, which takes up to an hour

It prints which test fails first, the wrong bodies that no test notices, and the right bodies of
wrong_bodies.diff that a test does.
"""

import ast
import os
import random
import sys
from collections.abc import Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
NUM_CHANGES = 6  # of an evening, unless all are asked for
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from bodies import Forks, run_forks, set_body
from course import cut_function, empty, find_node, find_path
from evenings import EVENINGS, Evening
from harmless_changes import HARMLESS


class Body(NamedTuple):
    """Another body of a function."""

    name: str  # of the function
    label: str
    source: str  # of the whole file
    is_right: bool = False  # no test may notice it


def read(name: str) -> str:
    return (ROOT / find_path(name)).read_text()


def shorten(name: str) -> str:
    return name.partition(":")[2]


def make_empty(evening: Evening) -> Iterator[Body]:
    for name in evening.functions:
        yield Body(name, f"{shorten(name)}: empty", empty(read(name), name, evening.number))


def make_listed(evening: Evening) -> Iterator[Body]:
    """The bodies of wrong_bodies.diff, which explains its format."""
    text = Path(__file__).with_name("wrong_bodies.diff").read_text()
    for section in text.split("\n=== ")[1:]:
        header, *entries = section.split("\n\n# ")
        number, name = header.split()
        if int(number) != evening.number:
            continue
        source = read(name)
        function = "\n" + "\n".join(cut_function(source, name)) + "\n"
        for entry in entries:
            title, *lines = entry.splitlines()
            changed = function
            for block in reversed("\n".join(lines).split("\n@@\n")):  # the last one first
                old = keep_lines(block, " -")
                assert function.count(old) == 1, (name, title, old)
                start = function.index(old)
                end = start + len(old)
                changed = changed[:start] + keep_lines(block, " +") + changed[end:]
            label = f"{shorten(name)}: {title}"
            is_right = title.startswith("Right: ")
            yield Body(name, label, source.replace(function, changed), is_right)


def keep_lines(block: str, marks: str) -> str:
    """Return the lines that begin with one of `marks`, without it."""
    return "\n".join(["", *[line[1:] for line in block.splitlines() if line[:1] in marks], ""])


PAIRS = (
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.Add, ast.Sub),
    (ast.And, ast.Or),
)
OTHERS = dict(PAIRS) | {second: first for first, second in PAIRS}


def change_node(node: ast.AST) -> Iterator[None]:
    """Change a node in place, in each way. It is as before when the next way is asked for."""
    match node:
        case ast.Compare():
            for index, operator in enumerate(node.ops):
                node.ops[index] = OTHERS[type(operator)]()
                yield
                node.ops[index] = operator
        case ast.BoolOp() | ast.BinOp() | ast.AugAssign() if type(node.op) in OTHERS:
            operator = node.op
            node.op = OTHERS[type(operator)]()
            yield
            node.op = operator
        case ast.UnaryOp(op=ast.Not()):
            operand = node.operand
            node.operand = ast.UnaryOp(ast.Not(), operand)
            yield
            node.operand = operand
        case ast.Constant() if isinstance(node.value, (bool, int)):
            value = node.value
            node.value = not value if isinstance(value, bool) else value + 1
            yield
            node.value = value
        case ast.Name(id="min" | "max"):
            name = node.id
            node.id = "max" if name == "min" else "min"
            yield
            node.id = name
    for field in ("body", "orelse"):
        statements = getattr(node, field, None)
        for index, statement in enumerate(statements if isinstance(statements, list) else ()):
            if is_dropped(statement):
                statements[index] = ast.Pass()
                yield
                statements[index] = statement


def is_dropped(statement: ast.stmt) -> bool:
    """Return whether a statement can be left out, without a name that is missing then."""
    match statement:
        case ast.Expr(value=ast.Constant()):  # a docstring
            return False
        case ast.Assign(targets=[target]):
            return not isinstance(target, (ast.Name, ast.Tuple))
    return isinstance(
        statement,
        (
            ast.Expr,
            ast.AugAssign,
            ast.Delete,
            ast.Break,
            ast.Continue,
            ast.If,
            ast.For,
            ast.While,
            ast.Return,
        ),
    )


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a body that are worth a change."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.Assert, ast.JoinedStr, ast.arguments, ast.Raise)):
            yield from walk(child)


def make_changes(evening: Evening) -> Iterator[Body]:
    for name in evening.functions:
        source = read(name)
        tree = ast.parse(source)
        node = find_node(tree, name)
        before = ast.unparse(node).splitlines()
        for inner in walk(node):
            for _ in change_node(inner):
                after = ast.unparse(node).splitlines()
                label = f"{shorten(name)}: {describe(before, after)}"
                yield Body(name, label, ast.unparse(tree))


def describe(before: list[str], after: list[str]) -> str:
    """Show the first line that differs, from a little before the difference on."""
    old, new = next((old, new) for old, new in zip(before, after) if old != new)
    num_equal = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(old, new))))
    start = old.rfind(" ", 0, max(0, num_equal - 16)) + 1
    return f"{old[start : num_equal + 26].strip()} -> {new[start : num_equal + 26].strip()}"


def sweep(bodies: list[Body], forks: Forks) -> list[str]:
    """Run the tests that call a function with each of its bodies.

    Return the wrong bodies that no test notices, and the right ones that a test does.
    """
    callers = forks.find_callers(list(dict.fromkeys([body.name for body in bodies])))
    mistaken: list[str] = []
    for name, label, source, is_right in bodies:
        tests = callers[name]
        # A loop that does not end is noticed, too.
        time_limit = 20 + 3 * int(sum(tests.values()))
        failed = forks.run(list(tests), partial(set_body, name, source), time_limit)
        outcome = "no end" if failed is None else failed[0] if failed else "no test"
        print(f"{label} | {outcome}", flush=True)
        if (failed == []) != is_right:
            mistaken.append(label)
    return mistaken


def main(number: str, amount: str = "") -> int:
    os.chdir(ROOT)
    evening = EVENINGS[int(number) - 1]
    harmless = {label for labels in HARMLESS.values() for label in labels}
    changes = [change for change in make_changes(evening) if change.label not in harmless]
    if amount == "all":
        bodies = changes
    else:
        chosen = random.Random(evening.number).sample(changes, NUM_CHANGES)
        bodies = [*make_empty(evening), *make_listed(evening), *chosen]
    mistaken: list[str] = []
    run_forks(evening.tests, lambda forks: mistaken.extend(sweep(bodies, forks)))
    print(f"\nmistaken, {len(mistaken)} of {len(bodies)}:", *mistaken, sep="\n")
    return len(mistaken)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
