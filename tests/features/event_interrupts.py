"""Interrupts at chosen events of the engine's code: calls, lines and returns of functions."""

import inspect
import linecache
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FrameType

import nanovllm

PACKAGE = str(Path(nanovllm.__file__).parent)
ROOMS = ("engine", "features", "worker", "text")
ENGINE = (*[f"{PACKAGE}/{room}/" for room in ROOMS], f"{PACKAGE}/llm.py")
# The engine relies on it that no signal is handled right before these lines. CPython handles
# signals at calls and backward jumps only.
PROTECTED = (
    "with ",  # also traced when the block ends
    "self._threads_inside.discard(thread)",
    "self.inbox[self] = ",
)
Location = tuple[str, int, str]  # file, line, kind of event


class EventInterrupts:
    """Within this context, this thread raises `error` at the first event that `is_chosen` chooses.

    `is_chosen` gets the location of each event in files that start with one of `prefixes`.
    """

    def __init__(
        self,
        is_chosen: Callable[[Location], bool],
        error: type[BaseException] = KeyboardInterrupt,
        prefixes: tuple[str, ...] = (PACKAGE,),
    ) -> None:
        self.is_chosen = is_chosen
        self.error = error
        self.prefixes = prefixes
        self.was_raised = False

    def __enter__(self) -> "EventInterrupts":
        self.previous = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self.previous)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Callable | None:
        path = frame.f_code.co_filename
        if not path.startswith(self.prefixes):
            return None
        if not self.was_raised and is_possible(frame, event):
            if self.is_chosen((path, frame.f_lineno, event)):
                self.was_raised = True
                raise self.error(f"interrupt at the {event} event of {path}:{frame.f_lineno}")
        return self._trace


def is_possible(frame: FrameType, event: str) -> bool:
    """Return whether a signal could be handled about there."""
    if event == "line":
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        return not line.strip().startswith(PROTECTED)
    if event == "return":
        # At a yield, the error would skip the handlers of the generator, which a signal cannot do.
        return not frame.f_code.co_flags & inspect.CO_GENERATOR
    return event == "call"


def at_event(number: int) -> Callable[[Location], bool]:
    """Choose the event with this number, counted from 0."""
    numbers = count()
    return lambda location: next(numbers) == number
