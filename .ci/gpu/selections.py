"""Checks that every job with pytest selects some tests, which a renamed file or test can end."""

import shlex
import sys

import pytest
from stages import STAGES, SUITE

wrong = []
for stage in STAGES:
    for job in stage.jobs:
        if job.command.startswith(SUITE):
            name, _, *arguments = shlex.split(job.command.removeprefix(SUITE))
            print(name, flush=True)
            if pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *arguments]) != 0:
                wrong.append(name)
for name in wrong:
    print(f"FAIL {name} selects no tests")
sys.exit(len(wrong))
