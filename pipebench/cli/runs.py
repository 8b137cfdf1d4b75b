"""`pipebench runs`: past runs and comparisons."""

import click

from pipebench.cli.group import tracebacks
from pipebench.run.folder import records
from pipebench.show.past_runs import print_past_runs
from pipebench.show.terminal import standard_output
from pipebench.tracking.connection import default_uri
from pipebench.tracking.orphaned import close_orphaned
from pipebench.tracking.results import past_runs

_MOST = 20  # runs and comparisons, those of comparisons not counted
_WIDE = 1000  # columns that no row has: a file or a pipe gets a line a run, for grep


@click.command
@click.argument("word", metavar="[WORD]", required=False)
@click.option("--all", "everything", is_flag=True, help=f"List all, not only the last {_MOST}.")
@tracebacks
def runs(word: str | None, everything: bool) -> None:
    """List past runs and comparisons, the newest first, the runs of a comparison below it.

    WORD lists those that have it in their name or their recipe's. Runs that MLflow hasn't taken are listed, too.
    `pipebench compare` takes the ids.

    \b
    Examples:
      pipebench runs
      pipebench runs pipedream --all
    """
    close_orphaned(default_uri(), records())
    console = standard_output(plain_width=_WIDE)
    print_past_runs(past_runs(records()), word or "", None if everything else _MOST, console)
