"""`pipebench profile`: makes or reads one profile, prints it, and writes it as JSON, graph.txt and picture.

A file is written only where there is none, or one of the kind that this command writes: no data is lost to a slip.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipebench.errors import UserError
from pipebench.profile.choose import load_profile
from pipebench.profile.graph_txt import read_graph_txt, write_graph_txt
from pipebench.profile.model import Profile
from pipebench.profile.stored import write_profile
from pipebench.recipe.load import LoadedRecipe, faults_of
from pipebench.show.console import print_written
from pipebench.show.profile_picture import draw_profile, is_our_picture
from pipebench.show.profile_report import print_profile
from pipebench.show.progress import preparing
from pipebench.train.prepare import profile_model


@dataclass(frozen=True)
class ProfileOutput:
    """What to show and to write.

    Attributes:
        json_path: where the profile goes as JSON; None for nowhere.
        graph_path: where it goes as the PipeDream artifact's graph.txt; None for nowhere.
        picture_path: where its picture goes; None for nowhere.
        num_samples: the size to show, draw and write as graph.txt; None for the largest there is.
        show_all: whether the table shows every layer of a long model.
    """

    json_path: Path | None
    graph_path: Path | None
    picture_path: Path | None
    num_samples: int | None = None
    show_all: bool = False


def profile_of_recipe(loaded: LoadedRecipe, output: ProfileOutput) -> None:
    """Profile a recipe's model as the recipe says, show and write it.

    Raises:
        UserError: the model can't be profiled, that size doesn't travel, or a file would be overwritten.
    """
    _refuse_to_overwrite(output)
    show_and_write(loaded.recipe.name, _profiled(loaded), output)


def profile_of_file(path: Path, output: ProfileOutput) -> None:
    """Show a profile file, and write it in other forms.

    Raises:
        UserError: it can't be read, doesn't have that size, or a file would be overwritten.
    """
    _refuse_to_overwrite(output)
    show_and_write(plain_name(path), load_profile(path, output.num_samples or 1), output)


def plain_name(path: Path) -> str:
    """Return a profile file's name without what says that it is one.

    >>> plain_name(Path("a/vgg.profile.json")), plain_name(Path("gnmt8.graph.txt")), plain_name(Path("graph.txt"))
    ('vgg', 'gnmt8', 'graph')
    """
    return re.sub(r"(?<=.)\.(profile|graph)$", "", path.stem)


def show_and_write(name: str, profile: Profile, output: ProfileOutput) -> None:
    """Print a profile and write the files that are wanted, telling where they are."""
    size = max(profile.layers) if output.num_samples is None else output.num_samples
    if size not in profile.layers:
        sizes = ", ".join(map(str, sorted(profile.layers)))
        raise UserError(f"--samples: got {size}, allowed are the numbers of samples that are profiled: {sizes}")
    writers: list[tuple[Path | None, Callable[[Path], object]]] = [
        (output.json_path, lambda path: path.write_text(write_profile(profile), encoding="utf-8")),
        (output.graph_path, lambda path: path.write_text(write_graph_txt(profile, size), encoding="utf-8")),
        (output.picture_path, lambda path: draw_profile(profile, size, name, path)),
    ]
    print_profile(name, profile, size, show_all=output.show_all)
    for path, write in writers:
        if path is not None:
            try:
                write(path)
            except OSError as error:
                raise UserError(f"{path} can't be written: {error.strerror or error}") from error
            print_written(str(path))


def _profiled(loaded: LoadedRecipe) -> Profile:
    recipe = loaded.recipe
    with faults_of(loaded), preparing(recipe.name) as on_progress:
        return profile_model(recipe, loaded.cluster, on_progress).profile


def _refuse_to_overwrite(output: ProfileOutput) -> None:
    """Check every file to be written before any work starts."""
    checks: Mapping[str, tuple[Path | None, Callable[[Path], bool], str]] = {
        "--json": (output.json_path, _is_our_json, "a profile in JSON"),
        "--graph-txt": (output.graph_path, _is_our_graph_txt, "a graph.txt that pipebench wrote"),
        "--picture": (output.picture_path, is_our_picture, "a picture of a profile"),
    }
    taken: dict[Path, str] = {}
    for option, (path, is_ours, what) in checks.items():
        if path is None:
            continue
        other = taken.setdefault(path.resolve(), option)
        if other != option:
            raise UserError(f"{option}: got {path}, which {other} writes to as well; give each a file of its own")
        if not path.parent.is_dir():
            raise UserError(f"{option}: got {path}, but there is no folder {path.parent}")
        if path.exists() and not (path.is_file() and is_ours(path)):
            raise UserError(f"{option}: {path} is there and isn't {what}, so it is left alone; name another file")


def _is_our_json(path: Path) -> bool:
    try:
        return "pipebench_profile" in json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _is_our_graph_txt(path: Path) -> bool:
    """Return whether a file is in exactly the form that is written here, which the artifact's own files aren't."""
    try:
        text = path.read_text(encoding="utf-8")
        return write_graph_txt(read_graph_txt(text, str(path)), 1) == text
    except (OSError, ValueError):
        return False
