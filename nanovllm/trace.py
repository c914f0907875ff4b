"""Shows an engine's timeline, the file of `LLM(..., trace="trace.json")`: lanes as rows, steps as columns.

    python -m nanovllm.trace trace.json                    as text that fits the terminal
    python -m nanovllm.trace trace.json -o timeline.svg    as a picture (needs matplotlib: pip install 'nanovllm[plot]')

Each request has a letter: a capital where a step computes a piece of its prompt, or again what a preemption has cost it, and a
small one where it decodes. Where there are more steps than columns, a column sums up several.
"""

import argparse
import codecs
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_uppercase
from typing import Any

_BARS = " ▁▂▃▄▅▆▇█"
_PLAIN = str.maketrans("│▁▂▃▄▅▆▇█", "|12345678")  # for terminals that do not have these characters
_COUNTERS = ("waiting", "used", "cached", "free")
_PHASES = ("schedule", "prepare", "forward", "sample")


@dataclass
class Step:
    info: dict[str, Any]  # kind, tokens, milliseconds
    lanes: dict[int, dict[str, Any]] = field(default_factory=dict)  # what each lane computed, with its "kind"
    preempted: dict[int, int] = field(default_factory=dict)  # lane -> request id
    counters: dict[str, int] = field(default_factory=dict)  # after the step


def read(path: str | Path) -> list[Step]:
    """The steps of a timeline. Raises ValueError if the file is not one, OSError if it cannot be read."""
    steps: list[Step] = []
    content = Path(path).read_bytes()
    try:
        for event in json.loads(content):
            lane, args, kind = event.get("tid", 0) - 1, event.get("args", {}), event["name"].split()[0]
            if "kind" in args:
                steps.append(Step(args))
            elif event["ph"] == "C":
                steps[-1].counters |= args
            elif kind == "preempted":
                steps[-1].preempted[lane] = args["request_id"]
            elif lane >= 0 and event["ph"] == "X":
                steps[-1].lanes[lane] = {"kind": kind, **args}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} is not a timeline of nanovllm, or only a piece of one: {error!r}") from error
    if not steps:
        raise ValueError(f"{path} holds no steps")
    return steps


