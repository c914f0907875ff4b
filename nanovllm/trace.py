"""Shows an engine's timeline, the file of `LLM(..., trace="trace.json")`: lanes as rows, steps as columns.

    python -m nanovllm.trace trace.json                     as text that fits the terminal
    python -m nanovllm.trace trace.json -o timeline.html    as a page to walk through; a second trace stands beside the first
    python -m nanovllm.trace trace.json -o timeline.svg     as a picture (needs matplotlib: pip install 'nanovllm[plot]')

Each request has a letter: a capital where a step computes a piece of its prompt, or again what a preemption has cost it, and a
small one where it decodes. Where the columns would be too wide, each is one character, and may sum up several steps.
"""

import argparse
import json
import shutil
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from nanovllm.terminal import run_program

_BARS = " .:-=+*#%@"  # the text is ASCII, which every terminal has
_BLOCKS = ("used", "reusable", "empty")
_PHASES = ("schedule", "prepare", "forward", "sample")


@dataclass
class Step:
    info: dict[
        str, Any
    ]  # kind, tokens, milliseconds; the queues where they change; the counters after it
    settings: dict[str, Any]  # of the engine
    lanes: dict[int, dict[str, Any]] = field(
        default_factory=dict
    )  # "kind", what each lane computed, and what came of it
    preempted: dict[int, dict[str, Any]] = field(
        default_factory=dict
    )  # lane -> request_id, blocks, is_nan


def read(path: str | Path) -> list[Step]:
    """The steps of a timeline. Raises ValueError if the file is not one, OSError if it cannot be read."""
    steps: list[Step] = []
    settings: dict[str, Any] = {}
    try:
        for event in json.loads(Path(path).read_bytes()):
            lane, args, kind = event["tid"] - 1, event["args"], event["name"].split()[0]
            if "kind" in args:
                drawn, accepted, ended = (
                    iter(args.pop("drawn_token_ids")),
                    dict(args.pop("accepted")),
                    dict(args.pop("ended")),
                )
                steps.append(Step(args, settings))
            elif "block_size" in args:
                settings |= args
            elif event["ph"] == "C":
                steps[-1].info |= args
            elif kind == "preempted":
                steps[-1].preempted[lane] = args
            elif kind in ("prefill", "decode"):
                lanes, request_id = steps[-1].lanes, args["request_id"]
                work = {
                    "kind": kind,
                    **args,
                    **accepted.get(request_id, {}),
                    **ended.get(request_id, {}),
                }
                num_drawn = 0 if work.get("num_left") else 1 + len(work.get("draft_token_ids", ()))
                new = [*islice(drawn, num_drawn)][: 1 + work.get("num_accepted_tokens", 0)]
                lanes[lane] = work | {
                    "new_token_ids": [token for token in new if token >= 0]
                }  # not NaN
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{path} is not a timeline of nanovllm, or only a piece of one: {error!r}"
        ) from error
    if not steps:
        raise ValueError(f"{path} holds no steps")
    return steps


