"""Draws a trace as a plot: lanes above, pools of blocks below. Needs matplotlib (extra plot)."""

from nanovllm.trace.step import BLOCK_STATES, Facts, Step
from nanovllm.utils.checks import naming

_COLORS = ("#4c72b0", "#a9bfe0", "#eeeeee")  # in the order of BLOCK_STATES
_MAX_ROWS = 32  # the plot grows up to this number of lanes
_TITLE = (
    "dark: prefill (hatched: after a prefix hit); light: decode; x: preemption;"
    " one color per request"
)


def draw(steps: list[Step], path: str) -> None:
    """Plot the timeline to a file.

    Raises ValueError without matplotlib, or for an unknown suffix.
    """
    with naming("a plot needs pip install 'nanovllm[plot]'", ImportError):
        from matplotlib.figure import Figure

    num_lanes = 1 + max(lane for step in steps for lane in (*step.lanes, *step.preempted))
    num_rows = min(num_lanes, _MAX_ROWS)
    pools = _list_pools(steps)
    figure = Figure(figsize=(11, 1.5 + 0.28 * num_rows + 1.1 * len(pools)), layout="constrained")
    heights = [max(2, num_rows), *[3] * len(pools)]
    lanes, *below = figure.subplots(len(heights), sharex=True, height_ratios=heights)
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
    for axes, (name, counts) in zip(below, pools.items()):
        edges = [*counts, counts[-1]]  # the last counters are repeated at the right edge
        areas = [[each[state] for each in edges] for state in BLOCK_STATES]
        drawn = axes.stackplot(range(len(edges)), areas, step="post", colors=_COLORS)
        axes.set(ylabel=name, ylim=(0, sum(area[0] for area in areas)))
    below[-1].set(xlabel="step")
    figure.suptitle(_TITLE, size=9)
    figure.legend(drawn, BLOCK_STATES, loc="outside lower right", fontsize=8, ncols=3)
    figure.savefig(path, dpi=200)


def _list_pools(steps: list[Step]) -> dict[str, list[Facts]]:
    """Return the counters of each pool: the first after each step, the second during it."""
    pools = {"blocks": [step.info for step in steps]}
    if "window_pool" in steps[0].info:
        pools["window blocks"] = [step.info["window_pool"] for step in steps]
    return pools