def render(steps: list[Step], width: int = 100) -> str:
    """The timeline as text of at most `width` columns."""
    num_columns = max(1, width - 10)
    steps_per_column = -(-len(steps) // num_columns)
    columns = [steps[first : first + steps_per_column] for first in range(0, len(steps), steps_per_column)]
    size = max(1, min(5, num_columns // len(columns)))  # of a column

    def row(name: str, cells: list[str]) -> str:
        return f"{name:>8} │" + "".join(f"{cell[:size]:<{size}}" for cell in cells).rstrip()

    rows = [
        row("step", [str(index * steps_per_column) if index % max(1, 5 // size) == 0 else "" for index in range(len(columns))])
    ]
    rows += [
        row(f"lane {lane}", [_cell(column, lane, size) for column in columns])
        for lane in sorted({lane for step in steps for lane in (*step.lanes, *step.preempted)})
    ]
    legend = _legend(steps)
    counts = {name: [max(step.counters[name] for step in column) for column in columns] for name in _COUNTERS}
    if size >= 3:
        rows += [row(name, list(map(str, values))) for name, values in counts.items()]
    else:
        rows += [
            row(name, [_BARS[-(-8 * value // max(1, *values))] * size for value in values]) for name, values in counts.items()
        ]
        legend.insert(0, "bars: " + ", ".join(f"{name} up to {max(values)}" for name, values in counts.items()))
    if steps_per_column > 1:
        legend.insert(0, f"a column is {steps_per_column} steps")
    return "\n".join([*rows, "", *[line[:width] for line in legend]])


def _letter(request_id: int) -> str:
    return ascii_uppercase[request_id % 26]


def _cell(column: list[Step], lane: int, size: int) -> str:
    """What a lane did in some steps: the most remarkable of it."""
    for step in column:
        if lane in step.preempted:
            return "!" + _letter(step.preempted[lane])
    done = [step.lanes[lane] for step in column if lane in step.lanes]
    prefills = [work for work in done if work["kind"] == "prefill"]
    if prefills:
        name = _letter(prefills[0]["request_id"]) + "+" * any(work["num_cached_tokens"] for work in prefills)
        with_tokens = name + str(sum(work["num_tokens"] for work in prefills))
        return with_tokens if size >= 4 and len(with_tokens) < size else name
    return _letter(done[0]["request_id"]).lower() if done else ""


def _legend(steps: list[Step]) -> list[str]:
    lines = ["A: a piece of A's prompt (A+: what precedes it was cached); a: a decode; !A: A is preempted"]
    lines.append("used, cached, free: blocks of the KV cache")
    requests: dict[int, dict[str, int]] = {}
    for step in steps:
        for work in step.lanes.values():
            known = requests.setdefault(
                work["request_id"], {"prompt": work["num_prompt_tokens"], "cached": work["num_cached_tokens"]}
            )
            known["decoded"] = known.get("decoded", 0) + (work["kind"] == "decode")
    described = [
        f"{_letter(request_id)}: {known['prompt']} prompt tokens, {known['cached']} of them cached, {known['decoded']} decodes"
        for request_id, known in requests.items()
    ]
    lines += described[:8] + [f"... and {len(described) - 8} more requests"] * (len(described) > 8)
    total = sum(step.info[f"{phase}_ms"] for step in steps for phase in _PHASES) or 1.0
    shares = [f"{phase} {sum(step.info[f'{phase}_ms'] for step in steps) / total:.0%}" for phase in _PHASES]
    prefill, decode = (sum(step.info[f"num_{kind}_tokens"] for step in steps) for kind in ("prefill", "decode"))
    lines.append(
        f"{len(steps)} steps, {prefill} prefill and {decode} decode tokens, {sum(len(s.preempted) for s in steps)} preemptions"
    )
    lines.append(f"{total:.1f} ms: {', '.join(shares)}")
    return lines


def draw(steps: list[Step], path: str) -> None:
    """The timeline as a picture. Raises ImportError without matplotlib, ValueError for a suffix that it does not know."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    num_lanes = 1 + max(lane for step in steps for lane in (*step.lanes, *step.preempted))
    figure = Figure(figsize=(11, 2.6 + 0.28 * min(num_lanes, 32)), layout="constrained")
    lanes, pool = figure.subplots(2, sharex=True, height_ratios=[max(2, min(num_lanes, 32)), 3])
    colors = [f"C{index}" for index in range(10)]
    for x, step in enumerate(steps):
        for lane, work in step.lanes.items():
            color, is_prefill = colors[work["request_id"] % 10], work["kind"] == "prefill"
            lanes.add_patch(
                Rectangle((x, lane - 0.4), 1, 0.8, facecolor=color, alpha=0.9 if is_prefill else 0.35, edgecolor="white")
            )
            if cached := work["num_cached_tokens"]:  # as much of the chunk's width as it had in the tokens
                share = cached / (cached + work["num_tokens"])
                lanes.add_patch(
                    Rectangle((x, lane - 0.4), share, 0.8, facecolor="white", edgecolor=color, hatch="////", linewidth=0)
                )
            if is_prefill and len(steps) <= 60:
                lanes.text(x + 0.5, lane, work["num_tokens"], ha="center", va="center", fontsize=7, color="black")
        for lane in step.preempted:
            lanes.plot(x, lane, marker="x", color="black", markersize=7, markeredgewidth=2)
    lanes.set(xlim=(0, len(steps)), ylim=(num_lanes - 0.5, -0.5), ylabel="lane", yticks=range(0, num_lanes, -(-num_lanes // 16)))
    lanes.set_title(
        "dark: prefill, with its tokens; hatched: cached; light: decode; x: preempted; a color is a request", fontsize=9
    )
    counters = [[step.counters[name] for step in steps for _ in range(2)] for name in ("used", "cached", "free")]
    edges = [edge for x in range(len(steps)) for edge in (x, x + 1)]
    pool.stackplot(edges, counters, labels=("used", "cached", "free"), colors=("#4c72b0", "#a9bfe0", "#eeeeee"))
    pool.set(xlabel="step", ylabel="blocks", ylim=(0, sum(series[0] for series in counters)))
    figure.legend(loc="outside lower right", fontsize=8, ncols=3)
    for axes in (lanes, pool):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=200)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="the file of LLM(..., trace=...)")
    parser.add_argument("-o", "--output", metavar="PICTURE", help="draw it to a .png, .svg or .pdf instead")
    args = parser.parse_args(argv)
    try:
        steps = read(args.trace)
        if args.output:
            draw(steps, args.output)
    except ImportError as error:
        parser.error(f"{error}: -o needs matplotlib: pip install 'nanovllm[plot]'")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not args.output:
        print(render(steps, shutil.get_terminal_size((100, 24)).columns))


def run_program(main: Callable[[], None]) -> None:
    """Run `main` for any terminal: characters that it lacks are replaced, and a reader who leaves early (`| head`) ends it."""
    codecs.register_error("nanovllm", _replace)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="nanovllm")
    try:
        main()
        print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's own flush at the end
        sys.exit(1)


def _replace(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return error.object[error.start : error.end].translate(_PLAIN).encode("ascii", "replace").decode(), error.end


if __name__ == "__main__":
    run_program(main)
