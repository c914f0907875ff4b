"""The course is made from the code: its names exist, and its tests notice wrong bodies.

With -m sweep, the functions of each evening get other bodies, see course_sweep.py.
"""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import course
import pytest
from course import CourseError
from evenings import EVENINGS
from project_helpers import ROOT, start

EACH_EVENING = pytest.mark.parametrize("evening", EVENINGS, ids=lambda each: str(each.number))


def read(name):
    return (ROOT / course.find_path(name)).read_text()


@EACH_EVENING
def test_what_an_evening_names_exists(evening):
    assert EVENINGS[evening.number - 1] is evening
    first_line = (ROOT / evening.page).read_text().partition("\n")[0]
    assert first_line == f"# Evening {evening.number}: {evening.title}"
    guide = (ROOT / "nanovllm/README.md").read_text().partition(" exercises\n")[2]
    assert re.search(rf"^{evening.exercise}\. \*\*", guide, flags=re.MULTILINE)
    for name in evening.reading:
        if name.endswith(".py"):
            assert (ROOT / name).exists()
        else:
            course.find_node(read(name), name)  # raises CourseError
    for test in evening.tests:
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text() or not name


@pytest.mark.parametrize("name", ["Scheduler.plann", "Schedule.plan", "Scheduler.plan.seq"])
def test_a_wrong_name_is_named(name):
    function = f"nanovllm.engine.scheduler:{name}"
    with pytest.raises(CourseError, match=rf"engine/scheduler\.py has no {name}"):
        course.empty(read(function), function, 2)


# --- Empty functions

SOURCE = '''\
class Pool:
    @classmethod
    def make(
        cls, size: int = 3
    ) -> "Pool":
        # Comments go with the body.

        if size:  # as does this one
            return cls()
        return None

    @property
    def size(self):
        """Keep the docstring.

        All of it.
        """
        return 1

    def last(self): return 2
'''
EMPTY = '''\
class Pool:
    @classmethod
    def make(
        cls, size: int = 3
    ) -> "Pool":
        raise NotImplementedError("evening 3: Pool.make")

    @property
    def size(self):
        """Keep the docstring.

        All of it.
        """
        raise NotImplementedError("evening 3: Pool.size")

    def last(self): return 2
'''


def test_only_the_body_is_replaced():
    source = SOURCE
    for _ in range(2):  # an empty function stays as it is
        for name in ("pool:Pool.make", "pool:Pool.size"):
            source = course.empty(source, name, 3)
        assert source == EMPTY


IMPORT_ALL = """
import importlib, os, pkgutil
import nanovllm

assert nanovllm.__file__.startswith(os.getcwd())
for module in pkgutil.walk_packages(nanovllm.__path__, "nanovllm."):
    if "__main__" not in module.name and "demo_model" not in module.name:  # programs
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:  # an optional package
            if error.name.startswith("nanovllm"):
                raise
"""


