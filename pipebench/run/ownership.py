"""Ownership of a run's folder and of the code that resuming or exporting the run executes: its recipe's targets.

Targets may be any function of any module, and the folder lists where to look for modules first. So another user's
folder is another user's program.
"""

import os
import pwd
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pipebench.errors import UserError, print_notice
from pipebench.recipe.load import LoadedRecipe
from pipebench.recipe.targets import targets_of

_ROOT = 0  # user id of the superuser, who is trusted


def require_own(folder: Path, files: tuple[str, ...]) -> None:
    """Refuse a run's folder if it or one of `files`, which name code, belongs to another user.

    Raises:
        UserError: names the owner and what to do.
    """
    for path in (folder, *(folder / name for name in files)):
        _require_own(path, "the run")


def require_own_code(loaded: LoadedRecipe, *, trusts: bool, prints: bool = True) -> None:
    """Refuse a recipe whose targets execute files of other users.

    Args:
        loaded: the recipe; its targets have not been imported yet.
        trusts: whether other users' files are allowed.
        prints: whether to print the files that are executed, to standard error.

    Raises:
        UserError: for another user's file.
    """
    for key, target in targets_of(asdict(loaded.recipe)):
        files = _files_of(target, [*loaded.folders, *map(Path, sys.path)])
        for path in files if not trusts else ():
            _require_own(path, f"the code of {key}, {target}")
        if prints:
            where = f"{files[-1]}, of user {_owner(files[-1])}" if files else "Python"
            print_notice(f"{key}: executes {target} from {where}")


def _files_of(target: str, folders: Sequence[Path]) -> list[Path]:
    """Return the files that importing a target executes first: its packages' and its module's."""
    parts = target.partition(":")[0].split(".")
    found = []
    for length in range(1, len(parts) + 1):
        module = Path(*parts[:length])
        places = (folder / each for folder in folders for each in (module.with_suffix(".py"), module / "__init__.py"))
        found.append(next((place for place in places if os.path.isfile(place)), None))
    return [path for path in found if path is not None]


def _require_own(path: Path, what: str) -> None:
    try:
        owner = path.stat().st_uid
    except OSError:  # who reads the file reports it
        return
    if owner not in (os.geteuid(), _ROOT):
        raise UserError(
            f"{path}: {what} belongs to user {_owner(path)}, and would execute code of that user's choice as you: look "
            "at recipe.yaml and run.json, and give --trust if you trust them"
        )


def _owner(path: Path) -> str:
    user = path.stat().st_uid
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
