"""`pipebench compare`: recorded runs side by side."""

from functools import partial
from pathlib import Path

import click

from pipebench.cli.group import tracebacks
from pipebench.cli.json_output import json_flag
from pipebench.cli.outputs import Output, is_picture_by, print_answer, refuse_to_overwrite
from pipebench.cli.parameters import FILE, option
from pipebench.garbage import without_collector
from pipebench.run.folder import records
from pipebench.show.answers import recorded
from pipebench.show.differences import has_picture, is_our_page, markdown
from pipebench.show.terminal import standard_error


@click.command
@click.argument("runs", metavar="COMPARISON | RUN RUN...", nargs=-1, required=True)
@option(
    "--out", FILE, "FOLDER",
    "Where comparison.md and curves.png go.  [default: the working directory; with --json, nowhere]",
)  # fmt: skip
@json_flag
@tracebacks
def compare(runs: tuple[str, ...], out: Path | None, as_json: bool) -> None:
    """Print the results of recorded runs side by side, and what differs in their recipes; draw all curves in a picture.

    COMPARISON stands for all of its runs. It is the id, the beginning of the id, or the name of one that
    `pipebench runs` lists. Several may be given: a sweep that was interrupted and the rest of it are two comparisons.
    RUN is MLflow's id of a run, the name of its folder under pipebench-runs/, the beginning of one of these, or a name
    that no other run has: MLflow's, its recipe's, or the printed one. Runs that aren't in MLflow yet are found, too.

    \b
    Examples:
      pipebench compare quickstart-dp quickstart-pipedream
      pipebench compare 06a675db 1acc9300 --out figures
      pipebench compare 5b1d0c9e
      pipebench compare 5b1d0c9e 0c44e1f7
      pipebench compare "dp 4, seed 0" "pipedream straight, seed 0"
    """
    folder = out or (None if as_json else Path())
    with without_collector():
        from pipebench.show import figures

    is_ours = partial(is_picture_by, figures.MADE_BY)
    page = Output("--out", folder and folder / "comparison.md", "a page of `pipebench compare`", is_our_page)
    picture = Output("--out", folder and folder / "curves.png", "a picture of `pipebench compare`", is_ours)
    refuse_to_overwrite([page, picture])
    found = recorded(runs, records())
    print_answer(found, as_json=as_json)
    console = standard_error() if as_json else None
    drawn = has_picture(found.results)
    text = markdown(found.results, "curves.png" if drawn else None)
    page.write(lambda path: path.write_text(text, encoding="utf-8"), console)
    if drawn:
        picture.write(lambda path: figures.curves_figure(found.results).write(path), console)
