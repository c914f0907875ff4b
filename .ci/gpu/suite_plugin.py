"""A plugin of pytest for suite.py: records each test, and ends a process that cannot go on."""

import faulthandler
import json
import os
from pathlib import Path

import pytest
from attempts import is_sticky
from jobs import read_record

LOST = 99  # exit code of a process that has lost the GPU
OUTCOMES = ["passed", "skipped", "failed"]
TEST_SECONDS = float(os.environ.get("TEST_SECONDS", 90))  # a test that takes longer hangs

reports: list[pytest.TestReport] = []  # of the test that runs


def write(record: Path, test: str, outcome: str, error: str = "") -> None:
    with record.open("a") as file:
        print(json.dumps({"test": test, "outcome": outcome, "error": error}), file=file)


def find_record() -> Path:
    return Path(os.environ["SUITE_RECORD"])


def pytest_collection_modifyitems(config, items):
    """Leave out what an earlier process has run."""
    known = read_record(find_record())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in known])
    items[:] = [item for item in items if item.nodeid not in known]


def pytest_runtest_logstart(nodeid):
    write(find_record(), nodeid, "running")
    # This ends the process even if it waits for the GPU in C.
    faulthandler.dump_traceback_later(TEST_SECONDS, exit=True)


def pytest_runtest_logfinish():
    faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report):
    """Record the worst outcome of setup, call and teardown."""
    reports.append(report)
    if report.when != "teardown":
        return
    worst = max(reports, key=lambda each: OUTCOMES.index(each.outcome))
    reports.clear()
    lines = worst.longreprtext.splitlines()
    errors = [line[1:].strip() for line in lines if line.startswith("E ")] or lines[-1:]
    write(find_record(), worst.nodeid, worst.outcome, " ".join(errors)[:300])
    if worst.failed and is_sticky(worst.longreprtext):
        pytest.exit(f"the GPU is lost to this process: {worst.nodeid}", returncode=LOST)
