"""Rows generated from lists: `for: {gpus: [1, 2, 4]}` makes a row per element, `$gpus` stands for it.

Several lists are zipped, as by `pipebench run --zip`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pipebench.errors import nearest
from pipebench.recipe.typecheck import problem_with, shown
from pipebench.report.reading import Reading

MOST_ROWS = 500  # per report; more must be a mistake
_NAME = re.compile(r"\$([A-Za-z_]\w*)", re.ASCII)
_Plain = str | int | float | bool | None


def generated(data: Mapping[str, Any], key: str, reading: Reading) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each row of an entry of `rows` with its values; one row without a `for`. Faults go to `reading`."""
    fixed = reading.mapping(data.get("at"), f"{key}.at")
    for name, value in list(fixed.items()):
        problem = problem_with(value, str | int | float)
        if problem is not None:
            reading.fault(f"{key}.at.{name}", problem)
            del fixed[name]
    lists = reading.mapping(data.get("for"), f"{key}.for")
    row = {name: value for name, value in data.items() if name not in ("for", "at")}
    if not lists:
        yield substituted(row, fixed, key, reading), fixed
        return
    problem = _list_problem(lists)
    if problem is not None:
        reading.fault(f"{key}.for", problem)
        return
    for values in zip(*lists.values(), strict=True):
        at = {**fixed, **dict(zip(lists, values, strict=True))}
        yield substituted(row, at, key, reading), at


def substituted(given: Any, at: Mapping[str, Any], key: str, reading: Reading) -> Any:
    """Return data with `$name` replaced by its value, whose type stays if it is the whole text."""
    if isinstance(given, dict):
        return {name: substituted(value, at, f"{key}.{name}", reading) for name, value in given.items()}
    if isinstance(given, list):
        return [substituted(value, at, key, reading) for value in given]
    if not isinstance(given, str):
        return given
    for name in _NAME.findall(given):
        if name not in at:
            allowed = (
                f"allowed are {', '.join(f'${each}' for each in at)}" if at else "the row has no `for` and no `at`"
            )
            reading.fault(key, f"got ${name}, {allowed}{nearest(name, at)}")
            return given
    whole = _NAME.fullmatch(given)
    return at[whole[1]] if whole else _NAME.sub(lambda found: _text(at[found[1]]), given)


def _list_problem(lists: Mapping[str, Any]) -> str | None:
    """Return a fault of the lists of a `for`, or None."""
    for name, values in lists.items():
        if not isinstance(values, list) or not values or not all(isinstance(each, _Plain) for each in values):
            return f"got {shown(values)} for {name}, allowed is a list of plain values, one per row"
    lengths = {name: len(values) for name, values in lists.items()}
    if len({*lengths.values()}) > 1:
        lengths_text = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        return f"takes the lists' elements together, so they must be equally long: {lengths_text}"
    return None


def _text(value: _Plain) -> str:
    return shown(value) if value is None or isinstance(value, bool) else str(value)
