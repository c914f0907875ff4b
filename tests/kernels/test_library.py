"""The C++ library is compiled once, cached safely, and usable where it cannot be cached."""

import errno
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from kernel_helpers import needs_compiler

from nanovllm.kernels.cpu import library


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    """Give the library a tiny source and a home of its own. Return the folder that caches it."""
    for name in ("sources", "home", "scratch", "here"):
        (tmp_path / name).mkdir()
    source = tmp_path / "sources" / "kernels.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(library, "SOURCE", source)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(tmp_path / "here")
    library.reason_unavailable.cache_clear()
    yield tmp_path / "home" / ".cache" / "nanovllm"
    library.reason_unavailable.cache_clear()
    library.load.cache_clear()


def load():
    library.load.cache_clear()
    return library.load(torch.float32).answer()


def load_in_processes(num_processes):
    """Load in several processes at once. One that has loaded a file does not read it again."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=lambda: sys.exit(load() != 42)) for _ in range(num_processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


@needs_compiler
def test_the_library_is_compiled_once(cache_dir, monkeypatch):
    monkeypatch.setenv("CXX", f"env {os.environ.get('CXX', 'c++')}")  # a command of two words
    load_in_processes(6)
    assert cache_dir.stat().st_mode & 0o777 == 0o700
    (cached,) = cache_dir.iterdir()
    run = Mock(wraps=subprocess.run)
    monkeypatch.setattr(subprocess, "run", run)
    assert load() == 42
    run.assert_called_once()
    assert "-E" in run.call_args.args[0]  # the preprocessor names compiler and processor
    assert list(cache_dir.iterdir()) == [cached]


@needs_compiler
@pytest.mark.parametrize("share", [0, 0.01], ids=["empty", "truncated"])
def test_a_damaged_library_is_compiled_again(cache_dir, share):
    load_in_processes(1)
    (cached,) = cache_dir.iterdir()
    whole = cached.read_bytes()
    cached.write_bytes(whole[: int(share * len(whole))])
    load_in_processes(1)
    assert [path.read_bytes() for path in cache_dir.iterdir()] == [whole]


@needs_compiler
def test_xdg_cache_home_is_respected_unless_empty(cache_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert load() == 42
    assert list((tmp_path / "elsewhere" / "nanovllm").iterdir())
    assert not cache_dir.exists()
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert load() == 42
    assert list(cache_dir.iterdir())
    assert not list(Path.cwd().iterdir())


@needs_compiler
@pytest.mark.parametrize("has_home", [True, False])
def test_a_library_that_cannot_be_cached_is_used_and_removed(
    cache_dir, monkeypatch, capfd, has_home
):
    if has_home:
        full = OSError(errno.ENOSPC, "no space")
        monkeypatch.setattr(shutil, "copy", Mock(side_effect=full))
    else:
        monkeypatch.setenv("HOME", str(library.SOURCE))  # a file
    assert load() == 42
    assert "XDG_CACHE_HOME" in capfd.readouterr().err
    assert not list(Path(tempfile.gettempdir()).iterdir())
    assert not list(Path.cwd().iterdir())
    assert not cache_dir.exists() or not list(cache_dir.iterdir())


@pytest.mark.parametrize(
    "compiler, reason",
    [
        ("'c++", "'c++"),
        ("no-such-compiler", "no-such-compiler"),
        (r"sh -c 'printf \\351 >&2; false'", "code 1: \ufffd"),
    ],
)
def test_the_error_names_the_compiler_and_its_output(cache_dir, monkeypatch, compiler, reason):
    monkeypatch.setenv("CXX", compiler)
    library.load.cache_clear()
    assert reason in library.reason_unavailable(torch.float32)
