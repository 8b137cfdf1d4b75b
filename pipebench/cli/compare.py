"""`pipebench compare`: recorded runs side by side."""

from pathlib import Path

import click

from pipebench.cli.group import tracebacks
from pipebench.cli.outputs import Output, refuse_to_overwrite
from pipebench.errors import UserError
from pipebench.garbage import without_collector
from pipebench.run.folder import records


@click.command
@click.argument("runs", metavar="RUN RUN... | COMPARISON", nargs=-1, required=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    default=Path(),
    help="Where comparison.md and curves.png go.  [default: the working directory]",
)
@tracebacks
def compare(runs: tuple[str, ...], out: Path) -> None:
    """Print the results of recorded runs side by side, and what differs in their recipes; draw all curves in a picture.

    COMPARISON is one that `pipebench runs` lists, by its id, the beginning of it, or its name: all of its runs.
    RUN is MLflow's id of a run, the name of its folder under pipebench-runs/, the beginning of one of these, or a name
    that no other run has: what MLflow calls it, or its recipe's. Runs that MLflow hasn't taken are found, too.

    \b
    Examples:
      pipebench compare quickstart-dp quickstart-pipedream
      pipebench compare 06a675db 1acc9300 --out figures
      pipebench compare 5b1d0c9e
      pipebench compare "dp 4, seed 0" "pipedream straight, seed 0"
    """
    with without_collector():
        from pipebench.show import console, differences
        from pipebench.tracking.results import find_runs, runs_of

    page = Output("--out", out / "comparison.md", "a page of `pipebench compare`", differences.is_our_page)
    picture = Output("--out", out / "curves.png", "a picture of `pipebench compare`", differences.is_our_picture)
    refuse_to_overwrite([page, picture])
    found = find_runs(runs, records()) if len(runs) > 1 else runs_of(runs[0])
    ids = [run.run_id for run in found]
    for index, run_id in enumerate(ids):
        if run_id in ids[:index]:
            raise UserError(f"run: {runs[index]!r} and {runs[ids.index(run_id)]!r} are the same run, {run_id}")
    results = differences.labelled(found)
    if len(runs) > 1:
        console.print_differences(results, differences.differences(results))
    console.print_comparison(results, "")
    drawn = differences.has_picture(results)
    text = differences.markdown(results, "curves.png" if drawn else None)
    page.write(lambda path: path.write_text(text, encoding="utf-8"))
    if drawn:
        picture.write(lambda path: differences.draw_all(results, path))
