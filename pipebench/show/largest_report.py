"""Prints the answer of `pipebench largest`: a sentence, and every size that was tried."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from pipebench.errors import printable
from pipebench.formats import num_bytes, percent
from pipebench.recipe.load import LoadedRecipe
from pipebench.show.tables import new_table, print_table
from pipebench.show.terminal import standard_output

if TYPE_CHECKING:
    from pipebench.train.largest_minibatch import Trial


def print_largest(
    loaded: LoadedRecipe, found: "Trial", trials: Sequence["Trial"], console: Console | None = None
) -> None:
    """Print the largest minibatch size that fits, and all that were tried."""
    cluster, console = loaded.cluster, console or standard_output()
    assert cluster.memory_bytes is not None
    sentence = (
        f"{loaded.recipe.name}: {found.minibatch_size} samples per minibatch are the most of those tried that fit in "
        f"the {num_bytes(cluster.memory_bytes)} of a {cluster.device}"
    )
    console.print(Text(printable(sentence)), soft_wrap=True)
    table = new_table("minibatch", "fullest worker", "of a device", "", left=0)
    for trial in sorted(trials, key=lambda each: each.minibatch_size):
        peak = trial.peak_bytes
        cells = ("no plan fits", "") if peak is None else (num_bytes(peak), percent(peak / cluster.memory_bytes))
        table.add_row(f"{trial.minibatch_size:,}", *cells, "fits" if trial.fits else "")
    print_table(console, table, indent=2, left=0)
