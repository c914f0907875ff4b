"""Runs pytest so that a failure hides no other test.

    suite.py NAME SECONDS [arguments of pytest]

After an illegal memory access all later CUDA calls of the process fail, and a hung kernel never
returns. Either ends pytest. Its test is recorded, and a new pytest runs the tests that are left.
Results are in $LOGS/NAME.tests, a JSON line each, and the output of pytest is in $LOGS/NAME.txt.
"""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from jobs import read_record
from suite_plugin import write

# pytest-xdist is never used: tests/conftest.py hides the GPU from the processes that it starts.
PYTEST = "-m pytest -p suite_plugin -p no:xdist -p no:cacheprovider -p no:randomly --tb=short"
PASSED_OR_FAILED = (0, 1)
NO_TESTS = 5


def run_pytest(record: Path, seconds: float, arguments: list[str]) -> int | None:
    """Return the exit code of pytest, or None if the time is over or jobs.py ends this process."""
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "SUITE_RECORD": str(record), "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, *PYTEST.split(), *arguments]
    with record.with_suffix(".txt").open("a") as file:
        try:
            return subprocess.run(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=seconds
            ).returncode
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            return None


def run_all(record: Path, seconds: float, arguments: list[str]) -> str:
    """Run pytest until no test is left. Return how that ended."""
    end = time.monotonic() + seconds
    while True:
        num_known = len(read_record(record))
        code = run_pytest(record, max(1.0, end - time.monotonic()), arguments)
        results = read_record(record)
        interrupted = [test for test in results if results[test]["outcome"] == "running"]
        for test in interrupted:
            write(record, test, "hung or crashed" if code is not None else "out of time")
        if code is None:
            return "out of time"
        if code in PASSED_OR_FAILED and not interrupted:
            return "finished"
        if code == NO_TESTS and results:
            return "finished"
        if len(results) == num_known:
            return f"stopped, because pytest ended with {code} before any test"


def main(name: str, seconds: str, *arguments: str) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    record = Path(os.environ["LOGS"]) / f"{name}.tests"
    record.write_text("")
    status = run_all(record, float(seconds), list(arguments))
    results = read_record(record)
    for test, result in results.items():
        if result["outcome"] not in ("passed", "skipped"):
            print(f"FAIL {result['outcome']}: {test}  {result['error']}")
    counts = Counter({"passed": 0})
    counts.update(result["outcome"] for result in results.values())
    numbers = ", ".join(f"{number} {outcome}" for outcome, number in counts.items())
    print(f"{name}: {numbers}; {status}")
    has_passed = status == "finished" and counts.keys() <= {"passed", "skipped"}
    return 0 if has_passed else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
