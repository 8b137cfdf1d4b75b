"""The table of origins: the run behind every cell, with its source of durations and its data."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from pipebench.formats import UNKNOWN
from pipebench.report.definition import RunReference
from pipebench.report.evaluated import KEPT, Evaluated, Origin, TableCell
from pipebench.report.wording import several
from pipebench.show.page import Block, Cell, Heading, LinkedText, PageLink, RenderedTable, Text

_SEED = "train.seed="


def links(origins: Iterable[Origin]) -> tuple[PageLink, ...]:
    """Return links to the records of results, with the seed if a run has several; stored results are marked."""
    known = list(dict.fromkeys(origins))
    seeds = Counter(name for name, _ in {(each.name, each.seed) for each in known})
    names = (f"{each.name} {each.seed}" if seeds[each.name] > 1 else each.name for each in known)
    return tuple(
        PageLink(f"{name} ({KEPT})" if each.reused == KEPT else name, _tooltip(each), each.experiment_id, each.run_id)
        for name, each in zip(names, known, strict=True)
    )


def origins(evaluated: Evaluated) -> list[Block]:
    """Return a table with a line per run and the rows that share it; long texts become numbered notes below it."""
    report, lines = evaluated.report, _lines(evaluated)
    if not lines:
        return []
    alike = [line[0][1] for line in lines]  # the first run of each line, whose facts all its runs share
    timings, data, made = map(_numbered, zip(*((each.timing, each.data, each.made) for each in alike), strict=True))
    rows = {row.name: row.title for row in report.rows}
    columns = {column.name: column.title for column in report.columns}
    trained = ["trained"] if made else []
    headings = ("row", "run", "column", "seeds", "engine", "durations", "data", *trained, "command")
    cells: list[tuple[Cell, ...]] = []
    for line, first in zip(lines, alike, strict=True):
        runs = [run for _, run in line]
        cells.append(
            (
                _among((cell.row for cell, _ in line), rows),
                first.name,
                _among((cell.column for cell, _ in line), columns),
                _seeds(runs, report.row(line[0][0].row).runs.get(first.name)),
                first.engine,
                timings.get(first.timing, UNKNOWN),
                data.get(first.data, UNKNOWN),
                *([made.get(first.made, UNKNOWN)] if made else []),
                LinkedText(_command(runs), links(runs)),
            )
        )
    table = RenderedTable(headings, cells, left=len(headings), long=True)
    notes = [_list("Durations", timings), _list("Data", data), _list("Trained with", made)]
    return [Heading("How every cell was obtained"), table, *(Text(text) for text in notes if text)]


def _lines(evaluated: Evaluated) -> list[list[tuple[TableCell, Origin]]]:
    """Return the lines of the table: runs that differ only in row, column and seed share a line."""
    lines = defaultdict(list)
    for cell in evaluated.cells:
        for run in cell.origins:
            lines[run.name, _unseeded(run), run.engine, run.timing, run.data, run.made].append((cell, run))
    return list(lines.values())


def _unseeded(run: Origin) -> tuple[str, ...]:
    return tuple(word for word in run.words if not word.startswith(_SEED))


def _seeds(runs: Sequence[Origin], reference: RunReference | None) -> str:
    """Return the seeds of a line's runs, and the number of seeds in the definition if that is larger."""
    asked = len(reference.seeds or ()) if reference is not None else 0
    seeds = _unique_seeds(runs)
    return ", ".join(seeds) + (f" of {asked}" if len(seeds) < asked else "")


def _unique_seeds(runs: Sequence[Origin]) -> list[str]:
    return list(dict.fromkeys(f"{run.seed}" for run in runs))


def _among(names: Iterable[str], titles: Mapping[str, str]) -> str:
    """Return the titles of some rows or columns, abbreviated if many."""
    unique = dict.fromkeys(names)
    if len(unique) == len(titles) > 1:
        return "all"
    return several([titles[name] for name in unique])


def _command(runs: Sequence[Origin]) -> str:
    """Return the command that repeats a line's runs with all seeds."""
    words = {word.partition("=")[0]: word for word in _unseeded(runs[0])}  # a column's word replaces the row's
    seeded = any(word.startswith(_SEED) for run in runs for word in run.words)
    seeds = f" --seeds {','.join(_unique_seeds(runs))}" if seeded else ""
    return f"`pipebench run {' '.join(words.values())}{seeds}`"


def _numbered(texts: Iterable[str]) -> dict[str, str]:
    """Number all non-empty texts in order of first use."""
    return {text: f"{number}" for number, text in enumerate(dict.fromkeys(filter(None, texts)), 1)}


def _list(title: str, numbers: dict[str, str]) -> str:
    return "\n".join([f"{title}:\n", *(f"{number}. {text}" for text, number in numbers.items())]) if numbers else ""


def _tooltip(origin: Origin) -> str:
    parts = (" ".join(origin.words), origin.engine, origin.reused or "", origin.ended, origin.versions)
    return "; ".join(each for each in parts if each)
