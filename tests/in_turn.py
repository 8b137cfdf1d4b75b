"""Runs many quick cases as one test: pytest takes 3 ms per test, more than such a case."""

from collections.abc import Callable, Iterable
from typing import Any


def in_turn(*cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Decorate a test to run with every case, a tuple of its arguments, in turn; a failure names its case."""

    def decorated(test: Callable[..., None]) -> Callable[[], None]:
        def runs() -> None:
            for case in cases:
                try:
                    test(*case)
                except BaseException as error:
                    error.add_note(f"with {', '.join(map(repr, case))}")
                    raise

        runs.__name__, runs.__qualname__, runs.__doc__ = test.__name__, test.__qualname__, test.__doc__
        runs.__module__ = test.__module__
        return runs

    return decorated
