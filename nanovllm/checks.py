"""Checks of what comes from outside: options, sampling parameters, the files of a checkpoint.

An error names the value and says what would be right. The checks of numbers return plain Python ones: NumPy's are
accepted too, but overflow where an int does not. (isinstance is asked for int and float first: the abstract classes are slow.)
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any


def check_int(name: str, value: Any, minimum: int, maximum: int | None = None, optional: bool = False) -> int | None:
    """Require an int >= `minimum` and, where one is given, <= `maximum`, or None where `optional`."""
    if optional and value is None:
        return None
    if not isinstance(value, (int, Integral)) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int{' or None' if optional else ''}, not {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, not {value}")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name} must be at most {maximum}, not {value}")
    return int(value)


def check_ints(name: str, values: Any, minimum: int) -> list[int] | None:
    """Require a list of ints >= `minimum`, or a tuple, a set or an array of them, or None."""
    if values is None:
        return None
    try:
        values = list(values)
    except TypeError as error:
        raise TypeError(f"{name} must be a list of ints, not {values!r}") from error
    return [check_int(name, value, minimum) for value in values]


def check_number(name: str, value: Any, low: float, high: float = sys.float_info.max, open_low: bool = False) -> float:
    """Require a finite number in [low, high], or in (low, high] where `open_low`."""
    if not isinstance(value, (int, float, Real)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {value!r}")
    number = value if isinstance(value, int) else float(value)  # float16 cannot be compared with `high`
    if not low <= number <= high or (open_low and number == low):  # the first is false for NaN, too
        raise ValueError(f"{name} must be {'above' if open_low else 'at least'} {low} and at most {high}, not {value}")
    return float(number)


def check_bool(name: str, value: Any) -> bool:
    """Require True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Require one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")
    return value


def check_text(name: str, value: str) -> str:
    """Require a str that can be written as UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a pair of surrogates: a character that was cut in two
        shown = value[max(0, error.start - 10) : error.end + 10]
        raise ValueError(f"{name} holds half a character at position {error.start}, a lone surrogate: {shown!r}") from error
    return value


@contextmanager
def naming(source: str | Path, *errors: type[Exception]) -> Iterator[None]:
    """Within it, `errors` become ValueErrors that name `source`, the file or directory that is to blame."""
    try:
        yield
    except errors as error:
        raise ValueError(f"{source}: {error}") from error
