"""Counts the functions and files that one `LLM.generate` takes a reader through.

    python tests/project/walk.py

Functions are those of the package, in the order of their first call, without comprehensions. A step
back enters a file that the walk has left before.
"""

import sys
from pathlib import Path

import nanovllm
from nanovllm import DEMO_MODEL, LLM, SamplingParams

PACKAGE = str(Path(nanovllm.__file__).parent)


def record_walk(call):
    """Return the (file, function) pairs that a call enters, each once."""
    walk = {}

    def record(frame, event, _):
        code = frame.f_code
        is_function = not code.co_name.startswith("<")  # a comprehension, before Python 3.12
        if event == "call" and is_function and code.co_filename.startswith(PACKAGE):
            walk[code.co_filename.removeprefix(PACKAGE + "/"), code.co_qualname] = None

    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(walk)


def count_steps_back(walk):
    left = set()
    current = None
    steps = 0
    for file, _ in walk:
        if file != current:
            steps += file in left
            left.add(current)
            current = file
    return steps


def main():
    with LLM(DEMO_MODEL, dtype="float32", enable_kernels=False, num_kvcache_blocks=64) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=3)
        walk = record_walk(lambda: llm.generate("What is 12 + 30?", params, use_tqdm=False))
    left = set()
    current = None
    for file, function in walk:
        mark = "<" if file != current and file in left else " "
        left.add(file)
        current = file
        print(f"{mark} {file:32} {function}")
    files = {file for file, _ in walk}
    print(f"{len(walk)} functions, {len(files)} files, {count_steps_back(walk)} steps back")


if __name__ == "__main__":
    main()
