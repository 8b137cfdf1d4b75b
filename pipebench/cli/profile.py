"""`pipebench profile`: the cost of every layer of a model."""

from pathlib import Path

import click

from pipebench.cli.group import tracebacks
from pipebench.cli.json_output import json_flag
from pipebench.cli.outputs import print_answer
from pipebench.cli.parameters import FILE, option
from pipebench.cli.references import complete, load_one, split
from pipebench.errors import UserError
from pipebench.recipe.preflight import preflight
from pipebench.show.terminal import standard_error


@click.command
@click.argument("words", metavar="RECIPE|FILE [KEY=VALUE...]", nargs=-1, required=True, shell_complete=complete)
@option(
    "--out", FILE, "OUT.json|OUT.txt",
    "Write the profile here, which pipebench reads back; a .txt in the PipeDream artifact's format.",
)  # fmt: skip
@option("--picture", FILE, "OUT.png", "Write the picture here.")
@json_flag
@click.option(
    "--samples",
    type=click.IntRange(1),
    help="The number of samples to show; of a graph.txt, the number that its costs are for.  [default: the largest]",
)
@click.option("--all", "show_all", is_flag=True, help="Show every layer, however many there are.")
@tracebacks
def profile(
    words: tuple[str, ...], out: Path | None, picture: Path | None, samples: int | None, show_all: bool, as_json: bool
) -> None:
    """Show what every layer of a model costs: time forward and backward, activations, parameters.

    A RECIPE is profiled as its engine.timing says: measured on this machine, computed for its cluster's device, or read
    from a file. NAME.profile.json and NAME.profile.png are written to the current folder, where NAME is the recipe's.
    A FILE is a profile (.json) or the PipeDream artifact's graph.txt (.txt); it is shown, and NAME.profile.png is
    written. With --json, only the files that --out and --picture name are written.

    \b
    Examples:
      pipebench profile quickstart
      pipebench profile quickstart cluster.name=local --samples 32
      pipebench profile quickstart cluster.name=cluster-b --out v100.json --picture v100.png
      pipebench profile quickstart.profile.json --out quickstart.graph.txt
      pipebench profile gnmt8.graph.txt --samples 64 --all
      pipebench run quickstart engine.timing=v100.json
    """
    references, overrides = split(words)
    if as_json and len(references) == 2:
        raise UserError(f"--json prints the profile: to write {references[1]}, say --out {references[1]}")
    file = Path(references[0]) if len(references) == 1 and references[0].endswith((".json", ".txt")) else None
    if file is not None and overrides:
        raise click.UsageError(f"{overrides[0]} changes a recipe, and {file} is a profile")
    source = load_one(words) if file is None else file
    from pipebench.cli import profiling

    files = profiling.outputs(source, out, picture, by_default=not as_json)
    if not isinstance(source, Path):
        preflight(source, trains=False)
    found = profiling.profile(source, samples, show_all=show_all)
    print_answer(found, as_json=as_json)
    profiling.write_all(found, files, standard_error() if as_json else None)
