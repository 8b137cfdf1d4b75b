"""`pipebench report --list`: every shipped report, how much of it is there already, and how long the rest takes."""

from collections.abc import Iterator

from pipebench.report.catalog import find_report, report_names
from pipebench.report.collect import Collection
from pipebench.report.load import load_report
from pipebench.report.progress import guess


def listed() -> Iterator[str]:
    """Yield a few words per report, as soon as they are known: all recipes of a report are loaded for them.

    Raises:
        UserError: a report is wrong, or MLflow can't be asked.
    """
    names = report_names()
    width = max(map(len, names), default=0)
    for name in names:
        path = find_report(name)
        report, asked = load_report(path)
        collection = Collection(asked)
        collection.look_up(path.parent)
        there, missing = f"{len(collection.answers)} of {len(collection.recipes)} results", collection.missing
        rest = f", the rest takes {guess(missing)}" if missing else ""
        yield f"{name:<{width}}  {report.title}"
        yield f"{'':<{width}}  {len(report.rows)} rows, {there}{rest}"
