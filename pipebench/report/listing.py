"""`pipebench report --list`: every shipped report, how much of it is there already, and how long the rest takes."""

from rich.table import Table

from pipebench.report.catalog import find_report, report_names
from pipebench.report.collect import Collection
from pipebench.report.load import load_report
from pipebench.report.progress import guess
from pipebench.show.terminal import print_plain, standard_output


def list_reports() -> None:
    """Print a line per report.

    Raises:
        UserError: a report is wrong, or MLflow can't be asked.
    """
    table = Table(box=None, pad_edge=False)
    for heading in ("report", "title"):
        table.add_column(heading, overflow="fold")
    for heading in ("rows", "results", "the rest takes"):
        table.add_column(heading, justify="right")
    for name in report_names():
        path = find_report(name)
        report, asked = load_report(path)
        collection = Collection(asked)
        collection.look_up(path.parent)
        there = f"{len(collection.answers)} of {len(collection.recipes)}"
        table.add_row(name, report.title, str(len(report.rows)), there, guess(collection.missing) or "-")
    print_plain(standard_output(), table)
