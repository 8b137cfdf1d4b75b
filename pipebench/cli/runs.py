"""`pipebench runs`: past runs and comparisons."""

import click

from pipebench.cli.group import tracebacks
from pipebench.run.folder import records
from pipebench.show.past_runs import print_past_runs
from pipebench.show.terminal import standard_output
from pipebench.tracking.connection import default_uri
from pipebench.tracking.orphaned import close_orphaned
from pipebench.tracking.results import past_runs

_MOST = 20  # runs and comparisons that are listed; the runs of comparisons don't count
_WIDE = 1000  # columns; more than any row has, so that files and pipes get one line per run, for grep


@click.command
@click.argument("word", metavar="[WORD]", required=False)
@click.option("--all", "everything", is_flag=True, help=f"List all, not only the last {_MOST}.")
@tracebacks
def runs(word: str | None, everything: bool) -> None:
    """List past runs and comparisons, the newest first, the runs of a comparison below it.

    With a WORD, lists only those that have it in their name or their recipe's. Runs that aren't in MLflow yet are
    listed, too. `pipebench compare` takes the ids.

    \b
    Examples:
      pipebench runs
      pipebench runs pipedream --all
    """
    close_orphaned(default_uri(), records())
    console = standard_output(plain_width=_WIDE)
    print_past_runs(past_runs(records()), word or "", None if everything else _MOST, console)
