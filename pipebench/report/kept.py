"""Trained results stored beside a report, so that a fresh clone renders it without hours of training.

A stored result answers an equal recipe regardless of the code's version, which the report shows. Keys added to recipes
or clusters since must have their defaults.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pipebench import files
from pipebench.errors import UserError
from pipebench.recipe.catalog import display
from pipebench.recipe.leaves import defaults
from pipebench.recipe.load import LoadedRecipe
from pipebench.recipe.plain import flattened
from pipebench.tracking.identity import recipe_hash
from pipebench.train.result import RunResult
from pipebench.typed_json import JsonError, read, write

FOLDER = "kept"
_NAME = "name"  # the recipe's only key that does not change the result
# A cluster's keys about copies to hosts. Results that are older than these keys made no copies.
_OF_COPIES = ("pcie_bytes_per_s", "host_memory_bytes", "over_pcie")


@dataclass(frozen=True)
class KeptResult:
    """A stored result and what it answers."""

    words: tuple[str, ...]  # command line that repeats it, from the recipe on
    version: str  # of the code that ran it
    ended: str  # date and time
    cluster: Mapping[str, str]  # of the cluster's file, full key to text
    result: RunResult  # with curves and recipe
    made: Mapping[str, str] = field(default_factory=dict)  # tree, versions and processor; empty before 0.2.0

    def answers(self, loaded: LoadedRecipe) -> bool:
        """Return whether this is the result of an equivalent recipe."""
        asked = {key: value for key, value in loaded.flat.items() if key != _NAME}
        kept = {key: value for key, value in self.result.recipe.items() if key != _NAME}
        cluster = cluster_of(loaded).items()
        known = {k: v for k, v in cluster if k in self.cluster or k.rpartition(".")[2] not in _OF_COPIES}
        return _same(kept, asked, dict(flattened(defaults()))) and _same(self.cluster, known, {})


def cluster_of(loaded: LoadedRecipe) -> dict[str, str]:
    """Return a recipe's cluster, full key to text, without its name and null values."""
    flat = dict(flattened({**asdict(loaded.cluster), "levels": dict(enumerate(map(asdict, loaded.cluster.levels)))}))
    return {key: value for key, value in flat.items() if value != "null" and key != _NAME}


def kept_results(folder: Path) -> dict[Path, KeptResult]:
    """Return all results stored for the reports in a folder, by file; raises a UserError for an invalid file."""
    found = {}
    for path in sorted((folder / FOLDER).glob("*.json")):
        try:
            found[path] = read(KeptResult, files.read_bytes(path))
        except JsonError as error:
            raise UserError(f"{display(path)}: {error}; remove it, and it is run again") from None
    return found


def keep(folder: Path, kept: KeptResult, loaded: LoadedRecipe) -> Path:
    """Store a result for the reports in a folder and return its file; raises an OSError if it can't be written."""
    path = folder / FOLDER / f"{recipe_hash(loaded)}.json"
    path.parent.mkdir(exist_ok=True)
    files.replace(path, (write(kept) + "\n").encode())
    return path


def _same(kept: Mapping[str, str], asked: Mapping[str, str], usual: Mapping[str, str]) -> bool:
    """Return whether two flat mappings are equal; keys new in `asked` must have their default or be null."""
    new = {key: value for key, value in asked.items() if key not in kept}
    return all(asked.get(key, "null") == value for key, value in kept.items()) and all(
        value in ("null", usual.get(key)) for key, value in new.items()
    )
