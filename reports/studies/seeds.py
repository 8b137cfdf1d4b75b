"""Medians over seeds in tables of studies, whose values are None where a seed missed its target: it took forever."""

import math
from collections.abc import Callable, Sequence

from pipebench.train.result import MISSED
from pipebench.train.seeds import median


def middle(values: Sequence[float | None]) -> float | None:
    """Return the median; None where half of the seeds or more missed their target."""
    return median([math.inf if value is None else value for value in values])


def in_range(values: Sequence[float | None], text: Callable[[float], str]) -> str:
    """Return the median and, where seeds differ, the range."""
    found, known = middle(values), [value for value in values if value is not None]
    if found is None or len({*values}) == 1:
        return MISSED if found is None else text(found)
    return f"{text(found)} ({text(min(known))} to {text(max(known)) if len(known) == len(values) else MISSED})"
