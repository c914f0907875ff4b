"""The slots of recurrent states, of which a model such as Qwen3.5 has one tensor per layer.

    slot   | 0         1       2 3 4 ...           ...                     ...
           | padding   zeros   one for each lane   a second one (drafts)   snapshots

Slot 0 is read and written by the padding rows of CUDA graphs. The state of slot 1 is zeros and is
never written. There are as many snapshots as lanes. features/recurrent_states.py says how slots are
used.
"""

from nanovllm.config import Config

ZEROS = 1
FIRST_LANE = 2  # the slot of lane 0


def find_second_slot(lane: int, num_lanes: int) -> int:
    return FIRST_LANE + num_lanes + lane


def count_slots(config: Config, num_lanes: int) -> int:
    return FIRST_LANE + num_lanes * count_slots_per_lane(config)


def count_slots_per_lane(config: Config) -> int:
    num_slots = 1
    if config.num_speculative_tokens:
        num_slots += 1
    if config.enable_prefix_caching:
        num_slots += 1
    return num_slots


def list_snapshot_slots(config: Config, num_lanes: int) -> range:
    end = count_slots(config, num_lanes)
    num_snapshots = num_lanes if config.enable_prefix_caching else 0
    return range(end - num_snapshots, end)