def test_emptied_copies_can_be_imported(tmp_path):
    """If all functions are empty at once, none of them is called by an import.

    The copies of single evenings can therefore be imported, too.
    """
    ignored = shutil.ignore_patterns("__pycache__", "*.html", "*.safetensors")
    shutil.copytree(ROOT / "nanovllm", tmp_path / "nanovllm", ignore=ignored)
    for evening in EVENINGS:
        course.empty_functions(tmp_path, evening)
    done = start("-c", IMPORT_ALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


# --- The commands

PAIR = '''\
def add(a, b):
    """Return the sum."""
    # Numbers, or texts.
    return a + b


def double(a):
    return add(a, a)
'''
TEST_OF_PAIR = """\
from nanovllm import pair


def test_add():
    assert pair.add(4, 5) == 9


def test_double():
    assert pair.double(4) == 8
"""


def git(folder, *arguments):
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.fixture
def project(tmp_path):
    """A project with the tool, one evening of two functions, and their test."""
    folder = tmp_path / "project"
    (folder / "nanovllm").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / ".gitignore").write_text("__pycache__\n.pytest_cache\n")
    (folder / "nanovllm/__init__.py").write_text("")
    (folder / "nanovllm/pair.py").write_text(PAIR)
    (folder / "tests/test_pair.py").write_text(TEST_OF_PAIR)
    evening = replace(
        EVENINGS[0],
        functions=("nanovllm.pair:add", "nanovllm.pair:double"),
        tests=("tests/test_pair.py",),
    )
    for name in ("course.py", "bodies.py"):
        shutil.copy(ROOT / "tests" / name, folder / "tests")
    text = (ROOT / "tests/evenings.py").read_text()
    (folder / "tests/evenings.py").write_text(f"{text}\nEVENINGS = ({evening},)\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "All")
    return folder


def run(folder, *arguments):
    done = start("tests/course.py", *arguments, cwd=folder)
    return done.returncode, done.stdout + done.stderr


def test_an_evening_from_start_to_end(project, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # git has no user there
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    status, printed = run(project, "start", "1", "../own")
    assert status == 0, printed
    own = tmp_path / "own"
    assert git(own, "log", "--format=%s").splitlines() == [
        "Empty the functions of evening 1",
        "All",
    ]
    assert git(own, "show", "reference:nanovllm/pair.py") == PAIR
    for shown in (EVENINGS[0].page, EVENINGS[0].scene, "check 1", "compare 1"):
        assert shown in printed
    assert "uncommitted" not in printed

    status, printed = run(own, "check", "1")
    assert status == 1
    assert re.findall("still empty: (.*)", printed) == ["nanovllm.pair:add", "nanovllm.pair:double"]
    assert "evening 1: double is empty" in printed
    assert "0 of 2 tests of the evening pass" in printed

    # `add` is that of the reference.
    path = own / "nanovllm/pair.py"
    path.write_text(
        path.read_text().replace('raise NotImplementedError("evening 1: double")', "return [][a]")
    )
    status, printed = run(own, "check", "1", "double")
    assert status == 1
    assert "your function that is nearest to the error" in printed
    assert "0 of 1 tests that need double pass" in printed

    path.write_text(PAIR.replace("add(a, a)", "3 * a"))
    printed = run(own, "check", "1")[1]
    assert re.search("your functions that this test has called -*\ndouble", printed)

    path.write_text(PAIR.replace("add(a, a)", "2 * a"))
    for _ in range(2):  # the second time with the tests that are known
        assert "2 of 2 tests that need add pass" in run(own, "check", "1", "add")[1]
    status, printed = run(own, "check", "1")
    assert status == 0, printed
    assert "2 of 2 tests of the evening pass" in printed
    assert "still empty" not in printed
    status, printed = run(own, "compare", "1")
    assert status == 0
    assert "identical: nanovllm.pair:add" in printed
    assert "-    return add(a, a)\n+    return 2 * a" in printed
    assert "nanovllm.pair:double" not in run(own, "compare", "1", "add")[1]
    assert "2 * b is no function of this evening. Try add, d" in run(own, "check", "1", "2 * b")[1]
    assert (
        "doubled is no function of this evening. Try double\n"
        in run(own, "check", "1", "doubled")[1]
    )

    path.write_text("def add(a, b)\n")
    for command in ("check", "compare"):
        status, printed = run(own, command, "1")
        assert status == 2
        assert "nanovllm/pair.py, line 1: expected ':': correct it" in printed


SQUARE = """\
class Shape:
    def area(self, side=2):
        return side * side


class Square(Shape):
    def area(self, side=3):
        return side
"""
TRY_SUPER = f"""
import bodies, square

source = {SQUARE!r}.replace("return side\\n", "return 1 + super().area(side)\\n")
for text, expected in ((source, 10), ({SQUARE!r}, 3), (source, 10)):
    bodies.set_body("square:Square.area", text)
    assert square.Square().area() == expected
bodies.watch("square:Square.area")
assert square.Square().area() == 10
assert bodies.CALLED
"""


def test_a_body_can_call_super(tmp_path):
    (tmp_path / "square.py").write_text(SQUARE)
    shutil.copy(ROOT / "tests/bodies.py", tmp_path)
    done = start("-c", TRY_SUPER, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_compare_ends_if_its_reader_stops(project):
    git(project, "tag", "reference")
    command = f"{course.PYTHON} tests/course.py compare 1 | true"
    done = subprocess.run(command, shell=True, cwd=project, stderr=subprocess.PIPE)
    assert done.stderr == b""


def test_what_start_cannot_copy_is_named(project, tmp_path):
    assert "exists: choose a directory" in run(project, "start", "1", "../project")[1]
    for inside in ("pair/own", "../project/own"):
        assert f"{inside} is within {project}: choose one" in run(project, "start", "1", inside)[1]
    assert "0 is no evening" in run(project, "start", "0", "../own")[1]
    assert "1-2 is no evening" in run(project, "start", "1-2", "../own")[1]
    assert "has no reference: run this in a copy" in run(project, "compare", "1")[1]
    (project / "new.txt").touch()
    status, printed = run(project, "start", "1-1", "../own")
    assert status == 0
    assert f"The uncommitted changes of {project} are not in it" in printed
    shutil.rmtree(project / ".git")
    status, printed = run(project, "start", "1", "../other")
    assert status == 2
    assert f"{project} is not a git checkout: clone the project" in printed


@pytest.mark.sweep
@EACH_EVENING
def test_wrong_bodies_are_noticed(evening):
    done = start(Path(__file__).with_name("course_sweep.py"), str(evening.number))
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
