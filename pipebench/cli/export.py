"""`pipebench export`: a checkpoint's weights as a plain state_dict."""

import click

from pipebench.cli.group import tracebacks, trust
from pipebench.errors import print_notice


@click.command
@click.argument("run_", metavar="RUN")
@click.option("--out", metavar="FILE.pt", help="Write the weights here.  [default: RUN's id, in the current folder]")
@click.option("--step", type=click.IntRange(0), help="The checkpoint after so many minibatches.  [default: the newest]")
@trust
@tracebacks
def export(run_: str, out: str | None, step: int | None, trusts: bool) -> None:
    """Write the weights of a run's checkpoint as a plain state_dict, whatever plan it was trained under.

    RUN is the run's id (or the start of it), its MLflow run id, or its folder under pipebench-runs/. The model is built
    by the code that the recipe names: the executed files are listed, and another user's run is refused.

    \b
    Examples:
      pipebench export quickstart-1f0c9a7e
      pipebench export quickstart-1f0c9a7e --step 375 --out quickstart.pt
    """
    from pipebench.run import export as exporting

    written, skipped = exporting.export(run_, out, step, trusts=trusts)
    for sentence in skipped:
        print_notice(sentence)
    click.echo(written)
