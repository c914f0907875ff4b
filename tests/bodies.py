"""Runs tests with other bodies of functions, each in a fork of this process.

A body comes from another source of the function's file: the reference, or a mutation. Modules and
tests are imported once, and no run leaves anything to another one.
"""

import json
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pkgutil import resolve_name
from types import CodeType, FunctionType
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CUDA does not survive a fork

import pytest
from course import find_path
from hypothesis import Phase, settings

MEMORY_LIMIT = 8 << 30  # bytes of a fork, whose loop may never end


def find_function(name: str) -> FunctionType:
    """Return a function `module:qualified name`, also that of a class method."""
    function = resolve_name(name)
    return getattr(function, "__func__", function)


def set_body(name: str, source: str) -> None:
    """Give a function the body that it has in `source`, wherever it has been imported already."""
    code = compile(source, find_path(name), "exec")
    for part in name.partition(":")[2].split("."):
        inner = [each for each in code.co_consts if isinstance(each, CodeType)]
        code = next(each for each in inner if each.co_name == part)
    find_function(name).__code__ = code


ORIGINALS: dict[str, FunctionType] = {}  # the functions that are watched
CALLED: set[str] = set()


def watch(name: str) -> None:
    """Let a function note that it was called."""
    function = find_function(name)
    ORIGINALS[name] = FunctionType(function.__code__, function.__globals__, name)
    ORIGINALS[name].__defaults__ = function.__defaults__
    ORIGINALS[name].__kwdefaults__ = function.__kwdefaults__
    source = f"""
def watched(*args, **options):
    import bodies
    bodies.CALLED.add({name!r})
    return bodies.ORIGINALS[{name!r}](*args, **options)
"""
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    function.__code__ = namespace["watched"].__code__


def fork(work: Callable[[], Any], time_limit: int) -> Any:
    """Call `work` in a fork. Return its result, or None after `time_limit` seconds or a crash."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        signal.alarm(time_limit)  # ends the fork
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
        try:
            with os.fdopen(write, "w") as pipe:
                json.dump(work(), pipe)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        result = pipe.read()
    os.waitpid(process, 0)
    return json.loads(result) if result else None


class Forks:
    """A pytest plugin that calls `work` with itself in place of running the tests."""

    def __init__(self, work: Callable[["Forks"], None]) -> None:
        self.work = work
        self.failed: list[str] = []  # in a fork

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self.plugins = session.config.pluginmanager
        self.work(self)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def run(self, tests: list[str], prepare: Callable[[], None], time_limit: int = 600) -> Any:
        """Run tests in a fork, after `prepare`, up to the first that fails.

        Return the failed ones, or None if the fork has not ended well.
        """

        def work() -> list[str]:
            prepare()
            for _ in self.run_here(tests):
                if self.failed:
                    break
            return self.failed

        return fork(work, time_limit)

    def run_here(self, tests: list[str]) -> Iterator[str]:
        """Run tests one by one, without a report on the terminal."""
        self.plugins.unregister(name="terminalreporter")
        items = [self.items[test] for test in tests]
        for item, following in zip(items, [*items[1:], None]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            yield item.nodeid

    def find_callers(self, names: Sequence[str]) -> dict[str, dict[str, float]]:
        """Return the tests that call each of the functions `names`, with their seconds.

        The fastest come first.
        """

        def work() -> tuple[dict[str, dict[str, float]], list[str]]:
            for name in names:
                watch(name)
            callers: dict[str, dict[str, float]] = {name: {} for name in names}
            start = time.perf_counter()
            for test in self.run_here(list(self.items)):
                end = time.perf_counter()
                for name in CALLED:
                    callers[name][test] = end - start
                CALLED.clear()
                start = end
            return callers, self.failed

        callers, failed = fork(work, time_limit=3600)
        assert not failed, failed
        return {name: dict(sorted(callers[name].items(), key=itemgetter(1))) for name in names}


def run_forks(tests: Sequence[str], work: Callable[[Forks], None]) -> int:
    """Collect tests, and let `work` run them."""
    # An example that fails need not be the smallest one.
    settings.register_profile("forks", phases=[Phase.generate], database=None)
    settings.load_profile("forks")
    with tempfile.TemporaryDirectory() as folder:
        options = ["-qq", "-W", "ignore", "-p", "no:cacheprovider", f"--basetemp={folder}/tests"]
        return pytest.main([*tests, *options], plugins=[Forks(work)])
