"""The state slots: where the recurrent states of a model such as Qwen3.5 are kept.

Each layer with a recurrent state has one tensor with a row for each state slot. A lane, the place
of a running sequence, has one or two of them.

    state slot | 0         1       2 3 4 ...           ...                     ...
               | padding   zeros   one for each lane   a second one (drafts)   snapshots

State slot 0 is read and written by the padding rows of CUDA graphs. The state in slot 1 is zeros
and is never written. There are as many snapshots as lanes. features/recurrent_states.py says how
state slots are used. They have nothing in common with the slots of `slot_mapping`, which are those
of K/V.
"""

from dataclasses import dataclass

from nanovllm.config import Config

ZEROS = 1
FIRST_LANE = 2  # the state slot of lane 0


@dataclass(frozen=True)
class StateSlots:
    """The state slots for the options of an engine and its number of lanes."""

    config: Config
    num_lanes: int

    def second(self, lane: int) -> int:
        """The second state slot of a lane, which it has if there are drafts."""
        return FIRST_LANE + self.num_lanes + lane

    @property
    def snapshots(self) -> range:
        start = FIRST_LANE + self.num_lanes
        if self.config.num_speculative_tokens:
            start += self.num_lanes
        num_snapshots = self.num_lanes if self.config.enable_prefix_caching else 0
        return range(start, start + num_snapshots)

    @property
    def count(self) -> int:
        """The number of all state slots."""
        return self.snapshots.stop
