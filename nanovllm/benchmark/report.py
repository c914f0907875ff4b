"""Describes a run: hardware, versions, a table of figures, and the same figures for JSON."""

import argparse
import os
import platform
import re
import statistics
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from nanovllm.benchmark import roofline
from nanovllm.benchmark.engines import Engine
from nanovllm.benchmark.roofline import PeakRates
from nanovllm.benchmark.setting import Setting
from nanovllm.benchmark.workloads import Case, Request

Figures = dict[str, Any]  # a part of the line of JSON
COLUMNS = (
    "prompt tokens",
    "output tokens",
    "seconds",
    "prompt tok/s",
    "output tok/s",
    "GB/s",
    "% of roofline",
)


def describe_hardware(device: torch.device) -> str:
    if device.type == "cuda":
        num_bytes = torch.cuda.get_device_properties(device).total_memory
        return f"{torch.cuda.get_device_name(device)}, {num_bytes / 2**30:.0f} GiB"
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"model name\s*: (.*)", cpuinfo.read_text())
        name = found[1] if found else name
    return f"{name}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads"


def find_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of the installed ones of `packages`."""
    versions = {"python": platform.python_version()}
    for name in packages:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def describe(
    args: argparse.Namespace,
    settings: Mapping[str, Setting],
    engines: Mapping[str, Engine],
    peak: PeakRates,
) -> Figures:
    """Print and return what the figures depend on."""
    setting, *_ = settings.values()
    case, *others = args.cases
    options = {name: getattr(case, name) for name in Case._fields[1:]}
    described: Figures = {
        "hardware": describe_hardware(setting.device),
        "peak_rates": str(peak),
        "versions": find_versions(dict.fromkeys(["torch", "transformers", *args.engine])),
        "model": ", ".join(args.models),
        "options": setting.options,
        "workload": {"name": args.workload} if others else options,
        **{name: engine.description for name, engine in engines.items()},
    }
    for name, value in described.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        print(f"{name}: {value}")
    return described


def report_memory() -> Figures:
    """Print and return the anonymous memory of this process and its children, at the end.

    Pages of files do not count, because the system can drop them.
    """
    process = psutil.Process()
    infos = [each.memory_info() for each in (process, *process.children(recursive=True))]
    # macOS does not tell shared pages apart.
    num_bytes = sum(info.rss - getattr(info, "shared", 0) for info in infos)
    print(f"anonymous memory: {num_bytes / 1e6:.0f} MB")
    return {"anonymous_memory_mb": round(num_bytes / 1e6)}


class Table:
    """A row for each run of a case."""

    def __init__(
        self,
        case: argparse.Namespace,
        settings: Mapping[str, Setting],
        requests: list[Request],
        peak: PeakRates,
    ) -> None:
        self.peak = peak
        self.seconds: dict[str, list[float]] = {name: [] for name in settings}
        self.stats: dict[str, dict[str, int]] = {}  # of the last run
        self.least: dict[str, float] = {}  # the seconds of the roofline
        self.num_bytes: dict[str, float] = {}
        prefixes = (case.shared_prefix, case.cached_prefix)
        for name, setting in settings.items():
            count = partial(roofline.compute_roofline_seconds, setting.spec, requests, *prefixes)
            self.least[name] = count(peak)
            self.num_bytes[name] = count(roofline.ONE_BYTE_PER_SECOND)
        self.num_prompt_tokens = sum(len(prompt) - case.cached_prefix for prompt, _ in requests)
        self.num_output_tokens = sum(request.num_tokens for request in requests)
        print(f"\n{case.title:24}" + "".join(f"{column:>15}" for column in COLUMNS), flush=True)

    def add_run(self, name: str, seconds: float, stats: dict[str, int]) -> None:
        """Print a run of an engine, whose stats are those of this run."""
        self.seconds[name].append(seconds)
        self.stats[name] = stats
        self.print_row(name, str(len(self.seconds[name])), seconds, stats)

    def compute_rates(self, name: str, seconds: float) -> dict[str, float]:
        """Return the figures that follow from the time of a run, by their names in JSON."""
        return {
            "prompt_tokens_per_second": self.num_prompt_tokens / seconds,
            "output_tokens_per_second": self.num_output_tokens / seconds,
            "read_bytes_per_second": self.num_bytes[name] / seconds,
            "share_of_roofline": self.least[name] / seconds,
        }

    def print_row(self, name: str, run: str, seconds: float, stats: dict[str, int]) -> None:
        prompt_rate, output_rate, bandwidth, share = self.compute_rates(name, seconds).values()
        row = f"{f'{name} {run}':24}{self.num_prompt_tokens:15}{self.num_output_tokens:15}"
        row += f"{seconds:15.3f}{prompt_rate:15.1f}{output_rate:15.1f}"
        row += f"{bandwidth / 1e9:15.1f}{share:15.1%}"
        shown = [f"  {key} {value}" for key, value in stats.items() if value]
        print(row + "".join(shown), flush=True)

    def summarize(self) -> Figures:
        """Print the medians and the ratios. Return all figures."""
        medians = {name: statistics.median(seconds) for name, seconds in self.seconds.items()}
        first, *others = medians
        ratios = {f"{first}/{other}": medians[other] / medians[first] for other in others}
        rates: dict[str, dict[str, float]] = {}
        for name, seconds in medians.items():
            if len(self.seconds[name]) > 1:
                self.print_row(name, "median", seconds, {})
            for key, rate in self.compute_rates(name, seconds).items():
                rates.setdefault(key, {})[name] = rate
        for pair, ratio in ratios.items():
            print(f"{pair}: {ratio:.2f}x throughput (ratio of medians)")
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "seconds": self.seconds,
            "median_seconds": medians,
            **rates,
            "ratios": ratios,
            "roofline": {**self.peak._asdict(), "seconds": self.least, "note": roofline.NOTE},
            "stats_of_last_run": self.stats,
        }
