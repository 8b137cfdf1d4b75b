"""The output of `pipebench report --list`: all shipped reports, or the state of one."""

from collections.abc import Iterator

from pipebench.errors import RecipeError
from pipebench.report.catalog import find_report, report_names
from pipebench.report.collect import Collection
from pipebench.report.definition import Report
from pipebench.report.load import load_report, read_report
from pipebench.report.progress import guess


def listed() -> Iterator[str]:
    """Yield a line per report, without loading its recipes; raises a RecipeError for an invalid report."""
    names = report_names()
    width = max(map(len, names), default=0)
    for name in names:
        report, reading = read_report(find_report(name))
        if reading.faults:
            raise RecipeError(reading.faults)
        yield f"{name:<{width}}  {_rows(report):>8}  {report.title}"


def what_is_there(name: str) -> Iterator[str]:
    """Yield title, available results and time left of a report, given by short name or path.

    Raises:
        UserError: the report is invalid or MLflow can't be queried.
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
    yield f"{_rows(report)}, {len(collection.by_recipe)} of {len(collection.recipes)} results{rest}{sought}"


def _rows(report: Report) -> str:
    return f"{len(report.rows)} row{'s' if len(report.rows) > 1 else ''}"
