"""One call of the Python API at a time: calls in other threads wait until it returns.

Calls share torch's and Python's generators of random numbers and torch's settings. Two at once would train on other
numbers than alone.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Answer = TypeVar("Answer")
_turn = threading.Lock()


class _Thread(threading.local):
    """What is known of a thread: whether it works for the call whose turn it is."""

    is_inside = False


_thread = _Thread()


def in_turn(function: Callable[Given, Answer]) -> Callable[Given, Answer]:
    """Make a function wait until no other thread is in such a function; one that it calls doesn't wait."""

    @wraps(function)
    def waiting(*args: Given.args, **keys: Given.kwargs) -> Answer:
        if _thread.is_inside:
            return function(*args, **keys)
        with _turn, _inside():
            return function(*args, **keys)

    return waiting


def of_this_turn(function: Callable[Given, Answer]) -> Callable[Given, Answer]:
    """Make a function part of the call that passes it on, also in another thread, for which that call waits."""

    @wraps(function)
    def part(*args: Given.args, **keys: Given.kwargs) -> Answer:
        with _inside():
            return function(*args, **keys)

    return part


@contextmanager
def _inside() -> Iterator[None]:
    before, _thread.is_inside = _thread.is_inside, True
    try:
        yield
    finally:
        _thread.is_inside = before
