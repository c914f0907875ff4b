"""Validates user input: options, sampling parameters and checkpoint files.

An error names the field, its value and the valid values. NumPy numbers are accepted and converted
to Python numbers, because NumPy integers overflow. isinstance is called with int and float first,
because it is slow for abstract base classes.
"""

import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, get_args, get_origin

T = TypeVar("T")
C = TypeVar("C", bound="Checked")
MAX_SHOWN = 200  # characters of a value in a message


class _ShortRepr(reprlib.Repr):
    """Looks at a few items of a container only, because clients can send megabytes."""

    def repr_int(self, x: int, level: int) -> str:
        # repr raises ValueError above some thousand digits.
        return repr(x) if x.bit_length() < 256 else f"an int of {x.bit_length()} bits"


_short_repr = _ShortRepr()
_short_repr.maxstring = _short_repr.maxother = 80
_short_repr.maxlevel = 3


def show(value: object) -> str:
    """Return the repr of a value for a message, with at most MAX_SHOWN characters."""
    text = _short_repr.repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def invalid(
    name: str, problem: str, kind: type[Exception] = ValueError, separator: str = " "
) -> Exception:
    """Make an error whose attribute `name` is the option or field at fault."""
    error = kind(f"{name}{separator}{problem}")
    error.name = name  # type: ignore[attr-defined]
    return error


def checked(default: T, check: Callable[..., object], *limits: object) -> T:
    """Define a field of a `Checked` dataclass.

    `check(name, value, *limits)` returns the value to keep, or raises.
    """
    return field(
        default=default, metadata={"check": lambda name, value: check(name, value, *limits)}
    )


@dataclass(frozen=True)
class Checked:
    """A dataclass that validates its fields when it is created. A default value is always valid.

    The values of a bool or a Literal are known from its type. Others need `checked`.
    """

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            check = each.metadata.get("check")
            if each.type is bool:
                check = check_bool
            elif get_origin(each.type) is Literal:
                check = partial(check_choice, choices=get_args(each.type))
            if check and value is not each.default:
                object.__setattr__(self, each.name, check(each.name, value))

    @classmethod
    def from_options(cls: type[C], *args: object, **options: object) -> C:
        """Make an instance. The error for an unknown option lists the valid ones."""
        check_names(options, [each.name for each in fields(cls)])
        return cls(*args, **options)


def check_names(options: Collection[str], valid: Collection[str]) -> None:
    """Require that the names of all options are valid."""
    unknown = sorted(set(options).difference(valid))
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}: valid options are {', '.join(valid)}")


def check_int(name: str, value: object, minimum: float, maximum: float = math.inf) -> int:
    """Require an int in [minimum, maximum]."""
    if not isinstance(value, (int, Integral)) or isinstance(value, bool):
        raise invalid(name, f"must be an int, not {show(value)}", TypeError)
    return int(check_number(name, int(value), minimum, maximum))


def check_ints(
    name: str, values: Iterable[object], minimum: int, max_num: int | None = None
) -> list[int]:
    """Require ints >= `minimum` in a list, a tuple, a set or an array, and at most `max_num`."""
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping)):
        raise invalid(name, f"must be a list of ints, not {show(values)}", TypeError)
    given = list(values)
    if max_num is not None and len(given) > max_num:
        raise invalid(name, f"must have at most {max_num} values, not {len(given)}")
    return [check_int(f"{name}[{index}]", value, minimum) for index, value in enumerate(given)]


def check_number(
    name: str, value: object, low: float, high: float = math.inf, open_low: bool = False
) -> float:
    """Require a finite number in [low, high], or in (low, high] if `open_low`. Keeps an int."""
    if not isinstance(value, (int, float, Real)) or isinstance(value, bool):
        raise invalid(name, f"must be a number, not {show(value)}", TypeError)
    # float16 cannot be compared with a large `high`.
    number = value if isinstance(value, int) else float(value)
    is_above = low < number if open_low else low <= number
    if not (is_above and number <= high and number < math.inf):
        limits = f"above {low}" if open_low else f"at least {low}"
        if high < math.inf:
            limits += f" and at most {high}"
        raise invalid(name, f"must be {limits}, not {show(number)}")
    return number


# In (0, 1].
check_fraction = partial(check_number, low=0.0, high=1.0, open_low=True)


def check_type(name: str, value: T, types: type | tuple[type, ...], meaning: str) -> T:
    """Require one of `types`. `meaning` names them in the error."""
    if not isinstance(value, types):
        raise invalid(name, f"must be {meaning}, not {show(value)}", TypeError)
    return value


check_bool = partial(check_type, types=bool, meaning="True or False")
check_str = partial(check_type, types=str, meaning="a str")


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> Any:
    """Require one of `choices`."""
    if value not in choices:
        raise invalid(name, f"must be one of {', '.join(map(repr, choices))}, not {show(value)}")
    return value


def check_supported(settings: Mapping[str, object], **supported: tuple[object, ...]) -> None:
    """Require supported values. A setting can be absent if None is one of them."""
    for name, values in supported.items():
        check_choice(name, settings.get(name), values)


@contextmanager
def naming(
    source: object, *errors: type[Exception], kind: type[Exception] = ValueError
) -> Iterator[None]:
    """Turn `errors` into errors of `kind` that begin with `source`, such as the file at fault."""
    try:
        yield
    except errors as error:
        raise invalid(str(source), str(error), kind, separator=": ") from error
