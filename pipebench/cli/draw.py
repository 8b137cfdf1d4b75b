"""`pipebench draw`: the pipeline that a recipe makes, drawn as text."""

import click

from pipebench.cli.group import tracebacks
from pipebench.cli.references import load_one


@click.command(short_help="Draw the pipeline that a recipe makes.")
@click.argument("words", metavar="RECIPE [KEY=VALUE...]", nargs=-1, required=True)
@tracebacks
def draw(words: tuple[str, ...]) -> None:
    """Draw the start of the pipeline that a recipe makes: workers downwards, time to the right. Trains nothing.

    \b
    Examples:
      pipebench draw quickstart
      pipebench draw quickstart/gpipe parallelism.microbatches=8
    """
    loaded = load_one(words)
    from pipebench.recipe.preflight import preflight
    from pipebench.run import runner

    preflight(loaded, trains=False)
    click.echo(runner.draw(loaded))
