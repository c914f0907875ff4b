"""Describes a run: hardware, versions, a table of figures, and the same figures for JSON."""

import argparse
import os
import platform
import re
import statistics
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from nanovllm.benchmark.engines import Engine, Request
from nanovllm.benchmark.roofline import (
    NOTE,
    PeakRates,
    compute_roofline_seconds,
    find_roofline_fraction,
)
from nanovllm.benchmark.setting import Setting

Figures = dict[str, Any]  # a part of the line of JSON
WORKLOAD = ("num_seqs", "input_len", "output_len", "shared_prefix", "temperature", "seed")
COLUMNS = (
    "prompt tokens",
    "output tokens",
    "seconds",
    "output tok/s",
    "total tok/s",
    "% of roofline",
)
READING = f"""\
Look at output tok/s: the tokens generated per second, over a whole run with its prefills.
% of roofline is the minimum time of the workload at the peak rates, divided by the measured time.
{NOTE}"""


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
    args: argparse.Namespace, setting: Setting, engines: Mapping[str, Engine], peak: PeakRates
) -> Figures:
    """Print and return what the figures depend on."""
    described: Figures = {
        "hardware": describe_hardware(setting.device),
        "peak_rates": str(peak),
        "versions": find_versions(dict.fromkeys(["torch", "transformers", *args.engine])),
        "model": args.model,
        "options": setting.options,
        "workload": {name: getattr(args, name) for name in WORKLOAD},
        **{name: engine.description for name, engine in engines.items()},
    }
    for name, value in described.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        print(f"{name}: {value}")
    return described


class Table:
    """A row for each run of a workload."""

    def __init__(
        self, setting: Setting, requests: list[Request], shared_prefix: int, peak: PeakRates
    ) -> None:
        self.peak = peak
        self.least = compute_roofline_seconds(setting.spec, requests, shared_prefix, peak)
        self.num_prompt_tokens = sum(len(request.prompt) for request in requests)
        self.num_output_tokens = sum(request.num_tokens for request in requests)
        self.num_tokens = self.num_prompt_tokens + self.num_output_tokens
        print(f"roofline: at least {self.least:.3g} seconds")
        print(f"\n{'':20}" + "".join(f"{column:>15}" for column in COLUMNS), flush=True)

    def print_row(self, label: str, seconds: float, stats: dict[str, int]) -> None:
        cells = [
            f"{self.num_prompt_tokens:15}",
            f"{self.num_output_tokens:15}",
            f"{seconds:15.2f}",
            f"{self.num_output_tokens / seconds:15.1f}",
            f"{self.num_tokens / seconds:15.1f}",
            f"{self.least / seconds:15.1%}",
        ]
        cells += [f"  {name} {value}" for name, value in stats.items() if value]
        print(f"{label:20}" + "".join(cells), flush=True)

    def summarize(self, engines: Mapping[str, Engine], times: dict[str, list[float]]) -> Figures:
        """Print the medians, the ratios, and how to read them. Return all figures."""
        medians = {name: statistics.median(seconds) for name, seconds in times.items()}
        first, *others = medians
        ratios = {f"{first}/{other}": medians[other] / medians[first] for other in others}
        for name, seconds in medians.items():
            if len(times[name]) > 1:
                self.print_row(f"{name} median", seconds, {})
        for pair, ratio in ratios.items():
            print(f"{pair}: {ratio:.2f}x throughput (ratio of medians)")
        print(f"\n{READING}")
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "seconds": times,
            "median_seconds": medians,
            "output_tokens_per_second": {n: self.num_output_tokens / s for n, s in medians.items()},
            "total_tokens_per_second": {n: self.num_tokens / s for n, s in medians.items()},
            "ratios": ratios,
            "roofline": {**self.peak._asdict(), "seconds": self.least, "note": NOTE},
            "share_of_roofline": {
                n: find_roofline_fraction(self.least, s) for n, s in medians.items()
            },
            "stats_of_last_run": {name: engine.stats for name, engine in engines.items()},
        }
