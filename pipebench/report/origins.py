"""How every cell was obtained: the runs behind it, and where each had its durations and its data from."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pipebench.formats import UNKNOWN
from pipebench.report.evaluated import KEPT, Evaluated, Origin
from pipebench.report.page import Block, Entry, Heading, Link, Table, Text

_KEPT = "kept: trained before, read back from `reports/kept`"
_SEED = "train.seed="


@dataclass(frozen=True)
class _Way:
    """What a line says: runs that differ in their column and seed only share it."""

    row: str
    run: str
    words: tuple[str, ...]
    engine: str
    timing: str
    data: str
    kept: bool


@dataclass
class _Found:
    """Where a way was gone, in order and once."""

    columns: dict[str, None] = field(default_factory=dict)
    seeds: dict[int, None] = field(default_factory=dict)
    origins: dict[Origin, None] = field(default_factory=dict)


def links(origins: Iterable[Origin]) -> tuple[Link, ...]:
    """Return the records of some results, with their seeds where a run has several."""
    known = list(dict.fromkeys(origins))
    seeds = Counter(each.name for each in known)
    names = (f"{each.name} {each.seed}" if seeds[each.name] > 1 else each.name for each in known)
    return tuple(
        Link(name, _told(each), each.experiment_id, each.run_id) for name, each in zip(names, known, strict=True)
    )


def origins(evaluated: Evaluated) -> list[Block]:
    """Return a line per run of a row; what is said of many runs is said once, under a number."""
    report, ways = evaluated.report, _ways(evaluated)
    if not ways:
        return []
    timings, data = (_numbered(texts) for texts in ([way.timing for way in ways], [way.data for way in ways]))
    rows = {row.name: row.title for row in report.rows}
    columns = {column.name: column.title for column in report.columns}
    table = Table(
        ("row", "run", "column", "seeds", "engine", "durations", "data", "command"),
        tuple(
            (
                Entry(rows[way.row]),
                Entry(way.run),
                Entry("all" if len(found.columns) == len(columns) else ", ".join(columns[c] for c in found.columns)),
                Entry(", ".join(f"{seed}" for seed in found.seeds)),
                Entry(way.engine + (", kept" if way.kept else "")),
                Entry(timings.get(way.timing, UNKNOWN)),
                Entry(data.get(way.data, UNKNOWN)),
                Entry(_command(way, found), links(found.origins)),
            )
            for way, found in ways.items()
        ),
        left=8,
        long=True,
    )
    told = [_list("Durations", timings), _list("Data", data), _KEPT if any(way.kept for way in ways) else ""]
    return [Heading("How every cell was obtained"), table, *(Text(text) for text in told if text)]


def _ways(evaluated: Evaluated) -> dict[_Way, _Found]:
    ways: dict[_Way, _Found] = {}
    for cell in evaluated.cells:
        for each in cell.origins:
            kept = each.reused == KEPT
            words = tuple(word for word in each.words if not word.startswith(_SEED))
            way = _Way(cell.row, each.name, words, each.engine, each.timing, each.data, kept)
            found = ways.setdefault(way, _Found())
            found.columns[cell.column] = found.seeds[each.seed] = found.origins[each] = None
    return ways


def _command(way: _Way, found: _Found) -> str:
    """Return the command that repeats the runs, all seeds of them at once."""
    given = [word for each in found.origins for word in each.words if word.startswith(_SEED)]
    seeds = f" --seeds {','.join(f'{seed}' for seed in found.seeds)}" if given else ""
    return f"`pipebench run {' '.join(way.words)}{seeds}`"


def _numbered(texts: Iterable[str]) -> dict[str, str]:
    """Return a number for every text that says something, in the order of their first use."""
    return {text: f"{number}" for number, text in enumerate(dict.fromkeys(filter(None, texts)), 1)}


def _list(title: str, numbers: dict[str, str]) -> str:
    return "\n".join([f"{title}:\n", *(f"{number}. {text}" for text, number in numbers.items())]) if numbers else ""


def _told(origin: Origin) -> str:
    told = (" ".join(origin.words), origin.engine, origin.reused or "", origin.ended, origin.versions)
    return "; ".join(each for each in told if each)
