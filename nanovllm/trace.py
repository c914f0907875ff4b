"""Shows an engine's timeline, the file of `LLM(..., trace="trace.json")`: lanes as rows, steps as columns.

    python -m nanovllm.trace trace.json                     as text that fits the terminal
    python -m nanovllm.trace trace.json -o timeline.html    as a page to walk through; a second trace stands beside the first
    python -m nanovllm.trace trace.json -o timeline.svg     as a picture (needs matplotlib: pip install 'nanovllm[plot]')

Each request has a letter: a capital where a step computes a piece of its prompt, or again what a preemption has cost it, and a
small one where it decodes. Where there are more steps than columns, a column sums up several.
"""

import argparse
import json
import shutil
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from nanovllm.terminal import run_program

_BARS = " ▁▂▃▄▅▆▇█"
_BLOCKS = ("used", "reusable", "empty")
_PHASES = ("schedule", "prepare", "forward", "sample")


@dataclass
class Step:
    info: dict[str, Any]  # kind, tokens, milliseconds, queues; the counters after it
    settings: dict[str, Any]  # of the engine
    lanes: dict[int, dict[str, Any]] = field(default_factory=dict)  # what each lane computed, with its "kind"
    preempted: dict[int, dict[str, Any]] = field(default_factory=dict)  # lane -> request_id, blocks, is_nan


def read(path: str | Path) -> list[Step]:
    """The steps of a timeline. Raises ValueError if the file is not one, OSError if it cannot be read."""
    steps: list[Step] = []
    settings: dict[str, Any] = {}
    info: dict[str, Any] = {"starts_over": False}
    sequences: dict[int, tuple[int, int]] = {}  # how many tokens are computed, and how many there are
    try:
        for event in json.loads(Path(path).read_bytes()):
            lane, args, kind = event["tid"] - 1, event["args"], event["name"].split()[0]
            if "kind" in args:
                steps.append(Step(info | args, settings))
                info = steps[-1].info | {"starts_over": False}  # what the next one does not tell is as it was
                drawn, ends = iter(info["drawn_token_ids"]), dict(info["ended"])
                drafts = {request_id: draft for request_id, *draft in info["accepted"]}
            elif "block_size" in args:
                settings |= args
            elif kind == "started":
                info["starts_over"] = True
            elif event["ph"] == "C":
                steps[-1].info |= args
            elif kind == "preempted":
                steps[-1].preempted[lane] = args
            elif kind in ("prefill", "decode"):
                lanes = steps[-1].lanes
                request_id, num_drafts = args["request_id"], len(args.get("draft_token_ids", ()))
                start, length = sequences.get(request_id, (0, 0))
                if "token_ids" in args:
                    start, length = args["num_reused_tokens"], len(args["token_ids"])
                num_accepted, accepted_blocks = drafts.get(request_id, (0, []))
                has_caught_up = start + args["num_tokens"] == length
                new = list(islice(drawn, 1 + num_drafts))[: 1 + num_accepted] if has_caught_up else []
                new = [token for token in new if token >= 0]  # not NaN
                sequences[request_id] = start + args["num_tokens"] + num_accepted, length + len(new)
                lanes[lane] = {"kind": kind, "start": start, "new_token_ids": new, "num_accepted_tokens": num_accepted}
                lanes[lane] |= {"accepted_blocks": accepted_blocks, "finish_reason": ends.get(request_id), **args}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} is not a timeline of nanovllm, or only a piece of one: {error!r}") from error
    if not steps or not settings:
        raise ValueError(f"{path} holds no steps")
    return steps


