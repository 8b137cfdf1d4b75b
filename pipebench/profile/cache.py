"""The cache of profiles and of other measurements: a file per key.

The files are in `$PIPEBENCH_CACHE/profiles`, or else in the user's cache directory. What can't be read from the cache
is made again; if it can't be written to, a warning says so and the run goes on.
"""

import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pipebench
from pipebench import files, zoo
from pipebench.profile.model import Profile
from pipebench.profile.stored import VERSION, read_profile, write_profile
from pipebench.zoo.places import cache_folder

log = logging.getLogger(__name__)


def cached(key_parts: Mapping[str, object], make: Callable[[], Profile], *, anew: bool = False) -> Profile:
    """Return the cached profile of a key; if there is none, or with `anew`, make and cache it."""
    found: list[Profile] = []
    if not anew:
        find(key_parts, lambda text: found.append(read_profile(text)))
    if found:
        return found[0]
    made = make()
    keep(key_parts, write_profile(made))
    return made


def find(key_parts: Mapping[str, object], read: Callable[[str], object]) -> str | None:
    """Return the text cached for a key; None if there is none, or none that `read` can read.

    `key_parts` is everything that determines the text, as values with a stable `str`. The version of the profile format
    is added to the key.
    """
    path = _path(key_parts)
    try:
        text = path.read_text(encoding="utf-8")
        read(text)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("profile cache: %s can't be read (%s: %s), so it is made again", path, type(error).__name__, error)
        return None
    return text


def keep(key_parts: Mapping[str, object], text: str) -> None:
    """Cache a text for a key; see `find`."""
    path = _path(key_parts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, text.encode())
    except OSError as error:
        log.warning("profile cache: %s can't be written (%s), so the next run profiles again", path, error)


def _path(key_parts: Mapping[str, object]) -> Path:
    text = json.dumps({**key_parts, "version": VERSION}, sort_keys=True, default=str)
    return cache_directory() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


@functools.cache
def code_hash() -> str:
    """Return a hash of all code of pipebench and its zoo."""
    folders = (Path(pipebench.__file__).parent, Path(str(zoo.__file__)).parent)  # in a checkout the second is a link
    sources = sorted({file for folder in folders for file in folder.rglob("*.py")})
    return hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()


@functools.cache
def own_hash() -> str:
    """Return a hash of this package, which has the code and constants that make profiles."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()


def cache_directory() -> Path:
    """Return the directory of cached profiles, which may not exist yet."""
    own = os.environ.get("PIPEBENCH_CACHE")
    return Path(own, "profiles") if own else cache_folder("profiles")
