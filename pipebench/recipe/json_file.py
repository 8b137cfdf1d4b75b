"""Files of JSON that recipes name: what a run has kept, to be repeated."""

from pathlib import Path

from pipebench.errors import Fault, RecipeError, nearest


def json_bytes(path: str) -> bytes:
    """Return what a file holds.

    Raises:
        RecipeError: it can't be read; suggests one beside it.
    """
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        close = nearest(Path(path).name, (each.name for each in Path(path).parent.glob("*.json")))
        raise RecipeError([Fault(path, "", f"can't be read: {reason}{close}")]) from error
