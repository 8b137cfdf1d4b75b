"""`pipebench report`: published tables and figures beside reproduced ones, or a user's own."""

import shlex
from pathlib import Path
from typing import Any

import click

from pipebench.cli.group import tracebacks
from pipebench.cli.parameters import FILE, Parameter, name_of, option
from pipebench.errors import UserError, printable
from pipebench.files import folder_problem
from pipebench.garbage import without_collector
from pipebench.interrupts import RaisedBySignals
from pipebench.recipe.engines import ENGINES
from pipebench.report.catalog import RENDERED, find_report, require_keepable
from pipebench.report.load import load_report
from pipebench.show.progress import preparing


def parse_rows(text: str) -> tuple[str, ...]:
    """Return the names and patterns in a text such as `vgg16-*,gnmt8-2x8-b`; raises a ValueError if there are none."""
    names = tuple(filter(None, (part.strip() for part in text.split(","))))
    if not names:
        raise ValueError(f"got {text[:60]!r}, allowed are names of rows or patterns, joined by commas")
    return names


@click.command
@click.argument("name", metavar="[NAME]", required=False)
@option("--only", Parameter(parse_rows), "ROW,...", "Only these rows, by name or by pattern such as 'vgg16-*'.")
@option("--engine", name_of(ENGINES), "KIND", f"Engine of the runs, except `columns: same` ones: {', '.join(ENGINES)}.")
@click.option("--fresh", is_flag=True, help="Run everything again, even if results are recorded or kept.")
@click.option(
    "--keep", "keeps", is_flag=True, help="Store the results of runs that trained in a folder kept/ beside the report."
)
@click.option("--no-training", is_flag=True, help="Leave out seeds that aren't trained yet; the page says which.")
@option("--out", FILE, "FOLDER", "Write here.  [default: rendered/NAME/ in the working directory]")
@click.option(
    "--list",
    "lists",
    is_flag=True,
    help="List the reports; with NAME, print how many results are there, and how long the rest takes.",
)
@tracebacks
def report(name: str | None, lists: bool, out: Path | None, **given: Any) -> int:
    """Make a report: run what it needs and hasn't run yet, and set the results beside published ones.

    NAME is a report from `pipebench report --list`, or the path of a YAML file of your own. Results of
    this version that MLflow has already are used, so an interrupted report goes on. Markdown, a page of HTML and
    pictures are written to rendered/NAME/ in the working directory, and recorded in MLflow with all runs.

    \b
    Examples:
      pipebench report --list
      pipebench report table1
      pipebench report table1 --only 'vgg16-*,gnmt8-2x8-b'
      pipebench report my-table.yaml --engine virtual --fresh
      pipebench report my-table.yaml --keep

    \b
    Exit codes: 0 rendered, 2 a mistake in what was given, 3 an internal failure, 130
    interrupted.
    """
    if lists:
        with preparing(name or "reports", work="reading"):
            with without_collector():
                from pipebench.report.listing import listed, what_is_there

            lines = [*(listed() if name is None else what_is_there(name))]
        for line in lines:
            click.echo(printable(line))
        return 0
    if name is None:
        raise click.UsageError("name a report, for example: pipebench report table1; --list lists them")
    with RaisedBySignals():
        return _made(name, out, **given)


def _made(
    name: str, out: Path | None, *, only: tuple[str, ...] | None, engine: str | None, no_training: bool, **given: bool
) -> int:
    """Make a report and return the exit code; `given` are `fresh` and `keeps`."""
    path = find_report(name)
    folder = out or Path(RENDERED, path.stem)
    problem = folder_problem(folder)
    if problem is not None:
        raise UserError(f"{folder}: needed is a folder that can be written to, but {problem}; --out names another")
    with preparing(name, work="loading recipes"):
        definition, asked = load_report(path, only or (), engine)
        with without_collector():
            from pipebench.report.make import MakeOptions, make_report

    if given["keeps"]:
        require_keepable(path)
    options = [f"--only {shlex.quote(','.join(only))}"] if only else []
    options += [f"--engine {engine}"] if engine else []
    options += ["--no-training"] if no_training else []
    command = " ".join(["pipebench report", shlex.quote(name), *options])
    return make_report(definition, asked, MakeOptions(command, folder, **given, trains=not no_training))
