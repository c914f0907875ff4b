"""Shows a trace as text: lanes as rows, steps as columns. ASCII, which every terminal has."""

from itertools import accumulate
from textwrap import wrap
from typing import Any

from nanovllm.trace.reader import BLOCK_STATES, PHASES, Step

_NAME_WIDTH = 10  # width of the column of row names
_MAX_REQUESTS = 8  # longest list of requests in the legend


def render(steps: list[Step], width: int = 100) -> str:
    """Render the steps that fit into `width` columns, the first ones, and a legend of all steps."""
    rows = {"step": [str(index) for index in range(len(steps))]}
    for lane in sorted({lane for step in steps for lane in (*step.lanes, *step.preempted)}):
        rows[f"lane {lane}"] = [_cell(step, lane) for step in steps]
    rows["tokens"] = [str(step.info["num_tokens"]) for step in steps]
    for name in ("waiting", *BLOCK_STATES):
        rows[name] = [str(step.info[name]) for step in steps]
    widths = [max(map(len, column)) + 1 for column in zip(*rows.values())]
    num_shown = sum(end <= width - _NAME_WIDTH for end in accumulate(widths))
    lines: list[str] = []
    for name, row in rows.items():
        line = "".join(cell.ljust(size) for cell, size in zip(row, widths[:num_shown]))
        lines.append(f"{name:>8} |{line}".rstrip())
    lines.append("")
    legend = _legend(steps)
    num_more = len(steps) - num_shown
    if num_more:
        legend.insert(0, f"{num_more} more steps do not fit: -o timeline.html shows all of them")
    for sentence in legend:
        lines += wrap(sentence, width)
    return "\n".join(lines)


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
    works: dict[int, list[dict[str, Any]]] = {}  # the steps of each request
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
