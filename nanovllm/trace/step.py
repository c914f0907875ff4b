"""What a trace holds of a step. recorder.py makes it, timeline.py writes it, reader.py reads it."""

from dataclasses import dataclass, field

from nanovllm.engine.feature import Facts

BLOCK_STATES = ("used", "reusable", "empty")


@dataclass
class TracedStep:
    """One step. The names of its facts are those that the page and the text read."""

    info: Facts  # about the whole step
    lanes: dict[int, Facts]  # lane -> what the step does with the sequence in it
    preempted: dict[int, Facts]  # lane -> the sequence that has lost it
    settings: Facts = field(default_factory=dict)  # of the engine, the same for all steps
