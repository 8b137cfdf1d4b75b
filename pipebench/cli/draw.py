"""`pipebench draw`: a recipe's pipeline as text."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipebench.cli.group import tracebacks
from pipebench.cli.outputs import PNG, Output, is_picture_by, refuse_to_overwrite
from pipebench.cli.parameters import FILE, Choice, option
from pipebench.cli.references import complete, load_one
from pipebench.errors import UserError
from pipebench.garbage import without_collector
from pipebench.recipe.preflight import preflight
from pipebench.schedule.csv_form import is_schedule

if TYPE_CHECKING:
    from pipebench.show.inline import InlineFigure
    from pipebench.train.memory_forecast import MemoryForecast

MEMORY = "memory"
PICTURES = (MEMORY, "occupancy")


@click.command
@click.argument("words", metavar="RECIPE [KEY=VALUE...]", nargs=-1, required=True, shell_complete=complete)
@click.option("--versions", is_flag=True, help="Show the weight version that each pass uses, as in F3@1.")
@option("--out", FILE, "OUT.csv", "Write one update's passes here, in the CSV form of torch.distributed.pipelining.")
@option("--picture", FILE, "OUT.png", "Draw memory over time here.")
@click.option("--of", "what", type=Choice(PICTURES), help="What --picture draws.  [default: memory]")
@tracebacks
def draw(words: tuple[str, ...], versions: bool, out: Path | None, picture: Path | None, what: str | None) -> None:
    """Draw the start of a recipe's pipeline: workers downwards, time to the right. Trains nothing.

    F3 is the forward of minibatch or microbatch 3, and B3 its backward. I3 and W3 are the input and the weight part of
    a split backward. Where workers have several stages, the stage comes first: 2F3. With --versions, F3@1 uses the
    weights after update 1, counted from the start, F3@1~2 predicts them for 2 updates later, B3@3~-2 for 2 earlier;
    B3+1 also starts all-reduce 1.

    --picture draws every worker's memory by kind over simulated time, beside its capacity; with --of occupancy, when
    every worker computes, waits for messages in transfer, or waits for other workers.

    \b
    Examples:
      pipebench draw quickstart
      pipebench draw quickstart/gpipe parallelism.microbatches=8
      pipebench draw modes/pipedream-2bw --versions
      pipebench draw modes/xpipe --versions
      pipebench draw modes/zero-bubble --out zb-h1.csv
      pipebench draw quickstart --picture memory.png
      pipebench draw quickstart --picture occupancy.png --of occupancy
    """
    if what is not None and picture is None:
        raise UserError(f"--of {what} says what --picture draws: add --picture {what}.png")
    with without_collector():
        loaded = load_one(words)
        from pipebench.run import runner

    kind = what or MEMORY
    schedule, drawing = Output("--out", out, "a schedule", is_schedule), _picture(kind, picture)
    refuse_to_overwrite([schedule, drawing])
    preflight(loaded, trains=False)
    if out is not None:
        text = runner.schedule_csv(loaded)
        schedule.write(lambda path: path.write_text(text, encoding="utf-8"))
    if picture is not None:
        forecast = runner.forecast(loaded)
        click.echo(forecast.sentence)
        drawing.write(lambda path: _drawing(kind)[1](forecast).write(path))
    if out is None and picture is None:
        click.echo(runner.draw(loaded, versions=versions))


def _picture(kind: str, path: Path | None) -> Output:
    what = f"a picture of {kind} over time"
    return Output("--picture", path, what, lambda file: is_picture_by(_drawing(kind)[0], file), PNG)


def _drawing(kind: str) -> tuple[str, Callable[["MemoryForecast"], "InlineFigure"]]:
    """Return the origin that a picture's file names, and the function that draws the picture."""
    from pipebench.show import memory_picture, occupancy_picture, over_time  # late: matplotlib

    if kind == MEMORY:
        return memory_picture.MADE_BY, lambda forecast: memory_picture.memory_figure(forecast.memory)
    return occupancy_picture.MADE_BY, lambda forecast: occupancy_picture.occupancy_figure(
        forecast.occupancy(over_time.NUM_PARTS)
    )
