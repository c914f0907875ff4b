"""The scripts for a GPU stop in time, and a lost process hides no test and no figure.

`bash .ci/gpu/run 240 dry`, which .ci/run calls, runs all of them on a CPU.
"""

import json
import os
import subprocess
import sys
import tarfile
import time

import pytest
from project_helpers import ROOT

SCRIPTS = ROOT / ".ci" / "gpu"
TESTS = """
import os, time
import pytest

def test_passes():
    pass

def test_loses_the_gpu():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_crashes():
    os._exit(139)

def test_hangs():
    time.sleep(60)

def test_skips():
    pytest.skip("no reason")

@pytest.fixture
def broken():
    yield
    raise RuntimeError("broken fixture")

def test_fails_in_its_fixture(broken):
    pass

def test_is_the_last_one():
    pass
"""


def run_suite(folder, *arguments):
    """Run suite.py in `folder`. Return what it prints, and the outcome of each test."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / "suite.py", "few", *arguments],
        cwd=folder,
        env={**os.environ, "LOGS": str(folder), "TEST_SECONDS": "1"},
        capture_output=True,
        text=True,
    )
    outcomes = {}
    for line in (folder / "few.tests").read_text().splitlines():
        result = json.loads(line)
        outcomes[result["test"].partition("::test_")[2]] = result["outcome"]
    return done, outcomes


@pytest.fixture
def tests(tmp_path):
    (tmp_path / "test_few.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def test_a_lost_process_hides_no_test(tests):
    done, outcomes = run_suite(tests, "60")
    assert outcomes == {
        "passes": "passed",
        "loses_the_gpu": "failed",
        "crashes": "hung or crashed",
        "hangs": "hung or crashed",
        "skips": "skipped",
        "fails_in_its_fixture": "failed",
        "is_the_last_one": "passed",
    }
    assert done.returncode == 1
    assert "few: 2 passed, 2 failed, 2 hung or crashed, 1 skipped; finished" in done.stdout
    assert "test_fails_in_its_fixture  RuntimeError: broken fixture" in done.stdout


def test_a_suite_stops_in_time(tests):
    done, outcomes = run_suite(tests, "0", "-k", "hangs or last")
    assert "out of time" in done.stdout
    assert done.returncode == 1
    assert "passed" not in outcomes.values()


def test_jobs_stop_in_time_and_leave_their_results(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setenv("OUT", str(tmp_path))
    import jobs

    figures = """printf 'decode 1\\nnoise\\n{"ms": 5}\\n{"half of a line'"""
    child = 'import subprocess as s; s.run(["sleep", "30"])'
    runner = jobs.Runner("a fast GPU", time.monotonic() + 300, one_thread=True)
    runner.run("first", [jobs.Job("figures", 30, figures)], side_by_side=False)
    assert not runner.failures
    wrong = "FastMLP is replaced by MLP, which is slower; please report this: the error is 2"
    more = [
        jobs.Job("slow", 1, f"python -c '{child}'"),
        jobs.Job("wrong", 30, f"echo '{wrong}'"),
        jobs.Job("missing", 30, "no-such-program"),
    ]
    runner.run("second", more, side_by_side=True)
    runner.finish()
    summary = (tmp_path / "summary.txt").read_text()
    assert summary == capsys.readouterr().out
    failures = summary.partition("== failures: 2\n")[2].splitlines()
    assert sorted(failures) == ["slow: OUT OF TIME after 1 s", f"wrong: {wrong}"]
    for part in ("a fast GPU", "\ndecode 1\n", "slow: OUT OF TIME", wrong, "missing: [Errno 2]"):
        assert part in summary
    assert "noise" not in summary
    collected = json.loads((tmp_path / "figures.json").read_text())
    assert collected["hardware"] == "a fast GPU"
    assert collected["figures"] == [{"ms": 5}]
    with tarfile.open(tmp_path / "logs.tar.gz") as archive:
        assert {"logs/figures.log", "logs/slow.log"} <= set(archive.getnames())


@pytest.mark.parametrize(
    "arguments, status, shown",
    [
        (["60", "everything"], 2, "unknown stage everything: use env, smoke"),
        ([], 2, "torch finds no GPU"),
        (["20", "dry"], 0, "left over: bash .ci/gpu/run 20 dry"),
    ],
)
def test_what_cannot_run_is_named(tmp_path, arguments, status, shown):
    done = subprocess.run(
        ["bash", SCRIPTS / "run", *arguments],
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "CUDA_VISIBLE_DEVICES": "",
            "OUT": str(tmp_path),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == status
    assert shown in done.stdout
