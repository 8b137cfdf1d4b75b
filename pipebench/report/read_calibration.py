"""Read a report's calibration."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipebench.errors import choice, nearest
from pipebench.report.definition import Calibration, Column, Constant, Measure, Row
from pipebench.report.reading import Reading


def read_calibration(
    given: object,
    columns: Sequence[Column],
    measures: Sequence[Measure],
    rows: Sequence[Row],
    reading: Reading,
) -> Calibration | None:
    """Return the constants and their cells, None if the report fits nothing; faults go to `reading`."""
    if given is None:
        return None
    data = reading.mapping(given, "calibration", ("column", "constants", "fitted_on", "leave_out"))
    names = [column.name for column in columns]
    column = reading.plain(data, "calibration", "column", str)
    if column and column not in names:
        reading.fault("calibration.column", choice(column[:60], names))
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
        found = [_cell(cell, measures, rows, f"calibration.fitted_on.{name}", reading) for cell in cells]
        cluster, inside = reading.plain(each, key, "cluster", str), reading.plain(each, key, "key", str)
        pairs = tuple(pair for pair in found if pair is not None)
        constants.append(Constant(name, cluster, inside, texts["from"], texts["to"], pairs))
    groups = _groups(data, rows, reading)
    return Calibration(column, tuple(constants), groups)


def _groups(data: Mapping[str, Any], rows: Sequence[Row], reading: Reading) -> tuple[str, ...]:
    """Return the keys of rows' `at` by which rows are left out together."""
    groups = reading.words(data, "calibration", "leave_out")
    known = dict.fromkeys(key for row in rows for key in row.at)
    for group in groups:
        if group not in known:
            reading.fault("calibration.leave_out", choice(group[:60], known))
    return tuple(groups)


def _cell(
    text: str, measures: Sequence[Measure], rows: Sequence[Row], key: str, reading: Reading
) -> tuple[str, str] | None:
    """Return (row, measure) of `row.measure`; names of rows may contain dots."""
    row, _, measure = text.rpartition(".")
    cells = {f"{each.name}.{one.name}": (each, one) for each in rows for one in measures if one.expression is not None}
    if text not in cells:
        reading.fault(key, f"got {text[:60]!r}, allowed is row.measure of this report{nearest(text[:60], cells)}")
        return None
    published = cells[text][0].published.get(measure)
    if published is None or published.bound != "exact":
        reading.fault(key, f"got {text[:60]!r}, where no number is published that it could be fitted on")
        return None
    return row, measure
