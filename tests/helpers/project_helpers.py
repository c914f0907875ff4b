"""What the tests of programs share: a small KV cache, and starting and rejecting commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SMALL = {
    "kvcache_block_size": 4,
    "num_kvcache_blocks": 24,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
}


def start(*command, **options):
    """Run Python on one thread, as a user starts it, in a terminal that has only ASCII."""
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        **options,
    )


def reject(capsys, main, *arguments):
    """Run a program that rejects its command line, and return its message."""
    with pytest.raises(SystemExit) as end:
        main(*arguments)
    assert end.value.code == 2
    return capsys.readouterr().err
