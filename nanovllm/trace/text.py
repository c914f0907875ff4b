"""Shows a trace as text: lanes as rows, steps as columns. ASCII, which every terminal has."""

from itertools import accumulate
from textwrap import wrap

from nanovllm.trace.step import TracedStep, Work

_NAME_WIDTH = 10  # width of the column of row names
# What the cells of lanes can contain, by examples.
_LEGEND = (
    "A22: prefill of 22 tokens of A; A+4: prefill of 4 tokens after a hit; A16*: prefill of 16"
    " tokens whose state is kept as a snapshot; a: decode; a+2: decode with 2 accepted draft"
    " tokens; !A: preemption"
)
_COUNTERS = (
    "after the step: waiting requests; used, reusable (free, in the prefix cache), empty blocks;"
    " window: used blocks of the second pool during the step, for layers with a sliding window"
)


def render(steps: list[TracedStep], width: int = 100) -> str:
    """Render the first steps, as many as fit into `width` columns, and a legend."""
    columns = [_describe_step(index, step) for index, step in enumerate(steps)]
    lanes = sorted({work.lane for step in steps for work in step.work})
    names = dict.fromkeys(["step", *[f"lane {lane}" for lane in lanes], *columns[0]])
    widths = [max(map(len, column.values())) + 1 for column in columns]
    num_shown = len([end for end in accumulate(widths) if end <= width - _NAME_WIDTH])
    lines: list[str] = []
    for name in names:
        cells = [column.get(name, "").ljust(size) for column, size in zip(columns, widths)]
        lines.append(f"{name:>8} |{''.join(cells[:num_shown])}".rstrip())
    lines.append("")
    if num_shown < len(steps):
        more = f"{num_shown} of {len(steps)} steps are shown: -o timeline.html shows all"
        lines += wrap(more, width)
    return "\n".join(lines + wrap(_LEGEND, width) + wrap(_COUNTERS, width))


def _describe_step(index: int, step: TracedStep) -> dict[str, str]:
    """Return the cells of a column, by row."""
    lanes = {f"lane {work.lane}": _describe(work) for work in step.work}
    counters = {"tokens": step.num_tokens, "waiting": step.sequences["waiting"], **step.blocks}
    if "window_pool" in step.features:
        counters["window"] = step.features["window_pool"]["used"]
    return {"step": str(index), **lanes, **{name: str(n) for name, n in counters.items()}}


def _describe(work: Work) -> str:
    """What a lane does in a step."""
    letter = chr(ord("A") + work.request_id % 26)
    if work.kind == "preempted":
        return f"!{letter}"
    if work.kind == "prefill":
        hit = "+" if work.num_reused_tokens else ""
        cut = "*" if work.features.get("snapshot") else ""
        return f"{letter}{hit}{work.num_tokens}{cut}"
    if work.features.get("draft_token_ids"):
        return f"{letter.lower()}+{work.num_accepted_tokens}"
    return letter.lower()
