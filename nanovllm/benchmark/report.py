"""Prints what bench.py reports: what the runs depend on, a table of them, and the ratios."""

import argparse
import os
import platform
import re
import statistics
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from nanovllm.benchmark.engines import Engine, Options
from nanovllm.benchmark.roofline import PeakRates
from nanovllm.benchmark.runs import Run

# Columns of the table, which are made from the figures of a run.
THROUGHPUT = {
    "engine and run": "{engine} {run}",
    "prompt tokens": "{prompt_tokens}",
    "output tokens": "{output_tokens}",
    "seconds": "{seconds:.3f}",
    "prompt tok/s": "{prompt_tokens_per_second:.1f}",
    "output tok/s": "{output_tokens_per_second:.1f}",
    "% of roofline": "{share_of_roofline:.1%}",
}
LATENCY = {
    "policy": "{engine}",
    "requests/s": "{request_rate:g}",
    "output tok/s": "{output_tokens_per_second:.1f}",
    "ttft p50/90/99": "{p50_ttft_ms:.0f}/{p90_ttft_ms:.0f}/{p99_ttft_ms:.0f}",
    "tpot p50/90/99": "{p50_tpot_ms:.0f}/{p90_tpot_ms:.0f}/{p99_tpot_ms:.0f}",
    "itl p50/90/99": "{p50_itl_ms:.0f}/{p90_itl_ms:.0f}/{p99_itl_ms:.0f}",
}


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
    variants: dict[str, Options],
    engines: dict[str, Engine],
    peak: PeakRates,
) -> dict[str, Any]:
    """Print and return what the runs depend on."""
    options, *_ = variants.values()
    described: dict[str, Any] = {
        "hardware": describe_hardware(torch.device(options["device"])),
        "peak_rates": str(peak),
        "versions": find_versions(["torch", "transformers", *args.engine]),
        "workload": {name: value for name, value in vars(args).items() if value is not None},
    }
    for name, engine in engines.items():
        described[name] = f"{engine.description}, options {variants[name]}"
    for name, value in described.items():
        print(f"{name}: {value}")
    return described


def report_runs(runs: Iterable[Run], has_rates: bool) -> dict[str, Any]:
    """Print the table, a row for each run as soon as it has ended, and the ratios.

    Return the same figures.
    """
    columns = LATENCY if has_rates else THROUGHPUT
    print()
    print_row(columns)
    ended: list[Run] = []
    for run in runs:
        print_run(run, columns)
        ended.append(run)
    figures: dict[str, Any] = {"runs": [run.figures() for run in ended]}
    if has_rates:
        return figures
    medians: list[Run] = []
    for engine in dict.fromkeys(run.engine for run in ended):
        own = [run for run in ended if run.engine == engine]
        seconds = statistics.median(run.seconds for run in own)
        median = replace(own[-1], run="median", seconds=seconds)
        medians.append(median)
        if len(own) > 1:
            print_run(median, columns)
    first, *others = medians
    ratios = {f"{first.engine}/{other.engine}": other.seconds / first.seconds for other in others}
    for pair, ratio in ratios.items():
        print(f"{pair}: {ratio:.2f}x throughput (ratio of medians)")
    return figures | {"medians": [median.figures() for median in medians], "ratios": ratios}


def print_run(run: Run, columns: dict[str, str]) -> None:
    figures = run.figures()
    counters = [f"  {name} {value}" for name, value in run.stats.items() if value]
    print_row([template.format_map(figures) for template in columns.values()], *counters)


def print_row(cells: Iterable[str], *rest: str) -> None:
    label, *others = cells
    print(f"{label:26}", *[f"{cell:>16}" for cell in others], *rest, sep="", flush=True)
