"""Shows a trace as text: lanes as rows, steps as columns. ASCII, which every terminal has."""

from textwrap import wrap
from typing import Any

from nanovllm.arithmetic import cdiv
from nanovllm.trace.reader import BLOCK_STATES, PHASES, Step

_BARS = " .:-=+*#%@"
_NAME_WIDTH = 10  # of the column of row names
_MAX_REQUESTS = 8  # that the legend lists


def render(steps: list[Step], width: int = 100) -> str:
    """Render the timeline as text of at most `width` columns."""
    lanes = sorted({lane for step in steps for lane in (*step.lanes, *step.preempted)})
    lane_cells: dict[int, list[str]] = {}
    for lane in lanes:
        lane_cells[lane] = [_cell(step, lane) for step in steps]
    counts = {"tokens": [step.info["num_tokens"] for step in steps]}
    for name in ("waiting", *BLOCK_STATES):
        counts[name] = [step.info[name] for step in steps]
    legend = _legend(steps)

    rows = {"step": [str(index) for index in range(len(steps))]}
    for lane, cells in lane_cells.items():
        rows[f"lane {lane}"] = cells
    for name, numbers in counts.items():
        rows[name] = [str(number) for number in numbers]
    widths = [max(map(len, column)) + 1 for column in zip(*rows.values())]

    room = max(1, width - _NAME_WIDTH)
    if sum(widths) > room:
        num_merged = cdiv(len(steps), room)  # steps in a column of one character
        rows = _squeeze(lane_cells, counts, num_merged)
        widths = [1] * len(rows["step"])
        legend = [*_squeezed_legend(counts, num_merged), *legend]
    lines: list[str] = []
    for name, row in rows.items():
        line = "".join(cell.ljust(size) for cell, size in zip(row, widths))
        lines.append(f"{name:>8} |{line}".rstrip())
    lines.append("")
    for sentence in legend:
        lines += wrap(sentence, width)
    return "\n".join(lines)


def _squeeze(
    lane_cells: dict[int, list[str]], counts: dict[str, list[int]], num_merged: int
) -> dict[str, list[str]]:
    """Rows of one character per column, each of which stands for `num_merged` steps."""
    num_steps = len(counts["tokens"])
    columns = [slice(start, start + num_merged) for start in range(0, num_steps, num_merged)]
    numbers = [f"{index * num_merged:<10}" for index in range(0, len(columns), 10)]
    rows = {"step": list("".join(numbers))[: len(columns)]}
    for lane, cells in lane_cells.items():
        # The smallest string has priority: "!D" < "A22" < "a".
        least = [min(filter(None, cells[column]), default="") for column in columns]
        rows[f"lane {lane}"] = [cell[:1] for cell in least]
    for name, values in counts.items():
        highest = max(1, *values)
        peaks = [max(values[column]) for column in columns]
        rows[name] = [_BARS[cdiv(9 * peak, highest)] for peak in peaks]
    return rows


def _squeezed_legend(counts: dict[str, list[int]], num_merged: int) -> list[str]:
    steps = f"{num_merged} steps" if num_merged > 1 else "one step"
    peaks = ", ".join(f"{name} {max(numbers)}" for name, numbers in counts.items())
    return [f"one column = {steps}", f"bars: maximum of {peaks}"]


def _letter(request_id: int) -> str:
    return chr(ord("A") + request_id % 26)


def _cell(step: Step, lane: int) -> str:
    """What a lane did in a step."""
    if lane in step.preempted:
        return "!" + _letter(step.preempted[lane]["request_id"])
    work = step.lanes.get(lane)
    if work is None:
        return ""
    letter = _letter(work["request_id"])
    if work["kind"] == "prefill":
        hit = "+" if work["num_reused_tokens"] else ""
        return f"{letter}{hit}{work['num_tokens']}"
    if work.get("draft_token_ids"):
        return f"{letter.lower()}+{work['num_accepted_tokens']}"
    return letter.lower()


def _legend(steps: list[Step]) -> list[str]:
    works: dict[int, list[dict[str, Any]]] = {}  # of each request
    for step in steps:
        for work in step.lanes.values():
            works.setdefault(work["request_id"], []).append(work)
    total: dict[str, float] = {}
    for name in steps[0].info:
        if name.endswith(("_ms", "_tokens")):
            total[name] = sum(step.info[name] for step in steps)
    lines = [
        "A22: prefill of 22 tokens of A; A+4: prefill of 4 tokens after a hit; a: decode;"
        " !A: preemption"
    ]
    num_drafts = total["num_draft_tokens"]
    if num_drafts:
        lines.append(
            "a+2: decode with 2 accepted draft tokens;"
            f" {total['num_accepted_tokens']} of {num_drafts} draft tokens accepted in total"
        )
    lines.append(
        "after the step: waiting requests; used, reusable (free, in the prefix cache), empty blocks"
    )
    for request_id, each in sorted(works.items())[:_MAX_REQUESTS]:
        lines.append(_describe_request(request_id, each))
    num_preemptions = sum(len(step.preempted) for step in steps)
    milliseconds = sum(total[f"{phase}_ms"] for phase in PHASES) or 1.0
    shares = [f"{phase} {total[f'{phase}_ms'] / milliseconds:.0%}" for phase in PHASES]
    return [
        *lines,
        "a step that completes a prefill samples a token, and so does a decode, in addition to"
        " accepted draft tokens",
        f"{len(steps)} steps, {len(works)} requests, {total['num_prefill_tokens']} prefill and"
        f" {total['num_decode_tokens']} decode tokens, {num_preemptions} preemptions",
        f"{milliseconds:.1f} ms: {', '.join(shares)}",
    ]


def _describe_request(request_id: int, works: list[dict[str, Any]]) -> str:
    first = works[0]
    num_generated = sum(len(work["new_token_ids"]) for work in works)
    num_decodes = sum(work["kind"] == "decode" for work in works)
    return (
        f"{_letter(request_id)}: {first['num_prompt_tokens']} prompt tokens"
        f" ({first['num_reused_tokens']} reused), {num_generated} generated tokens,"
        f" {num_decodes} decodes"
    )
