"""Medians over seeds in tables of studies; a seed that missed its target has None, which counts as infinite."""

import math
from collections.abc import Callable, Sequence

from pipebench.train.result import MISSED
from pipebench.train.seeds import median


def middle(values: Sequence[float | None]) -> float | None:
    """Return the median; None if half of the seeds or more missed their target."""
    return median([math.inf if value is None else value for value in values])


def in_range(values: Sequence[float | None], text: Callable[[float], str]) -> str:
    """Return the median and, if seeds differ, the range; `text` formats a value."""
    found, known = middle(values), [value for value in values if value is not None]
    if found is None or len({*values}) == 1:
        return MISSED if found is None else text(found)
    return f"{text(found)} ({text(min(known))} to {text(max(known)) if len(known) == len(values) else MISSED})"
