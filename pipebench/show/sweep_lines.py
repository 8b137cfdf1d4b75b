"""A sweep over a quantity as lines along it, one per mode for example, and which line is best where."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from pipebench.show.comparison import RunGroup, groups
from pipebench.train.result import RunResult
from pipebench.units import quantity

_RATE = "throughput_samples_per_s"
NONE = "none"  # in place of a line's name where no line reached the target
_SAME = 1e-3  # relative difference below which the line that was best before stays best
_EQUAL = 1e-9  # relative difference of rounding: lines this close, such as modes with one plan, are best together
_TOGETHER = " and "


class SweepPoint(NamedTuple):
    """A row of a sweep: the swept quantity and the row's result."""

    x: float  # the quantity as a number, in its base unit
    text: str  # the quantity as written in the recipe
    value: float | None  # median over seeds; None if half or more missed the target
    is_partial: bool = False  # whether some seeds reached the target, and some missed it
    span: tuple[float, float] | None = None  # smallest and largest value over seeds; None if they are equal


@dataclass(frozen=True)
class Sweep:
    """The time to accuracy, or the throughput without a target, along a swept quantity."""

    key: str  # the recipe's key that is swept
    metric: str  # `time_to_accuracy_s` or `throughput_samples_per_s`
    lines: dict[str, list[SweepPoint]]  # by the values of all other keys that vary; points in order of the quantity

    @property
    def has_choice(self) -> bool:
        """Whether several lines have the same value of the quantity; not if the sweep zips its lists."""
        places = Counter(point.x for line in self.lines.values() for point in line)
        return max(places.values(), default=0) > 1

    @property
    def is_partial(self) -> bool:
        """Whether at some point some seeds reached the target and some missed it."""
        return any(point.is_partial for line in self.lines.values() for point in line)

    def first_places(self) -> Iterator[tuple[str, str, str]]:
        """Yield the best lines in order of the quantity: name, and the first and last value of the range, as written.

        The name is `none` where no line reached the target with most of its seeds. Equal lines are named together.
        """
        sign = 1 if self.metric == "time_to_accuracy_s" else -1
        points = sorted(
            (point.x, math.inf if point.value is None else sign * point.value, name, point.text)
            for name, line in self.lines.items()
            for point in line
        )
        name, since, until = "", "", ""
        for _, here in groupby(points, key=itemgetter(0)):
            costs = {each: (cost, text) for _, cost, each, text in here}
            best = next(iter(costs))
            least, text = costs[best]
            most = least + _EQUAL * abs(least)
            equal = [each for each in self.lines if each in costs and costs[each][0] <= most]
            if least == math.inf:
                best = NONE
            elif len(equal) > 1:
                best = together(equal)
            elif name in costs and costs[name][0] - least <= _SAME * abs(least):
                best = name  # so that nearly equal lines don't take turns
            if best != name and name:
                yield name, since, until
            name, since, until = best, text if best != name else since, text
        if name:
            yield name, since, until


def together(names: Sequence[str]) -> str:
    """Return the name of lines that are best together.

    >>> together(["dp"]), together(["dp", "pipedream", "hybrid"])
    ('dp', 'dp, pipedream and hybrid')
    """
    return _TOGETHER.join(filter(None, (", ".join(names[:-1]), names[-1])))


def sweep_of(group: RunGroup) -> Sweep | None:
    """Return the rows of a group as a sweep; None if no quantity varies."""
    entries = group.entries
    texts: dict[str, set[str]] = {}
    for entry in entries:
        for key, text in entry.varied.items():
            texts.setdefault(key, set()).add(text)
    swept = [key for key, each in texts.items() if len(each) > 1 and None not in map(quantity, each)]
    if not swept or not all(swept[0] in entry.varied for entry in entries):
        return None
    key = swept[0]
    metric = "time_to_accuracy_s" if any(row.num_targeted for row in group.rows) else _RATE
    recipes = len({entry.recipe_name for entry in entries}) > 1
    others = [other for other in texts if other != key and len(texts[other]) > 1]
    # A mode's name needs no key before it, a number does.
    named_by_key = len(others) > 1 or any(quantity(text) is not None for other in others for text in texts[other])
    lines: dict[str, list[SweepPoint]] = {}
    for row, entry in zip(group.rows, entries, strict=True):
        named = [entry.recipe_name] if recipes or not others else []
        named += [f"{other}={entry.varied[other]}" if named_by_key else entry.varied[other] for other in others]
        value, x = getattr(row, metric), quantity(entry.varied[key])
        if x is not None:
            point = SweepPoint(x, entry.varied[key], value, row.is_partial, row.ranges.get(metric))
            lines.setdefault(", ".join(named), []).append(point)
    return Sweep(key, metric, {name: sorted(line) for name, line in lines.items()})


def sweeps_of(results: Sequence[RunResult]) -> list[Sweep]:
    """Return the groups of a comparison that are sweeps over a quantity and have values to draw."""
    found = filter(None, map(sweep_of, groups(results)))
    return [each for each in found if any(point.value is not None for line in each.lines.values() for point in line)]
