"""Read a report's table: columns, measures, and rows with their runs, some of them generated from lists.

`for: {gpus: [1, 2, 4]}` generates a row per element, in which `$gpus` is replaced by the element. Several lists are
zipped, as by `pipebench run --zip`.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from pipebench.errors import nearest, shown
from pipebench.recipe.engines import ENGINES
from pipebench.recipe.typecheck import problem_with
from pipebench.report.definition import BETTER, REPRODUCED, UNITS, Bound, Column, Measure, Published, Row, RunReference
from pipebench.report.expressions import Expression, value_expression
from pipebench.report.metrics import metric_problem
from pipebench.report.reading import NO_WORD, WORD, Reading, as_title


@dataclass(frozen=True)
class Table:
    """The columns, measures and rows of a report, to which its claims, pictures and texts refer."""

    columns: tuple[Column, ...]
    measures: tuple[Measure, ...]
    rows: Mapping[str, Row]  # by name

    @property
    def units(self) -> dict[str, str]:
        """Units of the measures that are numbers."""
        return {measure.name: measure.unit for measure in self.measures if measure.expression is not None}

    @property
    def runs(self) -> list[str]:
        """Names of the runs that rows have."""
        return [*dict.fromkeys(run for row in self.rows.values() for run in row.runs)]

    @property
    def at(self) -> dict[str, None]:
        """Keys of rows' `at`."""
        return dict.fromkeys(name for row in self.rows.values() for name in row.at)


MOST_ROWS = 500  # per report; more are a mistake
_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)", re.ASCII)
_Plain = str | int | float | bool | None


def _generated(data: Mapping[str, Any], key: str, reading: Reading) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the rows of an entry of `rows`, each with its values of `for` and `at`; without a `for` it is one row."""
    fixed = reading.mapping(data.get("at"), f"{key}.at")
    for name, value in list(fixed.items()):
        problem = problem_with(value, str | int | float)
        if problem is not None:
            reading.fault(f"{key}.at.{name}", problem)
            del fixed[name]
    lists = reading.mapping(data.get("for"), f"{key}.for")
    row = {name: value for name, value in data.items() if name not in ("for", "at")}
    if not isinstance(data.get("for"), dict | None):
        return
    if not lists:
        yield _substituted(row, fixed, key, reading), fixed
        return
    problem = _list_problem(lists)
    if problem is not None:
        reading.fault(f"{key}.for", problem)
        return
    for values in zip(*lists.values(), strict=True):
        at = {**fixed, **dict(zip(lists, values, strict=True))}
        yield _substituted(row, at, key, reading), at


def _substituted(given: Any, at: Mapping[str, Any], key: str, reading: Reading) -> Any:
    """Return data with each `$name` replaced by its value; a text that is `$name` alone takes the value's type."""
    if isinstance(given, dict):
        return {name: _substituted(value, at, f"{key}.{name}", reading) for name, value in given.items()}
    if isinstance(given, list):
        return [_substituted(value, at, key, reading) for value in given]
    if not isinstance(given, str):
        return given
    for name in _VARIABLE.findall(given):
        if name not in at:
            allowed = (
                f"allowed are {', '.join(f'${each}' for each in at)}" if at else "the row has no `for` and no `at`"
            )
            reading.fault(key, f"got ${name}, {allowed}{nearest(name, at)}")
            return given
    whole = _VARIABLE.fullmatch(given)
    return at[whole[1]] if whole else _VARIABLE.sub(lambda found: _text(at[found[1]]), given)


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


_ROW = ("name", "title", "for", "at", "runs", "published", "where", "by_construction", "hypothesis", "chosen", "note")
_RUN = ("recipe", "engine", "seeds", "columns", "minibatch")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_BOUNDS = tuple(bound for bound in get_args(Bound) if bound != "exact")
_SAME = "same"
_LARGEST = "largest"


def _rows(data: Mapping[str, Any], reading: Reading) -> tuple[Row, ...]:
    """Return the rows of a report, shared runs included; faults go to `reading`."""
    entries = reading.items(data.get("rows"), "rows", "rows, each a mapping")
    if not entries and not reading.faults:
        reading.fault("rows", "is missing or empty, needed is a list of rows")
    shared = reading.mapping(data.get("runs"), "runs")
    rows: dict[str, Row] = {}
    for index, entry in enumerate(entries):
        key = f"rows.{index}"
        for row, at in _generated(reading.mapping(entry, key, _ROW), key, reading):
            made = _row(row, at, shared, key, reading)
            if made.name in rows and _NAME.fullmatch(made.name):
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
        name = "?" if name is None else str(name)
    else:
        key = f"rows.{name}"
    runs = {
        run: (f"{key}.runs.{run}", value) for run, value in reading.mapping(data.get("runs"), f"{key}.runs").items()
    }
    for run, value in shared.items():
        if run not in runs:
            runs[run] = (f"runs.{run}", _substituted(value, at, f"runs.{run}", reading))
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


_MEASURE = ("title", "unit", "value", "plan_of", "against", "better", "shown", "published_as", "chosen")


def read_table(data: Mapping[str, Any], reading: Reading) -> Table:
    """Return the table of a report; faults go to `reading`."""
    columns, rows = _columns(data.get("columns"), reading), _rows(data, reading)
    table = Table(columns, (), {row.name: row for row in rows})
    table = replace(table, measures=tuple(_measures(data.get("measures"), table, reading)))
    check_metrics(table.measures, rows, reading)
    _check_cells(table, reading)
    return table


