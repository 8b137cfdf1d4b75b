"""`pipebench profile`: makes or reads a profile, and writes it as JSON, graph.txt and picture."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from pipebench.cli.outputs import PNG, Output, is_picture_by, refuse_to_overwrite
from pipebench.errors import UserError
from pipebench.files import read_text
from pipebench.profile.graph_txt import read_graph_txt, write_graph_txt
from pipebench.profile.load import load_profile, plain_name
from pipebench.profile.model import Profile
from pipebench.profile.stored import write_profile
from pipebench.recipe.load import LoadedRecipe, faults_of
from pipebench.show.answers import ModelProfile
from pipebench.show.inline import writes
from pipebench.show.profile_picture import MADE_BY, profile_figure
from pipebench.show.progress import preparing


def name_of(source: LoadedRecipe | Path) -> str:
    """Return the name of a recipe or of a profile's file."""
    return plain_name(source) if isinstance(source, Path) else source.recipe.name


def profile(source: LoadedRecipe | Path, num_samples: int | None = None, *, show_all: bool = False) -> ModelProfile:
    """Profile a recipe's model, or read a profile file.

    Args:
        source: the recipe, or the file.
        num_samples: the size to show; by default the largest.
        show_all: show all layers, not only the heaviest ones of a long model.

    Raises:
        UserError: profiling or reading fails, or the size isn't in the profile.
    """
    made = load_profile(source, num_samples or 1) if isinstance(source, Path) else _profiled(source)
    size = max(made.layers) if num_samples is None else num_samples
    if size not in made.layers:
        sizes = ", ".join(map(str, sorted(made.layers)))
        raise UserError(f"--samples: got {size}, allowed are the numbers of samples that are profiled: {sizes}")
    return ModelProfile(name_of(source), made, size, show_all)


def outputs(source: LoadedRecipe | Path, out: Path | None, picture: Path | None, *, by_default: bool) -> list[Output]:
    """Return the files to write: JSON, graph.txt and picture, in this order.

    `by_default` adds `NAME.profile.png`, and for a recipe `NAME.profile.json`, where no other file is named.

    Raises:
        UserError: a file can't be written, or is there and of another kind.
    """
    is_graph = out is not None and out.suffix == ".txt"
    own_json, own_picture = (
        Path(f"{name_of(source)}.profile.{end}") if by_default else None for end in ("json", "png")
    )
    if isinstance(source, Path):
        own_json = None
    made = [
        Output("--out", own_json if is_graph or out is None else out, "a profile in JSON", _is_our_json, (".json",)),
        Output("--out", out if is_graph else None, "a graph.txt that pipebench wrote", _is_our_graph_txt),
        Output("--picture", picture or own_picture, "a picture of a profile", partial(is_picture_by, MADE_BY), PNG),
    ]
    refuse_to_overwrite(made)
    return made


def write_all(found: ModelProfile, files: Sequence[Output], console: Console | None) -> None:
    """Write the files from `outputs`, and print their names."""
    as_json, as_graph, picture = files
    size, made = found.num_samples, found.profile
    as_json.write(lambda path: path.write_text(write_profile(made), encoding="utf-8"), console)
    as_graph.write(lambda path: path.write_text(write_graph_txt(made, size), encoding="utf-8"), console)
    picture.write(writes(profile_figure, made, size, found.name), console)


def _profiled(loaded: LoadedRecipe) -> Profile:
    from pipebench.train.profiled_model import profile_model  # late: torch, unneeded to read a profile

    recipe = loaded.recipe
    with faults_of(loaded), preparing(recipe.name) as on_progress:
        return profile_model(recipe, loaded.cluster, on_progress).profile


def _is_our_json(path: Path) -> bool:
    try:
        return "pipebench_profile" in json.loads(read_text(path))
    except (ValueError, TypeError, RecursionError):
        return False


def _is_our_graph_txt(path: Path) -> bool:
    """Return whether pipebench wrote a graph.txt: its form differs from that of the artifact's files."""
    try:
        text = read_text(path)
        return write_graph_txt(read_graph_txt(text, str(path)), 1) == text
    except ValueError:
        return False
