"""Checks of what a caller passes in. Each error names the option and says what would be right."""

import sys
from typing import Any


def check_int(name: str, value: Any, minimum: int, optional: bool = False) -> None:
    """Require an int >= `minimum`, or None where `optional`."""
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int{' or None' if optional else ''}, not {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, not {value}")


def check_number(name: str, value: Any, low: float, high: float = sys.float_info.max, open_low: bool = False) -> None:
    """Require a finite number in [low, high], or in (low, high] where `open_low`."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not low <= value <= high or (open_low and value == low):  # the first is false for NaN, too
        raise ValueError(f"{name} must be {'above' if open_low else 'at least'} {low} and at most {high}, not {value}")


def check_bool(name: str, value: Any) -> None:
    """Require True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Require one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")
