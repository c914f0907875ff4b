"""Describes a run: hardware, versions, and rows of figures."""

import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

COLUMNS = (
    "prompt tokens",
    "output tokens",
    "seconds",
    "output tok/s",
    "total tok/s",
    "% of roofline",
)


def describe_hardware(device: torch.device) -> str:
    if device.type == "cuda":
        num_bytes = torch.cuda.get_device_properties(device).total_memory
        return f"{torch.cuda.get_device_name(device)}, {num_bytes / 2**30:.0f} GiB"
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
    return f"{name}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads"


def find_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of the installed ones of `packages`."""
    versions = {"python": platform.python_version()}
    for name in packages:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def print_setting(setting: dict[str, Any]) -> None:
    for name, value in setting.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        print(f"{name}: {value}")


def print_head() -> None:
    print(f"\n{'':20}" + "".join(f"{column:>15}" for column in COLUMNS))


def print_row(
    label: str,
    num_prompt_tokens: int,
    num_output_tokens: int,
    seconds: float,
    roofline_seconds: float,
    stats: dict[str, int],
) -> None:
    num_tokens = num_prompt_tokens + num_output_tokens
    cells = [
        f"{num_prompt_tokens:15}",
        f"{num_output_tokens:15}",
        f"{seconds:15.2f}",
        f"{num_output_tokens / seconds:15.1f}",
        f"{num_tokens / seconds:15.1f}",
        f"{roofline_seconds / seconds:15.1%}",
    ]
    cells += [f"  {name} {value}" for name, value in stats.items() if value]
    print(f"{label:20}" + "".join(cells), flush=True)
