"""Runs jobs within a budget of seconds, and collects what they print."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
# A wrong kernel is replaced by plain torch when an engine starts, with one of these messages.
FAILURE = re.compile("^FAIL|please report this|kernels fail on this GPU")
FIGURES = re.compile(
    r"^(ok |decode |prefill |host time|ceilings|roofline|nanovllm (median|\d)|\| "
    r"|[\w.-]+: \d+ passed)"
)
MAX_LINES = 90  # of a job in the summary
MAX_WIDTH = 200
KILL_SECONDS = 5  # for a process to end by itself


@dataclass(frozen=True)
class Job:
    """A process. SECONDS in `command` stands for the time that it has."""

    name: str
    seconds: int
    command: str
    shown: str = ""  # the lines that go to the summary, apart from figures and failures


@dataclass(frozen=True)
class Outcome:
    lines: list[str]
    is_failure: bool


class Runner:
    """Runs jobs until the time is over, and writes the three result files.

    `hardware` names the machine in the results. With `one_thread`, torch computes on one thread.
    """

    def __init__(self, hardware: str, seconds: float, one_thread: bool) -> None:
        self.hardware = hardware
        self.start = time.monotonic()
        self.end = self.start + seconds
        self.out = Path(os.environ.get("OUT", ROOT / "gpu-out")).resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.scratch = TemporaryDirectory()
        self.logs = Path(self.scratch.name)
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",  # so that the log of a job that is killed is complete
            "HF_HUB_OFFLINE": "1",
            "LOGS": str(self.logs),
        }
        if one_thread:
            self.environment["OMP_NUM_THREADS"] = "1"
        self.processes: list[subprocess.Popen] = []
        self.summary = [hardware]
        self.has_failed = False

    def seconds_left(self) -> float:
        return self.end - time.monotonic()

    def note(self, *lines: str) -> None:
        self.summary += lines

    def run(self, name: str, jobs: list[Job], side_by_side: bool) -> None:
        title = f"== {name} ({self.seconds_left():.0f} s left)"
        print(title, flush=True)
        self.note(title)
        num_workers = (os.cpu_count() or 1) if side_by_side else 1
        pool = ThreadPoolExecutor(num_workers)
        try:
            for outcome in pool.map(self._run_job, jobs):
                print(outcome.lines[-1], flush=True)
                self.note(*outcome.lines)
                self.has_failed |= outcome.is_failure
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(self.processes):  # there are some after an interrupt
                end(process)
        self._write()

    def _run_job(self, job: Job) -> Outcome:
        start = time.monotonic()
        seconds = min(job.seconds, int(self.seconds_left()))
        if seconds <= 0:
            return Outcome([f"-- {job.name}: no time left"], False)
        # The job needs time to write its results.
        command = job.command.replace("SECONDS", str(max(1, seconds - 2 * KILL_SECONDS)))
        log = self.logs / f"{job.name}.log"
        try:
            problem = self._run_command(command, log, seconds)
        except FileNotFoundError as error:  # of the program, which some machines lack
            return Outcome([f"-- {job.name}: {error}"], False)
        text = log.read_text(errors="replace").splitlines()
        failures = [line for line in text if FAILURE.search(line)]
        shown = re.compile(job.shown) if job.shown else FIGURES
        lines = [line for line in text if line in failures or shown.search(line)][-MAX_LINES:]
        if problem:
            lines += [line for line in text if line.strip()][-1:]
        lines.append(f"-- {job.name}: {problem or 'done'} ({time.monotonic() - start:.0f} s)")
        return Outcome([line[:MAX_WIDTH] for line in lines], bool(problem or failures))

    def _run_command(self, command: str, log: Path, seconds: int) -> str:
        """Run a command. Return how it failed, or an empty string."""
        words = [sys.executable if word == "python" else word for word in shlex.split(command)]
        options: dict = {"cwd": ROOT, "env": self.environment, "start_new_session": True}
        with log.open("w") as file:
            process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, **options)
        self.processes.append(process)
        try:
            code = process.wait(seconds)
            return f"FAILED with exit code {code}" if code != 0 else ""
        except subprocess.TimeoutExpired:
            return f"OUT OF TIME after {seconds} s"
        finally:
            end(process)
            self.processes.remove(process)

    def _write(self) -> None:
        figures = {"hardware": self.hardware, **collect_figures(self.logs)}
        (self.out / "summary.txt").write_text("\n".join(self.summary) + "\n")
        (self.out / "figures.json").write_text(json.dumps(figures, indent=1))
        with tarfile.open(self.out / "logs.tar.gz", "w:gz") as archive:
            archive.add(self.logs, "logs")

    def finish(self) -> None:
        self.note(f"== took {time.monotonic() - self.start:.0f} s; results: {self.out}")
        self._write()
        print("\n==== SUMMARY", *self.summary, sep="\n", flush=True)


def end(process: subprocess.Popen) -> None:
    """End a process and those that it has started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(KILL_SECONDS)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def collect_figures(logs: Path) -> dict:
    """Collect the JSON lines and the rows of tables in all logs, and the outcomes of tests."""
    figures: dict = defaultdict(list)
    for log in sorted(logs.glob("*.log")):
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith('{"'):
                with suppress(json.JSONDecodeError):  # half a line of a job that was killed
                    figures[log.stem].append(json.loads(line))
            elif line.startswith("| "):
                figures[log.stem].append(line)
    for record in sorted(logs.glob("*.tests")):
        figures["tests"] += read_record(record).values()
    return figures


def read_record(record: Path) -> dict[str, dict]:
    """Return the last result of each test that suite_plugin.py has recorded."""
    results = [json.loads(line) for line in record.read_text().splitlines()]
    return {result["test"]: result for result in results}
