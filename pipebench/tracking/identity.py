"""Hashes of a recipe and of the code, by which a recorded run is known to be still valid."""

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pipebench
from pipebench import files
from pipebench.recipe.code_identity import code_hashes
from pipebench.recipe.load import LoadedRecipe

RECIPE_TAG, VERSION_TAG = "recipe_hash", "pipebench_version"
_FREE = ("name", "tracking", "train.checkpoint_keep")  # keys that don't change the result
# Keys that are newer than stored results, with the value that stands for the behaviour without the key: they count in
# a hash only if they have another value.
_LATER = {f"cluster.{name}": "null" for name in ("count", "bandwidth", "latency", "memory")}
_RECIPE_DIGITS, _SOURCE_DIGITS = 16, 12


def recipe_hash(loaded: LoadedRecipe) -> str:
    """Return 16 hexadecimal digits of a hash of all keys of a recipe that change its result, the seed included.

    Files count by content: the cluster with every number, plans, orders and profiles byte by byte. Environment
    variables count unexpanded, so that data may lie elsewhere, and data sets by name. The user's code counts by the
    modules that targets lead to (see `code_hashes`).
    """
    asked = {key: value for key, value in loaded.flat.items() if key not in _FREE and _LATER.get(key) != value}
    contents = {key: digest for key, value in asked.items() if (digest := content_of(value))}
    contents |= code_hashes(loaded)
    text = json.dumps([asked, asdict(loaded.cluster), contents], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_RECIPE_DIGITS]


def identity_tags(loaded: LoadedRecipe) -> Mapping[str, str]:
    """Return the tags that identify a run of this recipe with this version of the code."""
    return {RECIPE_TAG: recipe_hash(loaded), VERSION_TAG: source_version()}


@functools.cache
def source_version() -> str:
    """Return pipebench's version and 12 hexadecimal digits of its source and the zoo's: `0.2.0+1f0c9a7e22d4`."""
    package = Path(pipebench.__file__).resolve().parent
    digest = hashlib.sha256()
    # In a checkout zoo/ is a link, which `rglob` doesn't follow.
    for path in sorted({*package.rglob("*.py"), *(package / "zoo").rglob("*.py")}):
        digest.update(f"{path.relative_to(package.parent).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return f"{pipebench.__version__}+{digest.hexdigest()[:_SOURCE_DIGITS]}"


def content_of(value: str) -> str | None:
    """Return the hash of the file that a value names, None if it names none; `4` and `dp` never do."""
    return files.sha256_of(Path(value)) if Path(value).suffix and os.path.isfile(value) else None
