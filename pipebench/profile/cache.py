"""The profile cache: one JSON file per key under `$PIPEBENCH_CACHE/profiles`, or else the user's cache directory.

A file that can't be read is made again; one that can't be written costs time, never a result.
"""

import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from pipebench import files
from pipebench.profile.model import Profile
from pipebench.profile.stored import VERSION, read_profile, write_profile

log = logging.getLogger(__name__)


def cached(key_parts: Mapping[str, object], make: Callable[[], Profile]) -> Profile:
    """Return the cached profile of a key; make and cache it if there is none.

    Args:
        key_parts: everything that determines the profile, as values with a stable `str`. The file format's version is
            added.
        make: makes the profile.
    """
    text = json.dumps({**key_parts, "version": VERSION}, sort_keys=True, default=str)
    path = cache_directory() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    found = _read(path)
    if found is None:
        found = make()
        _write(path, found)
    return found


@functools.cache
def own_hash() -> str:
    """Return a hash of the code and constants that compute a profile."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()


def cache_directory() -> Path:
    """Return the directory of cached profiles, which may not exist yet."""
    own = os.environ.get("PIPEBENCH_CACHE")
    if own:
        return Path(own) / "profiles"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pipebench" / "profiles"


def _read(path: Path) -> Profile | None:
    try:
        return read_profile(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("profile cache: %s can't be read (%s: %s), so it is made again", path, type(error).__name__, error)
        return None


def _write(path: Path, profile: Profile) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, write_profile(profile).encode())
    except OSError as error:
        log.warning("profile cache: %s can't be written (%s), so the next run profiles again", path, error)
