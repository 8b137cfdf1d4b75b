"""Origins of all cells: their runs with the source of durations and data."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from pipebench.formats import UNKNOWN
from pipebench.report.definition import RunReference
from pipebench.report.evaluated import KEPT, Evaluated, Origin
from pipebench.report.wording import several
from pipebench.show.page import Block, Cell, Heading, LinkedText, PageLink, RenderedTable, Text

_SEED = "train.seed="


@dataclass(frozen=True)
class _Line:
    """One line of the table: runs that differ only in row, column and seed share it."""

    run: str
    words: tuple[str, ...]
    engine: str
    timing: str
    data: str
    made: str


@dataclass
class _Found:
    """Rows, columns, seeds and origins of a line, in order and unique."""

    rows: dict[str, None] = field(default_factory=dict)
    columns: dict[str, None] = field(default_factory=dict)
    seeds: dict[int, None] = field(default_factory=dict)
    origins: dict[Origin, None] = field(default_factory=dict)


def links(origins: Iterable[Origin]) -> tuple[PageLink, ...]:
    """Return links to results' records, with seeds if a run has several, marked if stored earlier."""
    known = list(dict.fromkeys(origins))
    seeds = Counter(name for name, _ in {(each.name, each.seed) for each in known})
    names = (f"{each.name} {each.seed}" if seeds[each.name] > 1 else each.name for each in known)
    return tuple(
        PageLink(f"{name} ({KEPT})" if each.reused == KEPT else name, _tooltip(each), each.experiment_id, each.run_id)
        for name, each in zip(names, known, strict=True)
    )


def origins(evaluated: Evaluated) -> list[Block]:
    """Return a table with a line per run and the rows that share it; texts of many runs become numbered notes."""
    report, lines = evaluated.report, _lines(evaluated)
    if not lines:
        return []
    texts = ([line.timing for line in lines], [line.data for line in lines], [line.made for line in lines])
    timings, data, made = map(_numbered, texts)
    rows = {row.name: row.title for row in report.rows}
    columns = {column.name: column.title for column in report.columns}
    trained = ["trained"] if made else []
    headings = ("row", "run", "column", "seeds", "engine", "durations", "data", *trained, "command")
    cells: list[tuple[Cell, ...]] = [
        (
            _among(found.rows, rows),
            line.run,
            _among(found.columns, columns),
            _seeds(found, report.row(next(iter(found.rows))).runs.get(line.run)),
            line.engine,
            timings.get(line.timing, UNKNOWN),
            data.get(line.data, UNKNOWN),
            *([made.get(line.made, UNKNOWN)] if made else []),
            LinkedText(_command(line, found), links(found.origins)),
        )
        for line, found in lines.items()
    ]
    table = RenderedTable(headings, cells, left=len(headings), long=True)
    notes = [_list("Durations", timings), _list("Data", data), _list("Trained with", made)]
    return [Heading("How every cell was obtained"), table, *(Text(text) for text in notes if text)]


def _lines(evaluated: Evaluated) -> dict[_Line, _Found]:
    lines: dict[_Line, _Found] = {}
    for cell in evaluated.cells:
        for each in cell.origins:
            words = tuple(word for word in each.words if not word.startswith(_SEED))
            found = lines.setdefault(_Line(each.name, words, each.engine, each.timing, each.data, each.made), _Found())
            found.rows[cell.row] = found.columns[cell.column] = found.seeds[each.seed] = found.origins[each] = None
    return lines


def _seeds(found: _Found, run: RunReference | None) -> str:
    """Return the seeds of a line, and how many there should be if they are fewer."""
    asked = len(run.seeds or ()) if run is not None else 0
    return ", ".join(f"{seed}" for seed in found.seeds) + (f" of {asked}" if len(found.seeds) < asked else "")


def _among(names: Collection[str], titles: Mapping[str, str]) -> str:
    """Return the titles of some rows or columns, abbreviated if many."""
    if len(names) == len(titles) > 1:
        return "all"
    return several([titles[name] for name in names])


def _command(line: _Line, found: _Found) -> str:
    """Return the command that repeats the runs with all seeds."""
    given = [word for each in found.origins for word in each.words if word.startswith(_SEED)]
    seeds = f" --seeds {','.join(f'{seed}' for seed in found.seeds)}" if given else ""
    words = {word.partition("=")[0]: word for word in line.words}  # a column's in place of the row's
    return f"`pipebench run {' '.join(words.values())}{seeds}`"


def _numbered(texts: Iterable[str]) -> dict[str, str]:
    """Number all non-empty texts in order of first use."""
    return {text: f"{number}" for number, text in enumerate(dict.fromkeys(filter(None, texts)), 1)}


def _list(title: str, numbers: dict[str, str]) -> str:
    return "\n".join([f"{title}:\n", *(f"{number}. {text}" for text, number in numbers.items())]) if numbers else ""


def _tooltip(origin: Origin) -> str:
    parts = (" ".join(origin.words), origin.engine, origin.reused or "", origin.ended, origin.versions)
    return "; ".join(each for each in parts if each)
