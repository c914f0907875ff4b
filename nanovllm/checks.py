"""Checks of what comes from outside: options, sampling parameters, the files of a checkpoint.

An error names the value and says what would be right. The checks of numbers return plain Python ones: NumPy's are
accepted too, but overflow where an int does not. (isinstance is asked for int and float first: the abstract classes are slow.)
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from numbers import Integral, Real
from typing import TypeVar

T = TypeVar("T")


def checked(default: T, check: Callable[..., object], **limits: object) -> T:
    """A field of a `Checked` dataclass: `check` takes its name, its value and `limits`, and returns the value to keep."""
    return field(default=default, metadata={"check": partial(check, **limits)})


@dataclass(frozen=True)
class Checked:
    """A dataclass whose fields are checked when it is made. A default, often None, is right."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if "check" in each.metadata and value is not each.default:
                object.__setattr__(self, each.name, each.metadata["check"](each.name, value))


def check_int(name: str, value: object, minimum: int, maximum: float = math.inf) -> int:
    """Require an int in [minimum, maximum]."""
    if not isinstance(value, (int, Integral)) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {value!r}")
    return int(check_number(name, int(value), minimum, maximum))


def check_ints(name: str, values: Iterable[object], minimum: int) -> list[int]:
    """Require a list of ints >= `minimum`, or a tuple, a set or an array of them."""
    return [
        check_int(f"each of {name}", value, minimum)
        for value in check_type(name, values, (Iterable,), "a list of ints")
    ]


def check_number(
    name: str, value: object, low: float, high: float = 1e300, open_low: bool = False
) -> float:
    """Require a finite number in [low, high], or in (low, high] where `open_low`. An int stays one, however large."""
    if not isinstance(value, (int, float, Real)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {value!r}")
    number = (
        value if isinstance(value, int) else float(value)
    )  # float16 cannot be compared with `high`
    if not low <= number <= high or (open_low and number == low):  # the first is false for NaN, too
        limits = f"{'above' if open_low else 'at least'} {low}" + f" and at most {high}" * (
            high < math.inf
        )
        raise ValueError(f"{name} must be {limits}, not {value}")
    return number


def check_type(name: str, value: T, types: tuple[type, ...], meaning: str) -> T:
    """Require one of `types`."""
    if not isinstance(value, types):
        raise TypeError(f"{name} must be {meaning}, not {value!r}")
    return value


check_bool = partial(check_type, types=(bool,), meaning="True or False")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Require one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")
    return value


def check_text(name: str, value: str) -> str:
    """Require a str without a lone surrogate, half of a character that was cut in two: no UTF-8 can be written of it."""
    with naming(f"{name} holds a lone surrogate", UnicodeEncodeError):
        value.encode()
    return value


@contextmanager
def naming(source: object, *errors: type[Exception]) -> Iterator[None]:
    """Within it, `errors` become ValueErrors that name `source`, the file or directory that is to blame."""
    try:
        yield
    except errors as error:
        raise ValueError(f"{source}: {error}") from error
