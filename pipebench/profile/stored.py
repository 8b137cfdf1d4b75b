"""A profile as text: versioned JSON, which is read back exactly, or refused in one sentence."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from pipebench.errors import ProfileError
from pipebench.profile.check import check_profile
from pipebench.profile.model import LayerProfile, Profile
from pipebench.typed_json import JsonError, read, shown

VERSION = 2
_KEY = "pipebench_profile"


def write_profile(profile: Profile) -> str:
    """Return versioned JSON; `read_profile` reads it back exactly."""
    return json.dumps({_KEY: VERSION, **asdict(profile)}, indent=1)


def read_profile(text: str) -> Profile:
    """Read what `write_profile` wrote.

    Raises:
        ProfileError: says where the text isn't a profile of this version.
    """
    try:
        data = read(dict[str, Any], text)
        if _KEY not in data:
            raise JsonError(f"isn't a pipebench profile: an object with the key {_KEY!r} is expected")
        version = data.pop(_KEY)
        if type(version) is not int or version != VERSION:
            raise JsonError(f"is a profile of version {shown(version)}, version {VERSION} is expected: profile again")
        profile = read(Profile, data)
        _check_complete(data)
    except JsonError as error:
        raise ProfileError(str(error)) from None
    check_profile(profile)
    return profile


def _check_complete(data: Mapping[str, Any]) -> None:
    """Refuse what lacks a field, even one that has a default in Python: a layer without `reads` is another graph."""
    rows = [(f"layers[{size}][{i}]: ", row) for size, each in data["layers"].items() for i, row in enumerate(each)]
    for kind, places in ((Profile, [("", data)]), (LayerProfile, rows)):
        for where, found in places:
            for field in fields(kind):
                if field.name not in found:
                    raise JsonError(f"{where}{field.name!r} is missing")