def render(steps: list[Step], width: int = 100) -> str:
    """The timeline as text of at most `width` columns."""
    lanes = sorted({lane for step in steps for lane in (*step.lanes, *step.preempted)})
    names = ("num_tokens", "waiting", *_BLOCKS)
    counts = {name.removeprefix("num_"): [step.info[name] for step in steps] for name in names}
    cells = {"step": [str(i) for i in range(len(steps))]}
    cells |= {f"lane {lane}": [_cell(step, lane) for step in steps] for lane in lanes}
    cells |= {name: [str(number) for number in numbers] for name, numbers in counts.items()}
    widths = [max(map(len, column)) + 1 for column in zip(*cells.values())]
    legend = _legend(steps)
    if sum(widths) > (
        room := max(1, width - 10)
    ):  # then a column is one character, which sums up `size` steps
        size = -(-len(steps) // room)
        columns = [slice(first, first + size) for first in range(0, len(steps), size)]
        widths = [1] * len(columns)
        cells["step"] = list("".join(f"{i * size:<10}" for i in range(0, len(columns), 10)))[
            : len(columns)
        ]
        for lane in lanes:  # what sorts first is the most remarkable: "!D", then "A22", then "a"
            cells[f"lane {lane}"] = [
                min(filter(None, cells[f"lane {lane}"][column]), default="")[:1]
                for column in columns
            ]
        for name, numbers in counts.items():
            cells[name] = [
                _BARS[-(-9 * max(numbers[column]) // max(1, *numbers))] for column in columns
            ]
        peaks = ", ".join(f"{name} up to {max(numbers)}" for name, numbers in counts.items())
        legend = [
            f"a column is {size} steps" if size > 1 else "a column is a step",
            f"bars: {peaks}",
            *legend,
        ]
    rows = [
        f"{name:>8} |" + "".join(map(str.ljust, row, widths)).rstrip()
        for name, row in cells.items()
    ]
    return "\n".join([*rows, "", *[line[:width] for line in legend]])


def _letter(request_id: int) -> str:
    return chr(ord("A") + request_id % 26)


def _cell(step: Step, lane: int) -> str:
    """What a lane did in a step."""
    if lane in step.preempted:
        return "!" + _letter(step.preempted[lane]["request_id"])
    if (work := step.lanes.get(lane)) is None:
        return ""
    if work["kind"] == "prefill":
        return f"{_letter(work['request_id'])}{'+' if work['num_reused_tokens'] else ''}{work['num_tokens']}"
    return _letter(work["request_id"]).lower() + (
        f"+{work['num_accepted_tokens']}" if work.get("draft_token_ids") else ""
    )


def _legend(steps: list[Step]) -> list[str]:
    requests: dict[int, list[dict[str, Any]]] = {}
    sums: list[str] = []  # of steps with a full budget
    budget = steps[0].settings["max_num_batched_tokens"]
    for step in steps:
        for work in step.lanes.values():
            requests.setdefault(work["request_id"], []).append(work)
        terms = [
            work["num_tokens"] + len(work.get("draft_token_ids", ()))
            for work in step.lanes.values()
        ]
        if sum(terms) == budget and 1 < len(terms) < 9:
            sums.append(
                f"step {step.info['step']}: {' + '.join(map(str, terms))} = {budget}, the budget is full"
            )
    total = {
        name: sum(step.info[name] for step in steps)
        for name in steps[0].info
        if name.endswith(("_ms", "_tokens"))
    }
    num_right, num_drafts = total["num_accepted_tokens"], total["num_draft_tokens"]
    milliseconds = sum(total[f"{phase}_ms"] for phase in _PHASES) or 1.0
    return [
        "A22: 22 tokens of A's prompt (A+4: 4 behind reused ones); a: a decode, one token; !A: A is preempted",
        *[
            f"a+2: a decode with drafts, 2 of them right; in all {num_right} of {num_drafts} draft tokens right"
        ]
        * (num_drafts > 0),
        "tokens: of the step; after it: waiting requests; used, reusable (can be hit), empty KV cache blocks",
        *sums[:1],
        *[
            f"{_letter(i)}: {works[0]['num_prompt_tokens']} prompt tokens, {works[0]['num_reused_tokens']} of them reused;"
            f" {sum(len(work['new_token_ids']) for work in works)} tokens generated,"
            f" {sum(work['kind'] == 'decode' for work in works)} decodes"
            for i, works in sorted(requests.items())[:8]
        ],
        "a prompt's last step gives the first token, decodes give the others",
        f"{len(steps)} steps, {len(requests)} requests, {total['num_prefill_tokens']} prefill and"
        f" {total['num_decode_tokens']} decode tokens, {sum(len(step.preempted) for step in steps)} preemptions",
        f"{milliseconds:.1f} ms: "
        + ", ".join(f"{phase} {total[f'{phase}_ms'] / milliseconds:.0%}" for phase in _PHASES),
    ]


def draw(steps: list[Step], path: str) -> None:
    """The timeline as a picture. Raises ImportError without matplotlib, ValueError for a suffix that it does not know."""
    from matplotlib.figure import Figure

    num_lanes = 1 + max(lane for step in steps for lane in (*step.lanes, *step.preempted))
    figure = Figure(figsize=(11, 2.6 + 0.28 * min(num_lanes, 32)), layout="constrained")
    lanes, pool = figure.subplots(2, sharex=True, height_ratios=[max(2, min(num_lanes, 32)), 3])
    for x, step in enumerate(steps):
        for lane, work in step.lanes.items():
            alpha, hatch = (
                0.9 if work["kind"] == "prefill" else 0.35,
                "////" if work["num_reused_tokens"] else "",
            )
            lanes.barh(
                lane,
                1,
                left=x,
                color=f"C{work['request_id'] % 10}",
                alpha=alpha,
                hatch=hatch,
                edgecolor="white",
            )
        lanes.plot(
            [x] * len(step.preempted), list(step.preempted), "kx", markersize=7, markeredgewidth=2
        )
    lanes.set(
        xlim=(0, len(steps)),
        ylim=(num_lanes - 0.5, -0.5),
        ylabel="lane",
        yticks=range(0, num_lanes, -(-num_lanes // 16)),
    )
    figure.suptitle(
        "dark: prefill, hatched behind reused tokens; light: decode; x: preempted; a color is a request",
        size=9,
    )
    counters = [[step.info[name] for step in (*steps, steps[-1])] for name in _BLOCKS]
    pool.stackplot(
        range(len(steps) + 1),
        counters,
        step="post",
        labels=_BLOCKS,
        colors=("#4c72b0", "#a9bfe0", "#eeeeee"),
    )
    pool.set(xlabel="step", ylabel="blocks", ylim=(0, sum(series[0] for series in counters)))
    figure.legend(loc="outside lower right", fontsize=8, ncols=3)
    figure.savefig(path, dpi=200)


# Of a sequence's share of a step.
_ORDINARY = {
    "kind": "decode",
    "num_tokens": 1,
    "num_reused_tokens": 0,
    "num_left": 0,
    "draft_token_ids": [],
    "full_blocks": [],
}


def make_page(timelines: list[list[Step]]) -> str:
    """The timelines as one HTML page that needs nothing else."""
    runs = [
        {"settings": steps[0].settings, "steps": [_shorten(step) for step in steps]}
        for steps in timelines
    ]
    data = json.dumps(runs, separators=(",", ":")).replace("</", "<\\/")
    return Path(__file__).with_name("page.html").read_text("utf-8").replace("TIMELINES", data)


def _shorten(step: Step) -> dict[str, Any]:
    """As page.html has it: a row is a request's id, its new tokens, and what is out of the ordinary."""
    rows = []
    for lane, work in step.lanes.items():
        rest = {name: value for name, value in work.items() if _ORDINARY.get(name) != value}
        row = [rest.pop("request_id"), rest.pop("new_token_ids")]
        rows.append([*row, {"lane": lane, **rest}] if rest else row)
    return {
        **step.info,
        "rows": rows,
        "preempted": [{"lane": lane, **args} for lane, args in step.preempted.items()],
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "trace", type=Path, nargs="+", help="the file of LLM(..., trace=...); two for a page"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="make a page, .html, or draw it to a .png, .svg or .pdf instead",
    )
    args = parser.parse_args(argv)
    try:
        timelines = [read(path) for path in args.trace]
        if (args.output or "").endswith(".html"):
            Path(args.output).write_text(make_page(timelines), "utf-8")
        elif len(timelines) > 1:
            raise ValueError("only a page (-o timeline.html) shows more than one trace")
        elif args.output:
            draw(timelines[0], args.output)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    if not args.output:
        print(render(timelines[0], shutil.get_terminal_size((100, 24)).columns))


if __name__ == "__main__":
    run_program(main)
