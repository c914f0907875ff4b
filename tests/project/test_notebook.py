"""The notebook for Colab runs from its first cell to its last one, here without a GPU."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from project_helpers import ROOT

NOTEBOOK = json.loads((ROOT / "nanovllm/course/colab.ipynb").read_text())
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_short_and_has_no_outputs():
    assert len(NOTEBOOK["cells"]) <= 12
    assert not any(cell["outputs"] or cell["execution_count"] for cell in CELLS)


@pytest.mark.sweep
def test_the_notebook_runs(tmp_path, monkeypatch, capfd):
    clone = tmp_path / "nanovllm"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (tmp_path / "bin/python").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(clone))
    monkeypatch.chdir(clone)
    display = SimpleNamespace(IFrame=lambda path, **size: Path(path).stat().st_size)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)

    def run(command):
        subprocess.run(command, shell=True, check=True)

    names = {"run": run}
    for cell in CELLS:
        if cell["metadata"].get("tags") == ["install"]:
            continue
        lines = [
            f"run({line[1:]!r})" if line[:1] == "!" else line
            for line in "".join(cell["source"]).split("\n")
        ]
        exec("\n".join(lines), names)
    printed = capfd.readouterr().out
    assert "12 + 30 = 42." in printed
    assert "tests that need find_prefix pass" in printed
    assert (clone / "timeline.html").exists()
    shutil.rmtree(clone)
