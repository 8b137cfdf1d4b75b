"""Where reports are: by path, or by short name from anywhere, in a checkout and in an installed wheel alike."""

import os
from pathlib import Path

from pipebench.errors import Fault, RecipeError, nearest
from pipebench.recipe.catalog import shipped_folder


def reports_folder() -> Path:
    """Return the folder of the shipped reports."""
    return shipped_folder("reports")


def report_names() -> list[str]:
    """Return the short names of all shipped reports, sorted."""
    return sorted(path.stem for path in reports_folder().glob("*.yaml"))


def find_report(reference: str) -> Path:
    """Return the file of a report.

    Args:
        reference: its path, or the short name of a shipped one.

    Raises:
        RecipeError: nothing is there.
    """
    names = report_names()
    if reference in names:
        return reports_folder() / f"{reference}.yaml"
    if os.path.isfile(reference):
        return Path(reference)
    problem = f"no such report, allowed are {', '.join(names)} or the path of a YAML file{nearest(reference, names)}"
    raise RecipeError([Fault(f"report {reference[:60]!r}", "", problem)])
