"""The seconds of a start, by part: with an empty cache of compiled kernels, and with a full one.

Each start is a process. The last lines are steps of a prompt, of which the first one captures a
graph.
"""

import json
import os
import subprocess
import sys
import time
from tempfile import TemporaryDirectory

KINDS = ["first start", "second start"]


def start(title: str) -> None:
    """Start an engine with random weights in this process."""
    begin = time.perf_counter()
    from internals import DEVICE, SHAPES, count_graphs, describe_hardware, time_start

    from nanovllm import LLM, SamplingParams

    imported = time.perf_counter()
    shape = "qwen3-0.6b" if DEVICE.type == "cuda" else "small"
    with time_start(time.perf_counter) as parts:
        llm = LLM(SHAPES[shape], load_format="dummy", device=DEVICE.type)
    seconds = {"imports": imported - begin, "LLM": time.perf_counter() - imported}
    for name, values in parts.items():
        seconds[name] = sum(values)
    shown = ", ".join([f"{name} {value:.2f}" for name, value in seconds.items()])
    print(f"{title}: {shown}; {count_graphs(llm)} graphs", flush=True)
    steps = []
    for _ in range(4):
        llm.add_request([1] * 100, SamplingParams(max_tokens=1))
        begin = time.perf_counter()
        while not llm.is_finished():
            llm.step()
        steps.append(1e3 * (time.perf_counter() - begin))
    print(f"{title}: prefills of 100, ms: {[round(step, 2) for step in steps]}", flush=True)
    hardware = describe_hardware(DEVICE)
    print(json.dumps({"measured": title, "hardware": hardware, **seconds, "prefills": steps}))
    llm.exit()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        start(sys.argv[1])
    else:
        with TemporaryDirectory() as cache:
            for kind in KINDS:
                environment = {**os.environ, "TRITON_CACHE_DIR": cache}
                subprocess.run([sys.executable, __file__, kind], env=environment, check=True)
