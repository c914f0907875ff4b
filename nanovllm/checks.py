"""Validates user input: options, sampling parameters and checkpoint files.

An error names the field, its value and the valid values. NumPy numbers are accepted and converted
to Python numbers, because NumPy integers overflow. isinstance is called with int and float first,
because it is slow for abstract base classes.
"""

import ast
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from numbers import Integral, Real
from typing import TypeVar

T = TypeVar("T")


def checked(default: T, check: Callable[..., object], **limits: object) -> T:
    """Define a field of a `Checked` dataclass.

    `check(name, value, **limits)` returns the value to keep, or raises.
    """
    return field(default=default, metadata={"check": partial(check, **limits)})


@dataclass(frozen=True)
class Checked:
    """A dataclass that validates its fields when it is created. A default value is always valid."""

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
    """Require ints >= `minimum` in a list, a tuple, a set or an array."""
    check_type(name, values, (Iterable,), "a list of ints")
    return [check_int(f"each of {name}", value, minimum) for value in values]


def check_number(
    name: str, value: object, low: float, high: float = math.inf, open_low: bool = False
) -> float:
    """Require a finite number in [low, high], or in (low, high] if `open_low`. Keeps an int."""
    if not isinstance(value, (int, float, Real)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {value!r}")
    # float16 cannot be compared with a large `high`.
    number = value if isinstance(value, int) else float(value)
    is_finite = isinstance(number, int) or math.isfinite(number)
    is_inside = low < number <= high if open_low else low <= number <= high
    if not (is_finite and is_inside):
        limits = f"above {low}" if open_low else f"at least {low}"
        if high < math.inf:
            limits += f" and at most {high}"
        elif not is_finite:
            limits += " and finite"
        raise ValueError(f"{name} must be {limits}, not {value}")
    return number


def check_type(name: str, value: T, types: tuple[type, ...], meaning: str) -> T:
    """Require one of `types`. `meaning` names them in the error."""
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
    """Require a str that UTF-8 can encode, which is one without lone surrogates."""
    problem = f"{name} contains a lone surrogate and cannot be encoded as UTF-8"
    with naming(problem, UnicodeEncodeError):
        value.encode()
    return value


def parse_value(text: str) -> object:
    """Read a value of a command line: a Python literal, or else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@contextmanager
def naming(source: object, *errors: type[Exception]) -> Iterator[None]:
    """Turn `errors` into ValueErrors that begin with `source`, such as the file at fault."""
    try:
        yield
    except errors as error:
        raise ValueError(f"{source}: {error}") from error
