"""Compiles the grammar on stdin for tokens of one byte, and prints its error.

A short grammar can take minutes to compile, and thousands of nested rules overflow the stack. The
process of the engine could stop neither. The arguments are the limit of CPU time, in seconds, and
the path of the engine.
"""

import sys

sys.path.extend(sys.argv[2:])  # that of the engine, where the packages are
import os
import resource
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

STACK_BYTES = 2**20  # less than any thread of the engine has


def compile_stdin() -> None:
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(LLTokenizer("byte"), sys.stdin.read(), log_level=0, limits=limits)
    matcher.compute_bitmask()
    print(end=matcher.get_error())


if __name__ == "__main__":
    os.nice(10)  # the engine goes first
    cpu_seconds = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a stack overflow need not be debugged
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=compile_stdin)
    thread.start()
    thread.join()
