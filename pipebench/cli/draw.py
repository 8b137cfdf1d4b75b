"""`pipebench draw`: the pipeline that a recipe makes, drawn as text."""

from pathlib import Path

import click

from pipebench.cli.group import tracebacks
from pipebench.cli.imports import importing
from pipebench.cli.references import load_one


@click.command(short_help="Draw the pipeline that a recipe makes.")
@click.argument("words", metavar="RECIPE [KEY=VALUE...]", nargs=-1, required=True)
@click.option("--versions", is_flag=True, help="Tell which weight version each uses: F3@1.")
@click.option(
    "--csv",
    "table",
    type=click.Path(path_type=Path),
    metavar="OUT.csv",
    help="Write one update's passes here, in the CSV form of torch.distributed.pipelining.",
)
@tracebacks
def draw(words: tuple[str, ...], versions: bool, table: Path | None) -> None:
    """Draw the start of the pipeline that a recipe makes: workers downwards, time to the right. Trains nothing.

    F3 is the forward of minibatch 3, or of microbatch 3, B3 its backward, I3 and W3 the input and weight part of one
    that is split; where workers have several stages the stage stands first, 2F3. With --versions, F3@1 uses the weights
    after update 1; updates count from the start. F3@1~2 has them predicted 2 updates ahead, B3@3~-2 taken back by 2.

    \b
    Examples:
      pipebench draw quickstart
      pipebench draw quickstart/gpipe parallelism.microbatches=8
      pipebench draw modes/pipedream-2bw --versions
      pipebench draw modes/xpipe --versions
      pipebench draw modes/zero-bubble --csv zb-h1.csv
    """
    with importing():
        loaded = load_one(words)
        from pipebench.cli.outputs import Output, refuse_to_overwrite
        from pipebench.recipe.preflight import preflight
        from pipebench.run import runner
        from pipebench.schedule.csv_form import is_schedule

    output = Output("--csv", table, "a schedule", is_schedule)
    refuse_to_overwrite([output])
    preflight(loaded, trains=False)
    if table is not None:
        text = runner.schedule_csv(loaded)
        output.write(lambda path: path.write_text(text, encoding="utf-8"))
        return
    click.echo(runner.draw(loaded, versions=versions))
