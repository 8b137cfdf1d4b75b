"""Find reports by path, or by short name from anywhere, in a checkout and in an installed wheel."""

import os
from pathlib import Path

import pipebench
from pipebench.errors import Fault, RecipeError, UserError, nearest
from pipebench.recipe.catalog import shipped_folder

RENDERED = "rendered"  # the pages' default folder, in the working directory


def reports_folder() -> Path:
    """Return the folder of the shipped reports."""
    return shipped_folder("reports")


def report_names() -> list[str]:
    """Return the short names of all shipped reports, sorted."""
    return sorted(path.stem for path in reports_folder().glob("*.yaml"))


def find_report(reference: str) -> Path:
    """Return the file of a report, given a path or a shipped report's short name; raises a RecipeError if missing."""
    names = report_names()
    if reference in names:
        return reports_folder() / f"{reference}.yaml"
    if os.path.isfile(reference):
        return Path(reference)
    if reference.endswith((".yaml", ".yml")):
        beside = Path(os.path.dirname(reference)).glob("*.yaml")
        problem = f"no such file{nearest(reference, map(str, beside))}"
    else:
        allowed = f"{', '.join(names)} or the path of a YAML file"
        problem = f"no such report, allowed are {allowed}{nearest(reference, names)}"
    raise RecipeError([Fault(f"report {reference[:60]!r}", "", problem)])


def require_keepable(path: Path) -> None:
    """Raise a UserError if results can't be stored beside a report.

    Not in the installed package, nor in a checkout of it from a working directory elsewhere.
    """
    package = Path(pipebench.__file__).resolve().parent
    if path.resolve().is_relative_to(package):
        raise UserError(
            f"--keep: {path} is a part of the installed package, where nothing is written; copy it, with the recipes "
            "that it names by path, and name the copy"
        )
    shipped = reports_folder().resolve()
    if path.resolve().is_relative_to(shipped) and not Path.cwd().resolve().is_relative_to(shipped.parent):
        raise UserError(
            f"--keep: {path} is in a checkout of pipebench, which only a command that runs there writes to; run it "
            "there, or copy the report and name the copy"
        )
