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
from functools import partial
from operator import itemgetter
from pathlib import Path
from pkgutil import resolve_name
from traceback import walk_tb
from types import CellType, CodeType, FunctionType
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CUDA does not survive a fork

import pytest

MEMORY_LIMIT = 8 << 30  # bytes of a fork, whose loop may never end


def find_function(name: str) -> FunctionType:
    """Return a function `module:qualified name`, also that of a class method or of a kernel."""
    function = resolve_name(name)
    function = getattr(function, "fn", function)
    return getattr(function, "__func__", function)


def set_body(name: str, source: str) -> None:
    """Give a function the body that it has in `source`, wherever it has been imported already."""
    code = compile(source, f"<another body of {name}>", "exec")  # its lines are in no file
    for part in name.partition(":")[2].split("."):
        inner = [each for each in code.co_consts if isinstance(each, CodeType)]
        code = next(each for each in inner if each.co_name == part)
    set_code(name, code)
    kernel = resolve_name(name)
    if hasattr(kernel, "rewritten_fn"):  # what Triton's interpreter has made of the other body
        kernel.rewritten_fn.pop(kernel.fn, None)


def set_code(name: str, code: CodeType) -> None:
    """Change a function in place, or a method in its class, because super() needs a closure."""
    function = find_function(name)
    if len(code.co_freevars) == len(function.__code__.co_freevars):
        function.__code__ = code
        return
    owner = resolve_name(name.rpartition(".")[0])
    closure = tuple(CellType(owner) for _ in code.co_freevars)
    method = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, closure
    )
    method.__kwdefaults__ = function.__kwdefaults__
    setattr(owner, function.__name__, method)


def set_bodies(sources: dict[str, str]) -> None:
    for name, source in sources.items():
        set_body(name, source)


ORIGINALS: dict[str, FunctionType] = {}  # the functions that are watched
CALLED: set[str] = set()


def watch(name: str) -> None:
    """Let a function note that it was called. Kernels are called in another way."""
    function = find_function(name)
    kernel = resolve_name(name)
    if hasattr(kernel, "rewrite"):
        rewrite = kernel.rewrite

        def note_and_rewrite() -> Any:
            CALLED.add(name)
            return rewrite()

        kernel.rewrite = note_and_rewrite
        ORIGINALS[name] = function
        return
    closure = function.__closure__
    ORIGINALS[name] = FunctionType(function.__code__, function.__globals__, name, closure=closure)
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
    set_code(name, namespace["watched"].__code__)


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
    """A pytest plugin that calls `work` with itself, and runs the tests that this returns."""

    def __init__(self, work: Callable[["Forks"], Sequence[str]]) -> None:
        self.work = work
        self.failed: list[str] = []

    def pytest_runtestloop(self, session: pytest.Session) -> None:
        # Other ranks are processes of their own, which have no other bodies.
        self.items = {
            item.nodeid: item for item in session.items if "tensor_parallel_size" not in item.nodeid
        }
        self.plugins = session.config.pluginmanager
        session.items = [self.items[test] for test in self.work(self)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def run(
        self,
        tests: Sequence[str],
        prepare: Callable[[], None],
        time_limit: int = 600,
        stops: bool = True,
    ) -> Any:
        """Run tests in a fork, after `prepare`, up to the first that fails if `stops`.

        Return the failed ones, or None if the fork has not ended well.
        """

        def work() -> list[str]:
            prepare()
            for _ in self.run_here(tests):
                if self.failed and stops:
                    break
            return self.failed

        return fork(work, time_limit)

    def run_here(self, tests: Sequence[str]) -> Iterator[str]:
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


def run_forks(tests: Sequence[str], work: Callable[[Forks], None]) -> None:
    """Collect tests, and let `work` run them."""
    from hypothesis import Phase, settings  # only here, because pytest has to import it first

    # An example that fails need not be the smallest one.
    settings.register_profile("forks", phases=[Phase.generate], database=None)
    settings.load_profile("forks")
    with tempfile.TemporaryDirectory() as folder:
        options = ["-qq", "-W", "ignore", "-p", "no:cacheprovider", f"--basetemp={folder}/tests"]
        status = pytest.main([*tests, *options], plugins=[Forks(lambda forks: work(forks) or ())])
    assert status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), status


class Findings:
    """A pytest plugin that counts tests, and names the function that is nearest to an error."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.num_tests = 0
        self.failed: set[str] = set()

    def pytest_runtest_setup(self) -> None:
        if not ORIGINALS:  # after `select`, which sets bodies
            for name in self.names:
                watch(name)
        CALLED.clear()

    def pytest_exception_interact(self, call: pytest.CallInfo, report: pytest.TestReport) -> None:
        assert call.excinfo is not None
        error = call.excinfo.value
        if isinstance(error, NotImplementedError):
            report.longrepr = f"{error} is empty"
            return
        codes = {ORIGINALS[name].__code__: name for name in self.names}
        called = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
        own = [codes[code] for code in called if code in codes][-1:]
        title = "your function that is nearest to the error"
        if not own:
            own = [name for name in self.names if name in CALLED]
            title = "your functions that this test has called"
        if own:
            report.sections.append((title, ", ".join(name.partition(":")[2] for name in own)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.num_tests += report.when == "setup"
        if report.failed:
            self.failed.add(report.nodeid)


def check(
    tests: list[str],
    names: list[str],
    references: dict[str, str],
    empties: dict[str, str],
    choices: Path,
) -> Findings:
    """Run tests with the bodies of `references`. With `empties`, only tests that notice these.

    Finding out which these are takes a run of all tests, so the file `choices` keeps them.
    """

    def select(forks: Forks) -> Sequence[str]:
        set_bodies(references)
        kept = json.loads(choices.read_text()) if choices.exists() else {}
        key = " ".join(empties)
        if key not in kept:
            failed = forks.run(list(forks.items), partial(set_bodies, empties), stops=False)
            kept[key] = list(dict.fromkeys(failed))
            choices.write_text(json.dumps(kept))
        return kept[key]

    findings = Findings(names)
    plugins = [findings, Forks(select)] if empties else [findings]
    pytest.main([*tests, "-q", "--tb=short"], plugins=plugins)
    return findings
