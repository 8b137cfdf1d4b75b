"""Read a report's claims, its text that quotes numbers, its pictures, and its calibration.

In a text, `{planned: max(share)}` quotes an expression over the cells of the column `planned`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pipebench.errors import choice, nearest
from pipebench.report.definition import (
    OVER,
    PICTURES,
    Calibration,
    ClaimedNumber,
    Constant,
    Picture,
    PublishedClaim,
    Quoted,
    ReferenceLine,
)
from pipebench.report.expressions import Expression, claim_expression, quoted_expression, unit_of
from pipebench.report.metrics import STAGE_METRICS
from pipebench.report.read_table import Table
from pipebench.report.reading import Reading

_CLAIM = ("text", "where", "holds", "tolerance", "value", "published", "within", "untestable")
_KINDS = {"holds": "an expression", "value": "a number, with published and within", "untestable": "why"}


def read_claims(given: object, table: Table, reading: Reading) -> tuple[PublishedClaim, ...]:
    """Return the claims of a report; faults go to `reading`."""
    claims, units = [], table.units
    for index, entry in enumerate(reading.items(given, "claims", "claims, each a mapping")):
        key = f"claims.{index}"
        data = reading.mapping(entry, key, _CLAIM)
        expressions: dict[str, Expression] = {}
        for kind, parse in (("holds", claim_expression), ("value", quoted_expression)):
            try:
                expressions |= {kind: parse(str(data[kind]), [*units], [*table.rows])} if kind in data else {}
            except ValueError as error:
                reading.fault(f"{key}.{kind}", str(error))
        if sum(kind in data for kind in _KINDS) != 1:
            reading.fault(key, f"needed is one of {', '.join(f'{kind} ({what})' for kind, what in _KINDS.items())}")
        claims.append(
            PublishedClaim(
                text=reading.plain(data, key, "text", str),
                where=reading.plain(data, key, "where", str, ""),
                holds=expressions.get("holds"),
                untestable=reading.plain(data, key, "untestable", str) if "untestable" in data else None,
                tolerance=reading.plain(data, key, "tolerance", str, ""),
                number=_number(data, expressions.get("value"), units, key, reading),
            )
        )
    return tuple(claims)


def _number(
    data: Mapping[str, Any], value: Expression | None, units: Mapping[str, str], key: str, reading: Reading
) -> ClaimedNumber | None:
    """Return the number that a claim states, None if it states none."""
    if "value" not in data:
        for name in ("published", "within"):
            if name in data:
                reading.fault(f"{key}.{name}", "goes with value: what is compared with the published number")
        return None
    published, within = (reading.plain(data, key, name, float) for name in ("published", "within"))
    for name, number in (("published", published), ("within", within)):
        if number <= 0 and name in data:
            reading.fault(f"{key}.{name}", f"got {number:g}, allowed is a number above 0")
    return ClaimedNumber(value, unit_of(value, units), published or 1.0, within) if value is not None else None


def read_pictures(given: object, table: Table, reading: Reading) -> tuple[Picture, ...]:
    """Return the pictures of a report; faults go to `reading`."""
    pictures = []
    for index, entry in enumerate(reading.items(given, "pictures", "pictures, each a mapping")):
        key = f"pictures.{index}"
        kind = reading.one_of(entry if isinstance(entry, dict) else {}, key, "kind", tuple(PICTURES), "")
        if not kind:
            if not isinstance(entry, dict) or entry.get("kind") is None:
                reading.fault(f"{key}.kind", f"is missing, allowed are {', '.join(PICTURES)}")
            continue
        data = reading.mapping(entry, key, ("kind", *PICTURES[kind]))
        runs = data.get("runs")
        words = reading.mapping(runs, f"{key}.runs") if isinstance(runs, dict) else {}
        picture = Picture(
            kind=kind,
            measures=(data["measure"],)
            if isinstance(data.get("measure"), str)
            else reading.words(data, key, "measures"),
            bound=reading.plain(data, key, "bound", str, ""),
            x=reading.plain(data, key, "x", str, ""),
            group=reading.plain(data, key, "group", str, ""),
            runs=(data["run"],) if isinstance(data.get("run"), str) else (*words,) or reading.words(data, key, "runs"),
            words=tuple((run, reading.plain(words, f"{key}.runs", run, str)) for run in words),
            metric=reading.plain(data, key, "metric", str, ""),
            over=reading.words(data, key, "over") or (OVER[:1] if kind == "curves" else ()),
            row=reading.plain(data, key, "row", str, ""),
            title=reading.plain(data, key, "title", str, ""),
            line=_line(data["line"], f"{key}.line", reading) if "line" in data else None,
        )
        pictures.append(picture)
        _check_picture(picture, table, key, reading)
    return tuple(pictures)


def _line(given: object, key: str, reading: Reading) -> ReferenceLine:
    """Return a picture's reference line."""
    data = reading.mapping(given, key, ("at", "text"))
    return ReferenceLine(reading.plain(data, key, "at", float), reading.plain(data, key, "text", str))


