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
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
# A wrong kernel is replaced by plain torch when an engine starts, with one of these messages.
FAILURE = re.compile("^FAIL|please report this|kernels fail on this GPU")
FIGURES = re.compile(
    r"^(ok |decode |prefill |host time|ceilings|peak_rates|roofline|nanovllm (median|\d)|\| "
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
    failures: list[str]


class Runner:
    """Runs jobs until `end`, and writes the three result files.

    `hardware` names the machine in the results. With `one_thread`, torch computes on one thread.
    What is noted is printed and written at once, so that it is known even if the run is killed.
    """

    def __init__(self, hardware: str, end: float, one_thread: bool) -> None:
        self.hardware = hardware
        self.end = end
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
        self.failures: list[str] = []
        self.summary = (self.out / "summary.txt").open("w")
        self.note(hardware)

    def seconds_left(self) -> float:
        return self.end - time.monotonic()

    def note(self, *lines: str) -> None:
        for line in lines:
            print(line, flush=True)
            print(line, file=self.summary, flush=True)

    def _note_outcome(self, job: Future[Outcome]) -> None:
        outcome = job.result()
        self.note(*outcome.lines)
        self.failures += outcome.failures

    def run(self, name: str, jobs: list[Job], side_by_side: bool) -> None:
        self.note(f"== {name} ({self.seconds_left():.0f} s left)")
        num_workers = (os.cpu_count() or 1) if side_by_side else 1
        with ThreadPoolExecutor(num_workers) as pool:
            running = {pool.submit(self._run_job, job) for job in jobs}
            try:
                for job in as_completed(running):
                    self._note_outcome(job)
                    running.remove(job)
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                end(*self.processes)
                for job in running:
                    if not job.cancelled():
                        self._note_outcome(job)
                raise
        self._write()

    def _run_job(self, job: Job) -> Outcome:
        start = time.monotonic()
        seconds = min(job.seconds, int(self.seconds_left()))
        if seconds <= 0:
            return Outcome([f"-- {job.name}: no time left"], [])
        # The job needs time to write its results.
        command = job.command.replace("SECONDS", str(max(1, seconds - 2 * KILL_SECONDS)))
        log = self.logs / f"{job.name}.log"
        try:
            problem = self._run_command(command, log, seconds)
        except FileNotFoundError as error:  # of the program, which some machines lack
            return Outcome([f"-- {job.name}: {error}"], [])
        text = log.read_text(errors="replace").splitlines()
        failures = [line for line in text if FAILURE.search(line)]
        shown = re.compile(job.shown) if job.shown else FIGURES
        lines = [line for line in text if line in failures or shown.search(line)][-MAX_LINES:]
        if problem:
            last_lines = [line for line in text if line.strip()][-1:]
            lines += [line for line in last_lines if line not in lines]
            failures.append(problem)
        lines.append(f"-- {job.name}: {problem or 'done'} ({time.monotonic() - start:.0f} s)")
        return Outcome(
            [line[:MAX_WIDTH] for line in lines],
            [f"{job.name}: {line}"[:MAX_WIDTH] for line in failures],
        )

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
        (self.out / "figures.json").write_text(json.dumps(figures, indent=1))
        with tarfile.open(self.out / "logs.tar.gz", "w:gz") as archive:
            archive.add(self.logs, "logs")

    def finish(self) -> None:
        """Repeat what has failed, at the end, where it is seen first."""
        self._write()
        self.note(f"== {self.seconds_left():.0f} s left; results: {self.out}")
        self.note(f"== failures: {len(self.failures)}", *self.failures)
        self.summary.close()


def end(*processes: subprocess.Popen) -> None:
    """End processes and those that they have started."""
    limit = time.monotonic() + KILL_SECONDS
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, limit - time.monotonic()))


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
