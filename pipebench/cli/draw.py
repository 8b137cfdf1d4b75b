"""`pipebench draw`: a recipe's pipeline as text."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipebench.cli.group import tracebacks
from pipebench.cli.outputs import Output, refuse_to_overwrite
from pipebench.cli.references import complete, load_one
from pipebench.garbage import without_collector
from pipebench.recipe.preflight import preflight
from pipebench.schedule.csv_form import is_schedule

if TYPE_CHECKING:
    from pipebench.train.memory_forecast import MemoryForecast


@click.command
@click.argument("words", metavar="RECIPE [KEY=VALUE...]", nargs=-1, required=True, shell_complete=complete)
@click.option("--versions", is_flag=True, help="Tell which weight version each uses: F3@1.")
@click.option(
    "--csv",
    "table",
    type=click.Path(path_type=Path),
    metavar="OUT.csv",
    help="Write one update's passes here, in the CSV form of torch.distributed.pipelining.",
)
@click.option("--memory", type=click.Path(path_type=Path), metavar="OUT.png", help="Draw memory over time here.")
@click.option("--occupancy", type=click.Path(path_type=Path), metavar="OUT.png", help="Draw occupancy over time here.")
@tracebacks
def draw(
    words: tuple[str, ...], versions: bool, table: Path | None, memory: Path | None, occupancy: Path | None
) -> None:
    """Draw the start of the pipeline that a recipe makes: workers downwards, time to the right. Trains nothing.

    F3 is the forward of minibatch 3, or of microbatch 3, B3 its backward, I3 and W3 the input and weight part of one
    that is split; where workers have several stages the stage stands first, 2F3. With --versions, F3@1 uses the weights
    after update 1; updates count from the start. F3@1~2 has them predicted 2 updates ahead, B3@3~-2 taken back by 2.

    --memory writes a picture of every worker's memory over simulated time, by kind, beside its capacity; --occupancy
    one of when it computes, waits for bytes on their way, or for others.

    \b
    Examples:
      pipebench draw quickstart
      pipebench draw quickstart/gpipe parallelism.microbatches=8
      pipebench draw modes/pipedream-2bw --versions
      pipebench draw modes/xpipe --versions
      pipebench draw modes/zero-bubble --csv zb-h1.csv
      pipebench draw quickstart --memory memory.png --occupancy occupancy.png
    """
    with without_collector():
        loaded = load_one(words)
        from pipebench.run import runner

    output = Output("--csv", table, "a schedule", is_schedule)
    pictures = _over_time(memory, occupancy)
    refuse_to_overwrite([output, *(picture for picture, _ in pictures)])
    preflight(loaded, trains=False)
    if table is not None:
        text = runner.schedule_csv(loaded)
        output.write(lambda path: path.write_text(text, encoding="utf-8"))
    if pictures:
        watch = runner.watch(loaded)
        click.echo(watch.sentence)
        for picture, drawn in pictures:
            picture.write(partial(drawn, watch))
    if table is None and not pictures:
        click.echo(runner.draw(loaded, versions=versions))


def _over_time(
    memory: Path | None, occupancy: Path | None
) -> list[tuple[Output, Callable[["MemoryForecast", Path], None]]]:
    """Return the requested pictures, each with its drawing function."""
    if memory is None and occupancy is None:
        return []
    from pipebench.show import memory_picture, occupancy_picture, over_time  # late: matplotlib

    return [
        (
            Output("--memory", memory, "a picture of memory over time", memory_picture.is_our_picture),
            lambda watch, path: memory_picture.draw_memory(watch.memory, path),
        ),
        (
            Output("--occupancy", occupancy, "a picture of occupancy over time", occupancy_picture.is_our_picture),
            lambda watch, path: occupancy_picture.draw_occupancy(watch.occupancy(over_time.NUM_PARTS), path),
        ),
    ]