def _check_picture(picture: Picture, table: Table, key: str, reading: Reading) -> None:
    """Report missing keys of a picture's kind and unknown names."""
    wanted, measures, at = PICTURES[picture.kind], [*table.units], table.at
    named: list[tuple[str, tuple[str, ...], list[str]]] = []
    if "measures" in wanted or "measure" in wanted:
        named.append(("measures" if "measures" in wanted else "measure", picture.measures, measures))
    if picture.bound and "metric" not in wanted:
        named.append(("bound", (picture.bound,), measures))
    if "x" in wanted:
        named += [("x", (picture.x,), [*at]), ("group", (picture.group,) if picture.group else ("",), ["", *at])]
    if "row" in wanted:
        named.append(("row", (picture.row,), [*table.rows]))
    if "runs" in wanted or "run" in wanted:
        row = table.rows.get(picture.row)
        runs = [*row.runs] if row else table.runs
        named.append(("runs" if "runs" in wanted else "run", picture.runs, runs))
    if "over" in wanted:
        named.append(("over", picture.over, [*OVER]))
    for name, given, allowed in named:
        if not given or (given == ("",) and "" not in allowed):
            reading.fault(f"{key}.{name}", f"is missing, needed for {picture.kind}: {', '.join(filter(None, allowed))}")
            continue
        for each in given:
            if each not in allowed:
                reading.fault(f"{key}.{name}", choice(each[:60], filter(None, allowed)))
    if "metric" in wanted and not picture.metric:
        reading.fault(f"{key}.metric", f"is missing, needed for {picture.kind}")
    elif picture.kind == "stages" and picture.metric not in STAGE_METRICS:
        reading.fault(f"{key}.metric", choice(picture.metric[:60], STAGE_METRICS))


_BRACES = re.compile(r"\{([^{}]*)\}")
_COLUMN = re.compile(r"(?s)\s*(\w+):(.*)")


def read_text(given: str, key: str, table: Table, reading: Reading) -> Iterator[str | Quoted]:
    """Yield a text as pieces of Markdown and quoted expressions; a report of one column needs no column's name.

    Args:
        given: the text.
        key: its full key.
        table: whose measures, rows and columns it may name.
        reading: gets the faults.
    """
    names, units = [column.name for column in table.columns], table.units
    for index, part in enumerate(_BRACES.split(given)):
        if index % 2 == 0:  # between braces
            yield from filter(None, [part])
            continue
        found = _COLUMN.fullmatch(part)
        column, text = found.groups() if found else ("", part)
        if not column and len(names) > 1:
            reading.fault(key, f"got {{{part[:60]}}}, needed is the column before it: {{{names[0]}: {part[:60]}}}")
        elif column and column not in names:
            reading.fault(key, f"{{{part[:60]}}}: {choice(column[:60], names)}")
        else:
            try:
                expression = quoted_expression(" ".join(text.split()), units, [*table.rows])
                yield Quoted(expression, column or names[0], unit_of(expression, units))
            except ValueError as error:
                reading.fault(key, f"{{{part[:60]}}}: {error}")


def read_calibration(given: object, table: Table, reading: Reading) -> Calibration | None:
    """Return the constants and their cells, None if the report fits nothing; faults go to `reading`."""
    if given is None:
        return None
    data = reading.mapping(given, "calibration", ("column", "constants", "fitted_on", "leave_out"))
    column = reading.plain(data, "calibration", "column", str)
    columns = [each.name for each in table.columns]
    if column and column not in columns:
        reading.fault("calibration.column", choice(column[:60], columns))
    fitted = reading.mapping(data.get("fitted_on"), "calibration.fitted_on")
    constants = []
    entries = reading.named(data.get("constants"), "calibration.constants")
    for name in fitted:
        if name not in entries:
            reading.fault(f"calibration.fitted_on.{name[:60]}", choice(name[:60], entries))
    for name, entry in entries.items():
        key = f"calibration.constants.{name}"
        each = reading.mapping(entry, key, ("cluster", "key", "from", "to"))
        cells = reading.words(fitted, "calibration.fitted_on", name)
        if not cells:
            reading.fault(key, "no cell is named in calibration.fitted_on that it is fitted on")
        texts = {part: str(each[part]) for part in ("from", "to") if isinstance(each.get(part), int | float)}
        texts |= {part: reading.plain(each, key, part, str) for part in ("from", "to") if part not in texts}
        found = tuple(pair for cell in cells for pair in _cell(cell, table, f"calibration.fitted_on.{name}", reading))
        cluster, inside = reading.plain(each, key, "cluster", str), reading.plain(each, key, "key", str)
        constants.append(Constant(name, cluster, inside, texts["from"], texts["to"], found))
    groups = reading.words(data, "calibration", "leave_out")
    for group in groups:
        if group not in table.at:
            reading.fault("calibration.leave_out", choice(group[:60], table.at))
    return Calibration(column, tuple(constants), groups)


def _cell(text: str, table: Table, key: str, reading: Reading) -> Iterator[tuple[str, str]]:
    """Yield (row, measure) of `row.measure`, if that can be fitted on; names of rows may contain dots."""
    row, _, measure = text.rpartition(".")
    if row not in table.rows or measure not in table.units:
        cells = [f"{each}.{one}" for each in table.rows for one in table.units]
        reading.fault(key, f"got {text[:60]!r}, allowed is row.measure of this report{nearest(text[:60], cells)}")
        return
    published = table.rows[row].published.get(measure)
    if published is None or published.bound != "exact":
        reading.fault(key, f"got {text[:60]!r}, where no number is published that it could be fitted on")
    else:
        yield row, measure
