"""Read a report's text; `{planned: max(share)}` quotes an expression over the cells of a column."""

import re
from collections.abc import Iterator, Sequence

from pipebench.errors import choice
from pipebench.report.definition import Column, Measure, Quoted, Row
from pipebench.report.expressions import quoted_expression, unit_of
from pipebench.report.reading import Reading

_BRACES = re.compile(r"\{([^{}]*)\}")
_COLUMN = re.compile(r"(?s)\s*(\w+):(.*)")


def read_text(
    given: str, key: str, columns: Sequence[Column], measures: Sequence[Measure], rows: Sequence[Row], reading: Reading
) -> tuple[str | Quoted, ...]:
    """Return a text as pieces of Markdown and quoted expressions; the column's name is optional if there is only one.

    `key` is the text's full key; faults go to `reading`.
    """
    return tuple(piece for piece in _pieces(given, key, columns, measures, rows, reading) if piece)


def _pieces(
    given: str, key: str, columns: Sequence[Column], measures: Sequence[Measure], rows: Sequence[Row], reading: Reading
) -> Iterator[str | Quoted]:
    units = {measure.name: measure.unit for measure in measures if measure.expression is not None}
    names = [column.name for column in columns]
    for index, part in enumerate(_BRACES.split(given)):
        if index % 2 == 0:  # between braces
            yield part
            continue
        found = _COLUMN.fullmatch(part)
        column, text = found.groups() if found else ("", part)
        if not column and len(names) > 1:
            reading.fault(key, f"got {{{part[:60]}}}, needed is the column before it: {{{names[0]}: {part[:60]}}}")
        elif column and column not in names:
            reading.fault(key, f"{{{part[:60]}}}: {choice(column[:60], names)}")
        else:
            try:
                expression = quoted_expression(" ".join(text.split()), units, [row.name for row in rows])
                yield Quoted(expression, column or names[0], unit_of(expression, units))
            except ValueError as error:
                reading.fault(key, f"{{{part[:60]}}}: {error}")
