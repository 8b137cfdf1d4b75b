"""Read the claims and pictures of a report."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipebench.errors import choice
from pipebench.report.definition import (
    OVER,
    PICTURES,
    ClaimedNumber,
    Measure,
    Picture,
    PublishedClaim,
    ReferenceLine,
    Row,
)
from pipebench.report.expressions import Expression, claim_expression, quoted_expression, unit_of
from pipebench.report.metrics import STAGE_METRICS
from pipebench.report.reading import Reading

_CLAIM = ("text", "where", "holds", "tolerance", "value", "published", "within", "untestable")
_KINDS = {"holds": "an expression", "value": "a number, with published and within", "untestable": "why"}


def read_claims(
    given: object, measures: Sequence[Measure], rows: Sequence[Row], reading: Reading
) -> tuple[PublishedClaim, ...]:
    """Return the claims of a report; faults go to `reading`."""
    claims = []
    units = {measure.name: measure.unit for measure in measures if measure.expression is not None}
    names = [row.name for row in rows]
    for index, entry in enumerate(reading.items(given, "claims", "claims, each a mapping")):
        key = f"claims.{index}"
        data = reading.mapping(entry, key, _CLAIM)
        expressions: dict[str, Expression] = {}
        for kind, parse in (("holds", claim_expression), ("value", quoted_expression)):
            try:
                expressions |= {kind: parse(str(data[kind]), [*units], names)} if kind in data else {}
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
    """Return the number that a claim states; None for one that states none."""
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


def read_pictures(
    given: object, measures: Sequence[Measure], rows: Sequence[Row], reading: Reading
) -> tuple[Picture, ...]:
    """Return the pictures of a report; faults go to `reading`."""
    pictures = []
    numbers = [measure.name for measure in measures if measure.expression is not None]
    for index, entry in enumerate(reading.items(given, "pictures", "pictures, each a mapping")):
        key = f"pictures.{index}"
        kind = reading.one_of(entry if isinstance(entry, dict) else {}, key, "kind", tuple(PICTURES), "")
        if not kind:
            if not isinstance(entry, dict) or entry.get("kind") is None:
                reading.fault(f"{key}.kind", f"is missing, allowed are {', '.join(PICTURES)}")
            continue
        data = reading.mapping(entry, key, ("kind", *PICTURES[kind]))
        picture = Picture(
            kind=kind,
            measures=(data["measure"],)
            if isinstance(data.get("measure"), str)
            else reading.words(data, key, "measures"),
            bound=reading.plain(data, key, "bound", str, ""),
            x=reading.plain(data, key, "x", str, ""),
            group=reading.plain(data, key, "group", str, ""),
            runs=(data["run"],) if isinstance(data.get("run"), str) else reading.words(data, key, "runs"),
            metric=reading.plain(data, key, "metric", str, ""),
            over=reading.words(data, key, "over") or (OVER[:1] if kind == "curves" else ()),
            row=reading.plain(data, key, "row", str, ""),
            line=_line(data["line"], f"{key}.line", reading) if "line" in data else None,
        )
        pictures.append(picture)
        _check_picture(picture, numbers, rows, key, reading)
    return tuple(pictures)


def _line(given: object, key: str, reading: Reading) -> ReferenceLine:
    """Return a picture's reference line."""
    data = reading.mapping(given, key, ("at", "text"))
    return ReferenceLine(reading.plain(data, key, "at", float), reading.plain(data, key, "text", str))


def _check_picture(picture: Picture, measures: list[str], rows: Sequence[Row], key: str, reading: Reading) -> None:
    """Report missing keys of a picture's kind and unknown names."""
    wanted = PICTURES[picture.kind]
    row = next((each for each in rows if each.name == picture.row), None)
    at = dict.fromkeys(name for each in rows for name in each.at)
    named: list[tuple[str, tuple[str, ...], list[str]]] = []
    if "measures" in wanted or "measure" in wanted:
        named.append(("measures" if "measures" in wanted else "measure", picture.measures, measures))
    if picture.bound and "metric" not in wanted:
        named.append(("bound", (picture.bound,), measures))
    if "x" in wanted:
        named += [("x", (picture.x,), [*at]), ("group", (picture.group,) if picture.group else ("",), ["", *at])]
    if "row" in wanted:
        named.append(("row", (picture.row,), [each.name for each in rows]))
    if "runs" in wanted or "run" in wanted:
        runs = [*row.runs] if row else list(dict.fromkeys(run for each in rows for run in each.runs))
        named.append(("runs" if "runs" in wanted else "run", picture.runs, runs))
    if "over" in wanted:
        named.append(("over", picture.over, [*OVER]))
    for name, given, allowed in named:
        if not given or (given == ("",) and "" not in allowed):
            reading.fault(f"{key}.{name}", f"is missing, needed for {picture.kind}")
        for each in given:
            if each not in allowed:
                reading.fault(f"{key}.{name}", choice(each[:60], filter(None, allowed)))
    if "metric" in wanted and not picture.metric:
        reading.fault(f"{key}.metric", f"is missing, needed for {picture.kind}")
    elif picture.kind == "stages" and picture.metric not in STAGE_METRICS:
        reading.fault(f"{key}.metric", choice(picture.metric[:60], STAGE_METRICS))
