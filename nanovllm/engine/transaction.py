"""Transactions: changes of an object's state that are made whole or not at all, one at a time.

No other thread and no call from within (a signal handler's, a finalizer's) comes between; one that is cut short, even by
Ctrl-C, is rolled back. What must not wait for its turn, such as an abort, is noted and done at the transaction's end.
"""

import os
import warnings
from collections import deque
from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Any, ClassVar, TypeVar

Result = TypeVar("Result")


class Busy(RuntimeError):
    """Another thread's call, or this thread's own transaction, is not over."""


class OneThread:
    """A context for one thread at a time, which may enter it again. Other threads are refused, and so are forked processes."""

    process: ClassVar[int | None] = None  # that made the first one: OpenMP and CUDA do not survive a fork

    def __init__(self) -> None:
        self.lock = RLock()
        OneThread.process = OneThread.process or os.getpid()
        self.check_process()

    def check_process(self) -> None:
        """Raises RuntimeError in a forked process."""
        if os.getpid() != self.process:
            raise RuntimeError(
                "this process was forked from one that had made an engine, where nothing can be computed any more:"
                " start it with multiprocessing's 'spawn' method"
            )

    def __enter__(self) -> None:
        self.check_process()
        if not self.lock.acquire(blocking=False):
            raise Busy("another thread is in a call of this engine, which serves one thread at a time")

    def __exit__(self, *exception: object) -> None:
        self.lock.release()


class Transactional:
    """The base of a class whose methods that change its state are transactions."""

    def __init__(self) -> None:
        self.one_thread = OneThread()
        self._in_transaction = False
        self._is_whole = True  # False: a change has begun and has not come to its end
        self._warnings: deque[str] = deque()  # to be given afterwards, since a warning can be made an error

    def _roll_back(self) -> None:
        """Undo a change that was cut short anywhere. If this is cut short too, it is called again."""
        raise NotImplementedError

    def _catch_up(self) -> None:
        """Do what had to wait for the end of a transaction."""
        raise NotImplementedError

    def _settle(self) -> None:
        if not self._is_whole:
            self._roll_back()
        self._is_whole = False
        self._catch_up()
        self._is_whole = True

    def _transact(self, change: Callable[..., Result], args: tuple[Any, ...]) -> Result:
        self._in_transaction = True
        try:
            self._settle()
            self._is_whole = False
            result = change(self, *args)
            self._is_whole = True
            return result
        finally:
            self._settle()
            self._in_transaction = False


def transaction(change: Callable[..., Result]) -> Callable[..., Result]:
    """Make a method of a Transactional a transaction. It may raise Busy."""

    @wraps(change)
    def call(self: Transactional, *args: Any) -> Result:
        with self.one_thread:
            if self._in_transaction:
                raise Busy("the engine was called from within its own step")
            try:
                result = self._transact(change, args)
            finally:
                self._in_transaction = False  # again, since Ctrl-C may come in the line where it was done
        while self._warnings:
            warnings.warn(self._warnings.popleft(), RuntimeWarning, stacklevel=3)
        return result

    return call
