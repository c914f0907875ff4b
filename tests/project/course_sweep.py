"""Takes the functions of one evening away, one at a time: does a test of the evening fail?

    python tests/project/course_sweep.py 3

Each run is a fork of this process, so that no run leaves anything to another one, and torch and the
tests are imported once. It prints the functions whose absence no test notices.
"""

import os
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CUDA does not survive a fork

from evenings import EVENINGS


class Watcher:
    """Remembers whether the error of an empty function made a test fail."""

    def __init__(self, message: str) -> None:
        self.message = message
        self.has_failed = False

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed and self.message in report.longreprtext:
            self.has_failed = True


def take_away(name: str, message: str) -> None:
    """Let a function raise NotImplementedError, wherever it has been imported already."""
    function = resolve_name(name)
    function = getattr(function, "__func__", function)  # of a class method
    namespace = {}
    exec(f"def empty(*_, **__):\n    raise NotImplementedError({message!r})", namespace)
    function.__code__ = namespace["empty"].__code__


def is_noticed(tests: tuple[str, ...], name: str) -> bool:
    """Run the tests in a fork. Return whether one fails because of the empty function."""
    process = os.fork()
    if process == 0:
        watcher = Watcher(f"{name} is empty")
        take_away(name, watcher.message)
        options = ["-x", "-p", "no:cacheprovider", "--no-header", "--no-summary"]
        pytest.main([*tests, *options], plugins=[watcher])
        os._exit(0 if watcher.has_failed else 1)
    return os.waitpid(process, 0)[1] == 0


def main(number: int) -> int:
    os.chdir(ROOT)
    evening = EVENINGS[number - 1]
    if pytest.main([*evening.tests, "--collect-only", "-qq"]) != pytest.ExitCode.OK:
        return 1
    unnoticed = [name for name in evening.functions if not is_noticed(evening.tests, name)]
    print("\nunnoticed:", *unnoticed, sep="\n")
    return len(unnoticed)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