def _columns(given: object, reading: Reading) -> tuple[Column, ...]:
    """Return the columns of a report; by default one with unchanged recipes."""
    columns = []
    for name, entry in reading.named(given, "columns").items():
        key = f"columns.{name}"
        data = reading.mapping(entry, key, ("title", "clusters", "set"))
        clusters = reading.mapping(data.get("clusters"), f"{key}.clusters")
        for cluster, other in list(clusters.items()):
            if not isinstance(other, str):
                reading.fault(f"{key}.clusters.{cluster}", f"got {shown(other)}, allowed is the name of a cluster")
                del clusters[cluster]
        words = reading.words(data, key, "set")
        for word in words:
            if "=" not in word:
                reading.fault(
                    f"{key}.set", f"got {word[:60]!r}, allowed is key=value, or ?key=value where not all take it"
                )
        optional = tuple(word.removeprefix("?") for word in words if word.startswith("?"))
        always = tuple(word for word in words if not word.startswith("?"))
        columns.append(Column(name, reading.plain(data, key, "title", str, as_title(name)), clusters, always, optional))
    return tuple(columns) or (Column(REPRODUCED, REPRODUCED),)


def _measures(given: object, table: Table, reading: Reading) -> Iterator[Measure]:
    """Yield the measures of a report."""
    spelled: dict[str, Expression] = {}
    entries = reading.named(given, "measures")
    if not entries:
        reading.fault("measures", "is missing or empty, needed is a mapping of names to {title, unit, value}")
    for name, entry in entries.items():
        key = f"measures.{name}"
        data = reading.mapping(entry, key, _MEASURE)
        expression = None
        if ("value" in data) == ("plan_of" in data):
            reading.fault(key, "needed is one of value (an expression) and plan_of (a run)")
            continue
        if "value" in data:
            try:
                expression = value_expression(str(data["value"]), spelled)
                spelled[name] = expression
            except ValueError as error:
                reading.fault(f"{key}.value", str(error))
                continue
        measure = Measure(
            name=name,
            title=reading.plain(data, key, "title", str, as_title(name)),
            unit=reading.one_of(data, key, "unit", UNITS, "none"),
            expression=expression,
            plan_of=None if expression else reading.plain(data, key, "plan_of", str),
            against=reading.plain(data, key, "against", str) if "against" in data else None,
            better=reading.one_of(data, key, "better", BETTER, "") or None,
            shown=reading.plain(data, key, "shown", bool, True),
            published_as=reading.one_of(data, key, "published_as", [*spelled], "") or None,
            chosen=_texts(data, key, "chosen", reading),
        )
        if measure.against is not None and expression is not None:
            reading.fault(f"{key}.against", "goes with plan_of: it names the run that has the published plan")
        _check_runs(measure, table, key, reading)
        yield measure


def _check_runs(measure: Measure, table: Table, key: str, reading: Reading) -> None:
    """Report runs that no row has."""
    known = table.runs
    for run in dict.fromkeys((*measure.runs, *([measure.against] if measure.against else []))):
        if run not in known and not any(fault.key.startswith(("rows", "runs")) for fault in reading.faults):
            reading.fault(
                key, f"no row has a run {run[:60]!r}, allowed are {', '.join(known)}{nearest(run[:60], known)}"
            )


def check_metrics(measures: Iterable[Measure], rows: Iterable[Row], reading: Reading) -> None:
    """Report metrics of measures that runs of the rows' engines lack."""
    engines: dict[str, dict[str, None]] = {}
    for run, reference in (item for row in rows for item in row.runs.items()):
        engines.setdefault(run, {})[reference.engine] = None
    for measure in measures:
        for run, metric in measure.expression.metrics if measure.expression else ():
            for problem in filter(None, (metric_problem(metric, engine) for engine in engines.get(run, ()))):
                whose = f"run {run} " if problem.startswith("has") else ""
                reading.fault(f"measures.{measure.name}.value", f"{run}.{metric}: {whose}{problem}")


def _check_cells(table: Table, reading: Reading) -> None:
    """Report statements about cells, such as published values, that name no measure or column."""
    columns = [column.name for column in table.columns]
    for measure in table.measures:
        for column in measure.chosen:
            if column not in columns:
                problem = f"unknown column, allowed are {', '.join(columns)}{nearest(column[:60], columns)}"
                reading.fault(f"measures.{measure.name}.chosen.{column[:60]}", problem)
    names = {measure.name: measure for measure in table.measures}
    failed = any(fault.key.startswith("measures") for fault in reading.faults)
    for row in table.rows.values():
        for part, given in (
            ("published", row.published),
            ("by_construction", row.by_construction),
            ("hypothesis", row.hypothesis),
            ("chosen", row.chosen),
        ):
            for name in given:
                if name not in names and not failed:
                    hint = nearest(name[:60], names)
                    problem = f"unknown measure, allowed here are {', '.join(names)}{hint}"
                    reading.fault(f"rows.{row.name}.{part}.{name[:60]}", problem)
        for name, published in row.published.items():
            if name in names and isinstance(published.value, str) == (names[name].plan_of is None):
                allowed = "a number" if names[name].plan_of is None else "a plan such as 15-1, in quotes"
                reading.fault(
                    f"rows.{row.name}.published.{name}", f"got {shown(published.value)}, allowed is {allowed}"
                )
