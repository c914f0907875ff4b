"""The form of a trace: plain data, the same in an engine, in the file, in text and in the page.

A Trace has steps, and a step has a Work for each sequence that it concerns. Recorder fills them.
The names of fields are those in the file, where a Work and the rest of its step are events, and
those in the data of page.html. Neither needs a change for a new field.

What a feature of the engine describes is in `features`, under the names that its `describe` gives:
the tokens of drafts, the choices of grammars, the slots of recurrent states, the blocks of windows.
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
    kind: str = "decode"  # also "prefill", "preempted"
    num_tokens: int = 1  # tokens that it computes, without the draft
    blocks: list[int] = field(default_factory=list)  # new in the block table, or released
    full_blocks: list[FullBlock] = field(default_factory=list)  # those that its tokens make full
    features: Facts = field(default_factory=dict)
    # Set if the step admits the sequence.
    num_reused_tokens: int = 0  # tokens of a prefix hit
    num_prompt_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)  # all tokens before the step
    # Set when the result of the step is known.
    new_token_ids: list[int] = field(default_factory=list)
    num_accepted_tokens: int = 0  # draft tokens among the new ones
    late_blocks: list[FullBlock] = field(default_factory=list)  # made full or cached by the result
    finish_reason: str | None = None


@dataclass
class TracedStep:
    """One step."""

    step: int  # its number
    is_reset: bool  # whether the KV cache was emptied since the step before
    start_us: int  # microseconds, from an arbitrary time on
    schedule_ms: float
    prepare_ms: float
    forward_ms: float
    sample_ms: float
    kind: str  # "prefill", "decode" or "mixed"
    num_tokens: int  # tokens that it computes, with drafts
    waiting_requests: list[tuple[int, int]]  # id and number of tokens of the first ones
    running_requests: list[int]  # ids, the oldest first
    next_free_blocks: list[int]
    features: Facts
    work: list[Work]  # scheduled sequences, then preempted ones
    # Set when the result of the step is known.
    texts: dict[int, str] = field(default_factory=dict)  # tokens that no earlier step has named
    sequences: dict[str, int] = field(default_factory=dict)  # how many are waiting, running
    blocks: dict[str, int] = field(default_factory=dict)  # how many are used, reusable, empty


@dataclass
class Trace:
    settings: Facts  # the engine's
    steps: list[TracedStep]
