"""The form of a trace. recorder.py fills it, timeline.py writes it, and reader.py reads it back.

Text and page show it. The names of fields are those in the file and in the data of page.html.
"""

from dataclasses import dataclass, field

from nanovllm.engine.feature import Facts

FullBlock = tuple[int, bool, str]  # its id, whether it is cached, and its hash


@dataclass
class Work:
    """What a step does with a sequence. The defaults are those of a decode within a block."""

    request_id: int
    lane: int
    start: int = 0  # position of the first token that it computes
    kind: str = "decode"  # or "prefill" or "preempted"
    num_tokens: int = 1  # that it computes, without the draft
    blocks: list[int] = field(default_factory=list)  # allocated or, if it is preempted, released
    full_blocks: list[FullBlock] = field(default_factory=list)  # made full by these tokens
    features: Facts = field(default_factory=dict)  # from `describe` of the engine's features
    # Only of a sequence that the step admits.
    num_reused_tokens: int = 0  # of a prefix hit
    num_prompt_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)  # all of its tokens
    # The result. Accepted draft tokens are among the new ones.
    new_token_ids: list[int] = field(default_factory=list)
    num_accepted_tokens: int = 0
    late_blocks: list[FullBlock] = field(default_factory=list)  # made full or cached by the result
    finish_reason: str | None = None


@dataclass
class TracedStep:
    """One step."""

    step: int  # its number
    is_reset: bool  # whether the KV cache was emptied before it
    start_us: int
    schedule_ms: float
    prepare_ms: float
    forward_ms: float
    sample_ms: float
    kind: str  # "prefill", "decode" or "mixed"
    num_tokens: int  # that it computes, with drafts
    waiting_requests: list[tuple[int, int]]  # the first ones: ids and numbers of tokens
    running_requests: list[int]
    next_free_blocks: list[int]
    features: Facts  # from `describe` of the engine's features
    work: list[Work]
    preempted: list[Work]
    # The result
    texts: dict[int, str] = field(default_factory=dict)  # of tokens that no earlier step has
    sequences: dict[str, int] = field(default_factory=dict)  # numbers of waiting, running ones
    blocks: dict[str, int] = field(default_factory=dict)  # numbers of used, reusable, empty ones


@dataclass
class Trace:
    """The steps of an engine."""

    settings: Facts
    steps: list[TracedStep]
