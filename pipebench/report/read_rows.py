"""Read the rows of a report: their runs, published values, and assumptions about cells."""

import re
import shlex
from collections.abc import Mapping
from typing import Any, get_args

from pipebench.recipe.engines import ENGINES
from pipebench.recipe.typecheck import problem_with, shown
from pipebench.report.definition import Bound, Published, Row, RunReference
from pipebench.report.reading import NO_WORD, WORD, Reading
from pipebench.report.rows import MOST_ROWS, generated, substituted

_ROW = ("name", "title", "for", "at", "runs", "published", "where", "by_construction", "hypothesis", "chosen", "note")
_RUN = ("recipe", "engine", "seeds", "columns", "minibatch")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_BOUNDS = tuple(bound for bound in get_args(Bound) if bound != "exact")
_SAME = "same"
_LARGEST = "largest"


def read_rows(data: Mapping[str, Any], reading: Reading) -> tuple[Row, ...]:
    """Return the rows of a report, shared runs included; faults go to `reading`."""
    entries = reading.items(data.get("rows"), "rows", "rows, each a mapping")
    if not entries and not reading.faults:
        reading.fault("rows", "is missing or empty, needed is a list of rows")
    shared = reading.mapping(data.get("runs"), "runs")
    rows: dict[str, Row] = {}
    for index, entry in enumerate(entries):
        key = f"rows.{index}"
        for row, at in generated(reading.mapping(entry, key, _ROW), key, reading):
            made = _row(row, at, shared, key, reading)
            if made.name in rows:
                reading.fault(f"{key}.name", f"got {made.name!r}, which an earlier row is named already")
            rows.setdefault(made.name, made)
    if len(rows) > MOST_ROWS:
        reading.fault("rows", f"the lists make {len(rows):,} rows, allowed are at most {MOST_ROWS}")
    return tuple(rows.values())


def _row(data: Mapping[str, Any], at: Mapping[str, Any], shared: Mapping[str, Any], key: str, reading: Reading) -> Row:
    name = data.get("name")
    name = str(name) if isinstance(name, int | float) and not isinstance(name, bool) else name
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        given = "is missing" if name is None else f"got {shown(name)}"
        reading.fault(f"{key}.name", f"{given}, needed are letters, digits and . _ -, beginning with one of the first")
        name = str(name)
    else:
        key = f"rows.{name}"
    runs = {
        run: (f"{key}.runs.{run}", value) for run, value in reading.mapping(data.get("runs"), f"{key}.runs").items()
    }
    for run, value in shared.items():
        if run not in runs:
            runs[run] = (f"runs.{run}", substituted(value, at, f"runs.{run}", reading))
    return Row(
        name=name,
        title=reading.plain(data, key, "title", str, name),
        runs={run: _run(run, *each, reading) for run, each in runs.items() if each[1] is not None},
        published={
            measure: _published(value, f"{key}.published.{measure}", reading)
            for measure, value in reading.mapping(data.get("published"), f"{key}.published").items()
            if value is not None
        },
        where=reading.plain(data, key, "where", str, ""),
        by_construction=_texts(data, key, "by_construction", reading),
        hypothesis=_texts(data, key, "hypothesis", reading),
        chosen=_texts(data, key, "chosen", reading),
        note=reading.plain(data, key, "note", str, ""),
        at=at,
    )


def _run(name: str, key: str, given: object, reading: Reading) -> RunReference:
    if not WORD.fullmatch(name):
        reading.fault(key, NO_WORD)
    data = {"recipe": given} if isinstance(given, str) else reading.mapping(given, key, _RUN)
    words = _split(reading.plain(data, key, "recipe", str), key, reading)
    engine = reading.one_of(data, key, "engine", tuple(ENGINES), "simulated")
    columns = reading.one_of(data, key, "columns", (_SAME,), "")
    minibatch = reading.one_of(data, key, "minibatch", (_LARGEST,), "")
    seeds: Any = data.get("seeds")
    if seeds is not None and (
        problem_with(seeds, list[int]) or not seeds or len({*seeds}) < len(seeds) or min(seeds) < 0
    ):
        reading.fault(f"{key}.seeds", f"got {shown(seeds)}, allowed is a list of different whole numbers from 0 on")
        seeds = None
    if any("=" in word for word in words[:1]):
        reading.fault(key, f"got {words[0][:60]!r} first, needed is a recipe, and then key=value")
    own_keys = {"engine.kind": "engine", "train.seed": "seeds"}
    if minibatch:
        own_keys["train.minibatch_size"] = "minibatch"
    for word in words[1:]:
        own = own_keys.get(word.partition("=")[0])
        if own is not None:
            reading.fault(key, f"got {word[:60]!r}, write `{own}` beside `recipe`")
        elif "=" not in word:
            reading.fault(key, f"got {word[:60]!r} after the recipe, allowed is key=value")
    return RunReference(words, engine, None if seeds is None else tuple(seeds), columns == _SAME, minibatch == _LARGEST)


def _split(text: str, key: str, reading: Reading) -> tuple[str, ...]:
    """Split a command line as a shell does."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        reading.fault(key, f"got {shown(text)}, which no command line holds: {error}")
        return ()


def _published(given: object, key: str, reading: Reading) -> Published:
    bound: Bound = "exact"
    if isinstance(given, dict):
        bounds = [each for each in _BOUNDS if each in given]
        if len(given) != 1 or len(bounds) != 1:
            reading.fault(key, f"got a mapping, allowed is a number, a plan, or one of {{{'|'.join(_BOUNDS)}: number}}")
            return Published(0.0)
        bound = bounds[0]
        given = given[bound]
        key = f"{key}.{bound}"
    problem = problem_with(given, float if bound != "exact" else str | float)
    if problem is not None:
        reading.fault(key, problem)
        return Published(0.0)
    return Published(given, bound)  # type: ignore[arg-type] # checked


def _texts(data: Mapping[str, Any], key: str, name: str, reading: Reading) -> dict[str, str]:
    """Return a mapping to texts."""
    given = reading.mapping(data.get(name), f"{key}.{name}")
    return {each: reading.plain(given, f"{key}.{name}", each, str) for each in given}
