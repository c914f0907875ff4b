"""Draws a trace as a plot: lanes above, the pool of blocks below. Needs matplotlib (extra plot)."""

from nanovllm.trace.step import BLOCK_STATES, TracedStep
from nanovllm.utils.checks import naming

_COLORS = ("#4c72b0", "#a9bfe0", "#eeeeee")  # in the order of BLOCK_STATES
_MAX_ROWS = 32  # the plot grows up to this number of lanes
_TITLE = (
    "dark: prefill (hatched: after a prefix hit); light: decode; x: preemption;"
    " one color per request"
)


def draw(steps: list[TracedStep], path: str) -> None:
    """Plot the timeline to a file.

    Raises ValueError without matplotlib, or for an unknown suffix.
    """
    with naming("a plot needs pip install 'nanovllm[plot]'", ImportError):
        from matplotlib.figure import Figure

    num_lanes = 1 + max(lane for step in steps for lane in (*step.lanes, *step.preempted))
    num_rows = min(num_lanes, _MAX_ROWS)
    figure = Figure(figsize=(11, 2.6 + 0.28 * num_rows), layout="constrained")
    lanes, pool = figure.subplots(2, sharex=True, height_ratios=[max(2, num_rows), 3])
    for x, step in enumerate(steps):
        for lane, work in step.lanes.items():
            lanes.barh(
                lane,
                1,
                left=x,
                color=f"C{work['request_id'] % 10}",
                alpha=0.9 if work["kind"] == "prefill" else 0.35,
                hatch="////" if work["num_reused_tokens"] else "",
                edgecolor="white",
            )
        for lane in step.preempted:
            lanes.plot(x, lane, "kx", markersize=7, markeredgewidth=2)
    lanes.set(xlim=(0, len(steps)), ylim=(num_lanes - 0.5, -0.5), ylabel="lane")
    lanes.locator_params(axis="y", integer=True)
    # The counters are those after a step, so the last ones are repeated at the right edge.
    edges = [*steps, steps[-1]]
    counters = {}
    for name in BLOCK_STATES:
        counters[name] = [step.info[name] for step in edges]
    pool.stackplot(
        range(len(edges)), counters.values(), step="post", labels=counters, colors=_COLORS
    )
    pool.set(xlabel="step", ylabel="blocks", ylim=(0, steps[0].settings["num_blocks"]))
    figure.suptitle(_TITLE, size=9)
    figure.legend(loc="outside lower right", fontsize=8, ncols=3)
    figure.savefig(path, dpi=200)
