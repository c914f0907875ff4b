"""Measures how much memory a run takes."""

from threading import Event, Thread

import psutil

INTERVAL = 0.05  # seconds between two samples, each of which takes less than 0.1 ms a process
# The name of the figure, in 10^6 bytes. All engines are in one process, so it is that of all.
PEAK_MEMORY = "process_peak_anonymous_mb"


class PeakMemory:
    """Samples the anonymous memory of this process and its children while a `with` block runs.

    Pages of files, such as libraries and mapped checkpoints, do not count, because the system can
    drop them.
    """

    def __enter__(self) -> "PeakMemory":
        process = psutil.Process()
        # Listed once, because that reads the table of all processes.
        self._processes = [process, *process.children(recursive=True)]
        self._has_ended = Event()
        self._peak = 0
        self._thread = Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()

    @property
    def figures(self) -> dict[str, int]:
        return {PEAK_MEMORY: round(self._peak / 1e6)}

    def _sample(self) -> None:
        has_ended = False
        while not has_ended:
            has_ended = self._has_ended.wait(INTERVAL)
            self._peak = max(self._peak, sum(map(count_anonymous, self._processes)))


def count_anonymous(process: psutil.Process) -> int:
    """Return the bytes of a process, or 0 if it has ended."""
    try:
        info = process.memory_info()
    except psutil.NoSuchProcess:
        return 0
    return info.rss - getattr(info, "shared", 0)  # macOS does not tell them apart
