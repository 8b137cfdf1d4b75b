"""Many quick cases as one test: pytest and its workers take 3 ms for each test, more than such a case does."""

from collections.abc import Callable, Iterable
from typing import Any


def in_turn(*cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Let a test run with every case in turn, a tuple of its arguments; a failure says which case it was."""

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
