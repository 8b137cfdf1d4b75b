"""`pipebench report --list`: every shipped report; of one that is named, how much of it is there and what is left."""

from collections.abc import Iterator

from pipebench.errors import RecipeError
from pipebench.report.catalog import find_report, report_names
from pipebench.report.collect import Collection
from pipebench.report.load import load_report, read_report
from pipebench.report.progress import guess


def listed() -> Iterator[str]:
    """Yield a line per report; recipes are not looked at, of which there are hundreds.

    Raises:
        RecipeError: a report's file is wrong.
    """
    names = report_names()
    width = max(map(len, names), default=0)
    for name in names:
        report, reading = read_report(find_report(name))
        if reading.faults:
            raise RecipeError(reading.faults)
        yield f"{name:<{width}}  {len(report.rows):>3} rows  {report.title}"


def what_is_there(name: str) -> Iterator[str]:
    """Yield a report's title, how many of its results are there already, and how long the rest takes.

    Args:
        name: of a shipped report, or the path of a file.

    Raises:
        UserError: the report is wrong, or MLflow can't be asked.
    """
    path = find_report(name)
    report, asked = load_report(path)
    collection = Collection([each for each in asked if not each.largest])
    collection.look_up(path.parent)
    missing = collection.missing
    rest = f", the rest takes {guess(missing)}" if missing else ""
    yield report.title
    unsized = sum(each.largest for each in asked)
    sought = f"; the largest minibatch that fits is sought first for {unsized} more" if unsized else ""
    yield f"{len(report.rows)} rows, {len(collection.answers)} of {len(collection.recipes)} results{rest}{sought}"
