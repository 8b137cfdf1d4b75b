"""`pipebench calibrate`: fit a report's constants."""

import click

from pipebench.cli.group import tracebacks
from pipebench.garbage import without_collector
from pipebench.report.catalog import find_report
from pipebench.report.load import load_report


@click.command
@click.argument("name", metavar="REPORT")
@click.option("--write", "writes", is_flag=True, help="Write the fitted numbers into the clusters' files.")
@tracebacks
def calibrate(name: str, writes: bool) -> None:
    """Fit the constants that a report names under `calibration`, each on the cells that are named for it.

    Prints the constants, every cell with a published number (fitted or predicted), geometric-mean errors and rank
    correlations: of the fitted cells, of the others, and of all cells, each predicted by constants that were fitted
    without it.

    \b
    Examples:
      pipebench calibrate table1
      pipebench calibrate table1 --write

    \b
    Exit codes: 0 fitted, 2 a mistake in what was given, 3 an internal failure, 130
    interrupted.
    """
    report, asked = load_report(find_report(name))
    with without_collector():
        from pipebench.report.calibrating import print_calibration

    print_calibration(report, asked, writes=writes)
