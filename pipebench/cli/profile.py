"""`pipebench profile`: the cost of every layer of a model."""

from pathlib import Path

import click

from pipebench.cli.group import tracebacks
from pipebench.cli.references import complete, load_one, split
from pipebench.recipe.preflight import preflight


@click.command
@click.argument("words", metavar="RECIPE|FILE [KEY=VALUE...]", nargs=-1, required=True, shell_complete=complete)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    metavar="OUT.json",
    help="Write the profile here; pipebench reads it back.",
)
@click.option(
    "--graph-txt",
    type=click.Path(path_type=Path),
    metavar="OUT.txt",
    help="Write it in the PipeDream artifact's format.",
)
@click.option("--picture", type=click.Path(path_type=Path), metavar="OUT.png", help="Write the picture here.")
@click.option(
    "--samples", type=click.IntRange(1), help="Which size to show, by default the largest; of a graph.txt, its."
)
@click.option("--all", "show_all", is_flag=True, help="Show every layer, however many there are.")
@tracebacks
def profile(
    words: tuple[str, ...],
    json_file: Path | None,
    graph_txt: Path | None,
    picture: Path | None,
    samples: int | None,
    show_all: bool,
) -> None:
    """Show what every layer of a model costs: time forward and backward, activations, parameters.

    RECIPE is profiled as it says (engine.timing): measured on this machine, computed for its cluster's device, or read
    from a file. NAME.profile.json and NAME.profile.png are written to the current folder, NAME being the recipe's.
    FILE is a profile (.json) or the PipeDream artifact's graph.txt (.txt); it is shown, and NAME.profile.png written.

    \b
    Examples:
      pipebench profile quickstart
      pipebench profile quickstart cluster.name=local --samples 32
      pipebench profile quickstart cluster.name=cluster-b --json v100.json --picture v100.png
      pipebench profile quickstart.profile.json --graph-txt quickstart.graph.txt
      pipebench profile gnmt8.graph.txt --samples 64 --all
      pipebench run quickstart engine.timing=v100.json
    """
    references, overrides = split(words)
    file = Path(references[0]) if len(references) == 1 and references[0].endswith((".json", ".txt")) else None
    if file is not None and overrides:
        raise click.UsageError(f"{overrides[0]} changes a recipe, and {file} is a profile")
    source = load_one(words) if file is None else file
    from pipebench.cli import profiling

    if not isinstance(source, Path):
        preflight(source, trains=False)
    profiling.profile(
        source,
        json_path=json_file,
        graph_path=graph_txt,
        picture_path=picture,
        num_samples=samples,
        show_all=show_all,
    )
