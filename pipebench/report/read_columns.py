"""Read the columns and measures of a report, and check rows' statements about their cells."""

from collections.abc import Sequence

from pipebench.errors import nearest
from pipebench.recipe.typecheck import shown
from pipebench.report.definition import BETTER, REPRODUCED, UNITS, Column, Measure, Row
from pipebench.report.expressions import Expression, value_expression
from pipebench.report.metrics import metric_problem
from pipebench.report.reading import Reading, as_title

_MEASURE = ("title", "unit", "value", "plan_of", "against", "better", "shown", "published_as")


def read_columns(given: object, reading: Reading) -> tuple[Column, ...]:
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


def read_measures(given: object, rows: Sequence[Row], reading: Reading) -> tuple[Measure, ...]:
    """Return the measures of a report; faults go to `reading`."""
    measures: list[Measure] = []
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
        )
        if measure.against is not None and expression is not None:
            reading.fault(f"{key}.against", "goes with plan_of: it names the run that has the published plan")
        _check_runs(measure, rows, key, reading)
        measures.append(measure)
    return tuple(measures)


def _check_runs(measure: Measure, rows: Sequence[Row], key: str, reading: Reading) -> None:
    """Report runs that no row has and metrics that the runs lack."""
    known = list(dict.fromkeys(run for row in rows for run in row.runs))
    for run in dict.fromkeys((*measure.runs, *([measure.against] if measure.against else []))):
        if run not in known and not any(fault.key.startswith(("rows", "runs")) for fault in reading.faults):
            reading.fault(
                key, f"no row has a run {run[:60]!r}, allowed are {', '.join(known)}{nearest(run[:60], known)}"
            )
    problems: dict[str, None] = {}
    for run, metric in measure.expression.metrics if measure.expression else ():
        for row in rows:
            problem = metric_problem(metric, row.runs[run].engine) if run in row.runs else None
            if problem is not None:
                problems[f"{run}.{metric}: {'run ' + run + ' ' if problem.startswith('has') else ''}{problem}"] = None
    for problem in problems:
        reading.fault(f"{key}.value", problem)


def check_cells(rows: Sequence[Row], measures: tuple[Measure, ...], reading: Reading) -> None:
    """Report statements about cells, published values among them, that no measure fits."""
    names = {measure.name: measure for measure in measures}
    failed = any(fault.key.startswith("measures") for fault in reading.faults)
    for row in rows:
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
