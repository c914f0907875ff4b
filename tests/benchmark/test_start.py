"""The row "start" of the benchmark: a quiet machine, and one whose cores are busy."""

import json

import psutil
import torch

from nanovllm import DEMO_MODEL
from nanovllm.benchmark import start


def count_children():
    return len(psutil.Process().children())


def test_other_processes_run_during_the_second_half(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    before = count_children()
    num_busy = []

    def run():
        num_busy.append(count_children() - before)
        return len(num_busy)

    figures = start.compare_loads(run, repeat=3)
    assert num_busy == [0, 0, 0, 0, 2, 2, 2]
    assert figures == {"start_quiet_seconds": 3, "start_busy_seconds": 6}
    assert count_children() == before


def test_an_engine_starts_in_a_process_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr(start, "compare_loads", lambda run, repeat: {"seconds": run()})
    options = ["--json", "--set", "num_kvcache_blocks=64", "--set", "device=cpu"]
    start.main(["--model", DEMO_MODEL, "--input-len", "8", "8", "--output-len", "8", "8", *options])
    assert 0 < json.loads(capsys.readouterr().out)["seconds"] < 60