def render(steps: list[Step], width: int = 100) -> str:
    """The timeline as text of at most `width` columns."""
    room = max(1, width - 10)
    per_column = -(-len(steps) // room)
    columns = [steps[first : first + per_column] for first in range(0, len(steps), per_column)]
    lanes = sorted({lane for step in steps for lane in (*step.lanes, *step.preempted)})
    names = {"tokens": "num_tokens", "waiting": "waiting"} | {name: name for name in _BLOCKS}
    counts = {name: [max(step.info[key] for step in column) for column in columns] for name, key in names.items()}
    for size in (5, 2, 1):  # the longest cell of a lane: tokens as well, or only how it goes on, or only who it is
        cells = {"step": [str(i * per_column) for i in range(len(columns))]}
        cells |= {f"lane {lane}": [_cell(column, lane, size) for column in columns] for lane in lanes}
        cells |= {name: [str(number) for number in numbers] for name, numbers in counts.items()}
        widths = [max(map(len, column)) + 1 for column in zip(*cells.values())]
        if sum(widths) <= room:
            break
    else:
        cells["step"] = list("".join(f"{i * per_column:<10}" for i in range(0, len(columns), 10))[: len(columns)])
        cells |= {name: [_BARS[-(-8 * number // max(1, *numbers))] for number in numbers] for name, numbers in counts.items()}
        widths = [1] * len(columns)
    rows = [f"{name:>8} │" + "".join(map(str.ljust, row, widths)).rstrip() for name, row in cells.items()]
    legend = [f"a column is {per_column} steps"] * (per_column > 1)
    legend += ["bars: " + ", ".join(f"{name} up to {max(numbers)}" for name, numbers in counts.items())] * (widths[0] == 1)
    return "\n".join([*rows, "", *[line[:width] for line in legend + _legend(steps)]])


def _letter(request_id: int) -> str:
    return chr(ord("A") + request_id % 26)


def _cell(column: list[Step], lane: int, size: int) -> str:
    """What a lane did in some steps: the most remarkable of it, in at most `size` characters."""
    for step in column:
        if lane in step.preempted:
            return ("!" + _letter(step.preempted[lane]["request_id"]))[:size]
    done = [step.lanes[lane] for step in column if lane in step.lanes]
    if prefills := [work for work in done if work["kind"] == "prefill"]:
        name = _letter(prefills[0]["request_id"]) + "+" * any(work["num_reused_tokens"] for work in prefills)
        return (name + str(sum(work["num_tokens"] for work in prefills)) * (size > 2))[:size]
    drafts = [work for work in done if "draft_token_ids" in work]
    accepted = f"+{sum(work['num_accepted_tokens'] for work in drafts)}" if drafts and size > 2 else ""
    return _letter(done[0]["request_id"]).lower() + accepted if done else ""


def _legend(steps: list[Step]) -> list[str]:
    works = [work for step in steps for work in step.lanes.values()]
    first = {work["request_id"]: work for work in reversed(works)}
    decodes = Counter(work["request_id"] for work in works if work["kind"] == "decode")
    tokens = Counter(work["request_id"] for work in works for _ in work["new_token_ids"])
    requests = [
        f"{_letter(i)}: {seq['num_prompt_tokens']} prompt tokens, {seq['num_reused_tokens']} of them reused;"
        f" {tokens[i]} tokens generated, {decodes[i]} decodes"
        for i, seq in sorted(first.items())
    ]
    total = {name: sum(step.info[name] for step in steps) for name in steps[0].info if name.endswith(("_ms", "_tokens"))}
    milliseconds = sum(total[f"{phase}_ms"] for phase in _PHASES) or 1.0
    budget, drafted = steps[0].settings["max_num_batched_tokens"], total["num_draft_tokens"]
    full = [step for step in steps if step.info["num_tokens"] == budget and 1 < len(step.lanes) < 9][:1]
    terms = [[str(work["num_tokens"] + len(work.get("draft_token_ids", ()))) for work in step.lanes.values()] for step in full]
    sums = [f"step {step.info['step']}: {' + '.join(counts)}" for step, counts in zip(full, terms)]
    return [
        "A22: 22 tokens of A's prompt (A+4: 4 behind reused ones); a: a decode, one token; !A: A is preempted",
        *["a+2: a decode with drafts, 2 of them right"] * (drafted > 0),
        "tokens: of the step; waiting: requests; used, reusable (free, can be hit), empty: KV cache blocks",
        *[f"{line} = {budget}, the budget is full" for line in sums],
        *requests[:8],
        *[f"... and {len(requests) - 8} more requests"] * (len(requests) > 8),
        "a prompt's last step gives the first token, decodes give the others",
        f"{len(steps)} steps, {total['num_prefill_tokens']} prefill and {total['num_decode_tokens']} decode tokens,"
        f" {sum(len(step.preempted) for step in steps)} preemptions"
        + f", {total['num_accepted_tokens']} of {drafted} draft tokens right"
        * (drafted > 0),
        f"{milliseconds:.1f} ms: " + ", ".join(f"{phase} {total[f'{phase}_ms'] / milliseconds:.0%}" for phase in _PHASES),
    ]


def draw(steps: list[Step], path: str) -> None:
    """The timeline as a picture. Raises ImportError without matplotlib, ValueError for a suffix that it does not know."""
    from matplotlib.figure import Figure

    num_lanes = 1 + max(lane for step in steps for lane in (*step.lanes, *step.preempted))
    figure = Figure(figsize=(11, 2.6 + 0.28 * min(num_lanes, 32)), layout="constrained")
    lanes, pool = figure.subplots(2, sharex=True, height_ratios=[max(2, min(num_lanes, 32)), 3])
    for x, step in enumerate(steps):
        for lane, work in step.lanes.items():
            is_prefill, color = work["kind"] == "prefill", f"C{work['request_id'] % 10}"
            lanes.barh(lane, 1, left=x, color=color, alpha=0.9 if is_prefill else 0.35, edgecolor="white")
            if num_reused := work["num_reused_tokens"]:  # hatched: the reused share of all tokens so far
                share = num_reused / (num_reused + work["num_tokens"])
                lanes.barh(lane, share, left=x, color="white", edgecolor=color, hatch="////", linewidth=0)
            if is_prefill and len(steps) <= 60:
                lanes.text(x + 0.5, lane, work["num_tokens"], ha="center", va="center", fontsize=7)
        lanes.plot([x] * len(step.preempted), list(step.preempted), "kx", markersize=7, markeredgewidth=2)
    lanes.set(xlim=(0, len(steps)), ylim=(num_lanes - 0.5, -0.5), ylabel="lane", yticks=range(0, num_lanes, -(-num_lanes // 16)))
    figure.suptitle("dark: prefill, with its tokens; hatched: reused; light: decode; x: preempted; a color is a request", size=9)
    counters = [[step.info[name] for step in (*steps, steps[-1])] for name in _BLOCKS]
    pool.stackplot(range(len(steps) + 1), counters, step="post", labels=_BLOCKS, colors=("#4c72b0", "#a9bfe0", "#eeeeee"))
    pool.set(xlabel="step", ylabel="blocks", ylim=(0, sum(series[0] for series in counters)))
    figure.legend(loc="outside lower right", fontsize=8, ncols=3)
    figure.savefig(path, dpi=200)


_QUEUES = {"waiting_requests": "waiting", "running_requests": "running", "next_free_blocks": "free"}
_ORDINARY: dict[str, Any] = {  # as most shares of a sequence are
    "kind": "decode", "num_tokens": 1, "num_new_tokens": 1, "num_reused_tokens": 0,
    "num_accepted_tokens": 0, "accepted_blocks": [], "finish_reason": None,
}  # fmt: skip
_KNOWN = ("request_id", "start", "token_ids", "new_token_ids")  # a page has these from elsewhere


def make_page(timelines: list[list[Step]]) -> str:
    """The timelines as one HTML page that needs nothing else."""
    data = json.dumps([_shorten(steps) for steps in timelines], separators=(",", ":")).replace("</", "<\\/")
    return Path(__file__).with_name("page.html").read_text().replace("TIMELINES", data)


def _shorten(steps: list[Step]) -> dict[str, Any]:
    """What page.html replays: of each step only what is out of the ordinary, and the sequences' tokens once."""
    tokens: dict[int, list[int]] = {}
    known: dict[str, Any] = {}  # queues, as last told
    short: list[dict[str, Any]] = []
    for step in steps:
        rows = {}
        for lane, work in step.lanes.items():
            request_id, new = work["request_id"], work["new_token_ids"]
            row = {**work, "num_new_tokens": len(new)}
            if "token_ids" in work:  # it is admitted
                tokens[request_id] = list(work["token_ids"])
                row |= {"lane": lane, "length": len(work["token_ids"])}
            tokens[request_id] += new
            row = {name: value for name, value in row.items() if name not in _KNOWN and _ORDINARY.get(name, "") != value}
            if row:
                rows[request_id] = row
        queues = {short_name: step.info[name] for name, short_name in _QUEUES.items()}
        queues["order"] = [work["request_id"] for work in step.lanes.values()]
        info = {name: step.info[name] for name in ("starts_over", "waiting", "used", "reusable")}
        info["queues"] = {name: queue for name, queue in queues.items() if queue != known.get(name)}
        short.append({**info, "rows": rows, "preempted": [{"lane": lane, **args} for lane, args in step.preempted.items()]})
        known = queues
    return {"settings": steps[0].settings, "tokens": tokens, "steps": short}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="+", help="the file of LLM(..., trace=...); two for a page")
    parser.add_argument("-o", "--output", metavar="FILE", help="make a page, .html, or draw it to a .png, .svg or .pdf instead")
    args = parser.parse_args(argv)
    try:
        timelines = [read(path) for path in args.trace]
        if (args.output or "").endswith(".html"):
            Path(args.output).write_text(make_page(timelines))
        elif len(timelines) > 1:
            raise ValueError("only a page (-o timeline.html) shows more than one trace")
        elif args.output:
            draw(timelines[0], args.output)
    except (ImportError, OSError, ValueError) as error:
        advice = ": -o needs matplotlib: pip install 'nanovllm[plot]'" if isinstance(error, ImportError) else ""
        parser.error(f"{error}{advice}")
    if not args.output:
        print(render(timelines[0], shutil.get_terminal_size((100, 24)).columns))


if __name__ == "__main__":
    run_program(main)
