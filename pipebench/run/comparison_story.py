"""A comparison's page, `about.html`: who is first and why, the table with links to its runs, curves, what differs."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pipebench
from pipebench.show.answers import Run
from pipebench.show.comparison import ComparedRun, groups, headings, notes, rows
from pipebench.show.differences import differences
from pipebench.show.html import html
from pipebench.show.page import Block, Cell, Heading, Image, LinkedText, Page, PageLink, RenderedTable, Text
from pipebench.show.verdict import verdict
from pipebench.tracking import RunLog
from pipebench.tracking.ui import server_address

_LINKS = (
    "Links lead to the runs in `pipebench ui`. MLflow shows this page in a frame that follows no links: there the runs "
    "are listed under Overview, Child runs."
)
_MOST_COLUMNS = 12  # of recipes beside each other; more are a sweep, whose names have what differs


def comparison_story(parent: RunLog, runs: Sequence[Run], pictures: Sequence[str]) -> str:
    """Return the page of a comparison, or of one recipe's seeds, as HTML.

    `parent` is its record, which has `pictures`, names of PNG files in order; there is at least one run.
    """
    results = [run.result for run in runs]
    blocks: list[Block] = [
        *_tables(parent, runs),
        *_list([*(f"{run.name}, seed {run.seed}: {run.sentence}" for run in results), *notes(results)]),
    ]
    if parent.folder is not None and pictures:
        blocks += [Heading("Curves"), *(Image(Path(name).stem, Path(name).stem) for name in pictures)]
    differing = differences(results)
    if differing and len(results) <= _MOST_COLUMNS:
        heads = ("key", *(f"{run.name}, seed {run.seed}" for run in results))
        blocks += [Heading("What differs in the recipes"), RenderedTable(heads, differing, left=len(heads))]
    blocks.append(Text(f"{_LINKS} Written by pipebench {pipebench.__version__}."))
    page = Page(f"pipebench compare {parent.wait_for_id() or ''}".rstrip(), parent.name, tuple(blocks))
    return html(page, parent.folder or Path(), server_address())


def _tables(parent: RunLog, runs: Sequence[Run]) -> Iterator[Block]:
    """Yield every group's verdict around its table."""
    results = [run.result for run in runs]
    for group in groups(results):
        if group.title:
            yield Heading(group.title)
        first, *others = [*verdict(group), ""]
        yield Text(first)
        lines: list[tuple[Cell, ...]] = [
            (_linked(parent, runs, entry, name), *cells)
            for entry, (name, *cells) in zip(group.entries, rows(results, group), strict=True)
        ]
        yield RenderedTable(headings(results), lines, left=2)
        yield from _list(others)


def _linked(parent: RunLog, runs: Sequence[Run], entry: ComparedRun, name: str) -> LinkedText:
    """Return a row's name with a link per run of it."""
    links = (
        PageLink(
            f"seed {run.result.seed}", run.result.sentence, parent.store.experiment_id or "", run.mlflow_run_id or ""
        )
        for run in runs
        if run.result.name == entry.name
    )
    return LinkedText(name, tuple(links))


def _list(sentences: Sequence[str]) -> Iterator[Text]:
    if any(sentences):
        yield Text("\n".join(f"- {sentence}" for sentence in sentences if sentence))
