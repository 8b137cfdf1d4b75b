"""Whose a run's folder is, and whose code a run that goes on or is exported executes: what its recipe names by target.

A recipe's targets may be any function of any module, and a run's folder says where to look for them first. So a folder
of somebody else's is a program of theirs.
"""

import os
import pwd
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pipebench.errors import UserError, printable
from pipebench.recipe.load import LoadedRecipe
from pipebench.recipe.targets import targets_of

_ROOT = 0  # may do as it likes anyway


def require_own(folder: Path, files: tuple[str, ...]) -> None:
    """Refuse the folder of a run that belongs to another user, or in which a file does.

    Args:
        folder: the run's.
        files: names of files in it that say what is executed.

    Raises:
        UserError: it is another user's; says whose, and what to do.
    """
    for path in (folder, *(folder / name for name in files)):
        _require_own(path, "the run")


def require_own_code(loaded: LoadedRecipe, *, trusts: bool, tells: bool = True) -> None:
    """Tell which files are executed for a run's recipe, and refuse those of other users.

    Args:
        loaded: the recipe; nothing of it has been executed.
        trusts: refuse nothing.
        tells: say it on standard error.

    Raises:
        UserError: a file is another user's.
    """
    for key, target in targets_of(asdict(loaded.recipe)):
        files = _files_of(target, [*loaded.folders, *map(Path, sys.path)])
        for path in files if not trusts else ():
            _require_own(path, f"the code of {key}, {target}")
        if tells:
            where = f"{files[-1]}, of user {_owner(files[-1])}" if files else "Python"
            print(f"pipebench: {key}: executes {printable(f'{target} from {where}')}", file=sys.stderr, flush=True)


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
    except OSError:  # whoever reads it says so
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
