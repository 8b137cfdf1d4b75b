"""Results of runs that trained, kept beside the report: a fresh clone renders it without training for hours.

A kept result answers a recipe that asks for the same, whatever the code has become since; what renders it says so.
Keys that recipes and clusters didn't have when it was kept may be there now, with their defaults.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pipebench import files
from pipebench.errors import UserError
from pipebench.recipe.catalog import display
from pipebench.recipe.leaves import defaults
from pipebench.recipe.load import LoadedRecipe, flattened
from pipebench.tracking.identity import recipe_hash
from pipebench.train.result import RunResult
from pipebench.typed_json import JsonError, read, write

FOLDER = "kept"
_NAME = "name"  # of the recipe: the one key that changes nothing
# Of a cluster: how copies to hosts go. What was kept before clusters said so made none.
_OF_COPIES = ("pcie_bytes_per_s", "host_memory_bytes", "over_pcie")


@dataclass(frozen=True)
class KeptResult:
    """A result, with what it answers.

    Attributes:
        words: the command line that repeats it, from the recipe on.
        version: of the code that it ran with.
        ended: date and time.
        cluster: full key to text, of the cluster's file.
        result: with its curves and its recipe.
    """

    words: tuple[str, ...]
    version: str
    ended: str
    cluster: Mapping[str, str]
    result: RunResult

    def answers(self, loaded: LoadedRecipe) -> bool:
        """Return whether a recipe would ask for the same."""
        asked = {key: value for key, value in loaded.flat.items() if key != _NAME}
        kept = {key: value for key, value in self.result.recipe.items() if key != _NAME}
        return _same(kept, asked, dict(flattened(defaults()))) and _same(
            self.cluster, self._known_of(cluster_of(loaded)), {}
        )

    def _known_of(self, cluster: Mapping[str, str]) -> dict[str, str]:
        """Return a cluster without what is said of copies, where nothing was when the result was kept."""
        return {k: v for k, v in cluster.items() if k in self.cluster or k.rpartition(".")[2] not in _OF_COPIES}


def cluster_of(loaded: LoadedRecipe) -> dict[str, str]:
    """Return a recipe's cluster, full key to text, its name and what is null aside."""
    flat = dict(flattened({**asdict(loaded.cluster), "levels": dict(enumerate(map(asdict, loaded.cluster.levels)))}))
    return {key: value for key, value in flat.items() if value != "null" and key != _NAME}


def kept_results(folder: Path) -> list[KeptResult]:
    """Return all results that are kept for the reports in a folder.

    Raises:
        UserError: a file isn't what `keep` wrote.
    """
    found = []
    for path in sorted((folder / FOLDER).glob("*.json")):
        try:
            found.append(read(KeptResult, files.read_bytes(path)))
        except JsonError as error:
            raise UserError(f"{display(path)}: {error}; remove it, and it is run again") from None
    return found


def keep(folder: Path, kept: KeptResult, loaded: LoadedRecipe) -> Path:
    """Write a result for the reports in a folder; return its file.

    Raises:
        OSError: it can't be written.
    """
    path = folder / FOLDER / f"{recipe_hash(loaded)}.json"
    path.parent.mkdir(exist_ok=True)
    files.replace(path, (write(kept) + "\n").encode())
    return path


def _same(kept: Mapping[str, str], asked: Mapping[str, str], usual: Mapping[str, str]) -> bool:
    """Return whether two flat mappings say the same; what is new in `asked` has to be as usual, or null."""
    new = {key: value for key, value in asked.items() if key not in kept}
    return all(asked.get(key, "null") == value for key, value in kept.items()) and all(
        value in ("null", usual.get(key)) for key, value in new.items()
    )
