"""Runs code of tokenizers and chat templates, which can raise anything."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class ForeignError(ValueError):
    """Code of a tokenizer or a checkpoint has failed."""


def call_foreign(source: object, call: Callable[[], T]) -> T:
    """Run code of a tokenizer or a checkpoint, and turn its exceptions into ForeignErrors.

    Such code can raise anything, and it runs long enough for a signal handler to raise in the
    middle. The call is therefore repeated: an error of the tokenizer comes again. The exception of
    a handler does not, and is raised as it is.
    """
    try:
        return call()
    except Exception as error:
        try:
            call()
        except type(error):
            raise ForeignError(f"{source}: {error}") from error
        raise
