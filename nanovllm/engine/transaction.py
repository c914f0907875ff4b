"""Transactions: changes of an object's state that are made whole or not at all, one at a time.

No other thread and no call from within (a signal handler's, a finalizer's) comes between; one that is cut short, even by
Ctrl-C, is rolled back. What must not wait for its turn, such as an abort, is noted and done at the transaction's end.
"""

import os
import sys
import warnings
from collections import deque
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from traceback import walk_stack
from types import CodeType
from typing import Any, ClassVar, ParamSpec, TypeVar

P, Result = ParamSpec("P"), TypeVar("Result")


class Busy(RuntimeError):
    """Another thread's call, or this thread's own transaction, is not over."""


class Transactional:
    """The base of a class whose methods that change its state are transactions."""

    process: ClassVar[int | None] = None  # that made the first one: OpenMP and CUDA do not survive a fork

    def __init__(self) -> None:
        Transactional.process = os.getpid()
        self._thread = get_ident()  # the last one that was served
        self._is_whole = True  # False: a change has begun and has not come to its end
        self._warnings: deque[str] = deque()  # to be given afterwards, since a warning can be made an error

    @classmethod
    def check_process(cls) -> None:
        """Raises RuntimeError in a process that was forked from one that has made an object."""
        if cls.process not in (None, os.getpid()):
            raise RuntimeError(
                "this process was forked from one that had made an engine, where nothing can be computed any more:"
                " start it with multiprocessing's 'spawn' method"
            )

    def _admit_thread(self) -> None:
        """Raises Busy if another thread is in a method `for_one_thread`."""
        thread = get_ident()
        if self._thread != thread:
            busy = self._is_in(_FOR_ONE_THREAD, self._thread)
            if not busy:
                other, self._thread = self._thread, thread
                if busy := self._is_in(_FOR_ONE_THREAD, other):  # it came between these lines
                    self._thread = other
            if busy:
                raise Busy("another thread is in a call of this engine, which serves one thread at a time")

    def _is_in(self, code: CodeType, thread: int) -> bool:
        """Whether `thread` is in a method of this object that has this code.

        Read off its stack: what would have to be undone at the method's end, such as a lock, Ctrl-C could leave as it is.
        """
        frame = sys._current_frames().get(thread)
        stack = walk_stack(frame) if frame else ()
        return any(each.f_code is code and each.f_locals.get("self") is self for each, _ in stack)

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
        try:
            self._settle()
            self._is_whole = False
            result = change(self, *args)
            self._is_whole = True
            return result
        finally:
            self._settle()


def for_one_thread(method: Callable[P, Result]) -> Callable[P, Result]:
    """Have a method of a Transactional raise Busy while another thread is in one, and RuntimeError in a forked process."""

    @wraps(method)
    def call_for_one_thread(self: Transactional, *args: P.args, **kwargs: P.kwargs) -> Result:
        self.check_process()
        self._admit_thread()
        return method(self, *args, **kwargs)

    return call_for_one_thread


_FOR_ONE_THREAD = for_one_thread(print).__code__  # all that it makes share it


def transaction(change: Callable[..., Result]) -> Callable[..., Result]:
    """Make a method of a Transactional a transaction. It may raise Busy."""

    @for_one_thread
    @wraps(change)
    def call(self: Transactional, *args: Any) -> Result:
        if not self._is_whole and self._is_in(Transactional._transact.__code__, get_ident()):  # else one was cut short
            raise Busy("the engine was called from within its own step")
        result = self._transact(change, args)
        while self._warnings:
            warnings.warn(self._warnings.popleft(), RuntimeWarning, stacklevel=4)
        return result

    return call
