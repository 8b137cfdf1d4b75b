"""`pipebench profile`: make or read a profile, print it, write it as JSON, graph.txt and picture."""

import json
from pathlib import Path

from pipebench.cli.outputs import Output, refuse_to_overwrite
from pipebench.errors import UserError
from pipebench.files import read_text
from pipebench.profile.graph_txt import read_graph_txt, write_graph_txt
from pipebench.profile.load import load_profile, plain_name
from pipebench.profile.model import Profile
from pipebench.profile.stored import write_profile
from pipebench.recipe.load import LoadedRecipe, faults_of
from pipebench.show.profile_picture import draw_profile, is_our_picture
from pipebench.show.profile_report import print_profile
from pipebench.show.progress import preparing


def profile(
    source: LoadedRecipe | Path,
    *,
    json_path: Path | None,
    graph_path: Path | None,
    picture_path: Path | None,
    num_samples: int | None,
    show_all: bool,
) -> None:
    """Profile a recipe's model, or read a profile file; print it and write it in other forms.

    Args:
        source: the recipe or the file.
        json_path: JSON output; None for the default of a recipe, no output for a file.
        graph_path: output in the PipeDream artifact's graph.txt form; None for none.
        picture_path: picture; None for the default.
        num_samples: size to print, draw and write as graph.txt; None for the largest available.
        show_all: print every layer of a long model.

    Raises:
        UserError: it can't be read or made, lacks that size, or a file would be overwritten.
    """
    name = plain_name(source) if isinstance(source, Path) else source.recipe.name
    own_json = None if isinstance(source, Path) else Path(f"{name}.profile.json")
    as_json = Output("--json", json_path or own_json, "a profile in JSON", _is_our_json)
    as_graph = Output("--graph-txt", graph_path, "a graph.txt that pipebench wrote", _is_our_graph_txt)
    picture_path = picture_path or Path(f"{name}.profile.png")
    picture = Output("--picture", picture_path, "a picture of a profile", is_our_picture)
    refuse_to_overwrite((as_json, as_graph, picture))
    made = load_profile(source, num_samples or 1) if isinstance(source, Path) else _profiled(source)
    size = max(made.layers) if num_samples is None else num_samples
    if size not in made.layers:
        sizes = ", ".join(map(str, sorted(made.layers)))
        raise UserError(f"--samples: got {size}, allowed are the numbers of samples that are profiled: {sizes}")
    print_profile(name, made, size, show_all=show_all)
    as_json.write(lambda path: path.write_text(write_profile(made), encoding="utf-8"))
    as_graph.write(lambda path: path.write_text(write_graph_txt(made, size), encoding="utf-8"))
    picture.write(lambda path: draw_profile(made, size, name, path))


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
    """Return whether a file has exactly our form, unlike the artifact's own files."""
    try:
        text = read_text(path)
        return write_graph_txt(read_graph_txt(text, str(path)), 1) == text
    except ValueError:
        return False
