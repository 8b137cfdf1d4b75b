"""Profiles as versioned JSON, which is read back exactly, and checked before anything is planned with it."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from pipebench.errors import ProfileError
from pipebench.profile.model import LayerProfile, LengthProfile, Profile
from pipebench.typed_json import JsonError, read, shown

VERSION = 8
# Keys of version 7, whose files are read, too.
_RENAMED = {"keeps": "saved_storages", "puts_out": "output_storages", "takes": "input_storages"}
# Fields of the profile, and of a row, that are left out if they have these values.
_OPTIONAL = {"slices": 1, "loaders": 0, "device_bytes": 0, "num_local_gpus": 0}
_OPTIONAL_IN_ROWS: Mapping[str, object] = {"workspace_bytes": 0, "reads_samples": False, "untrained_sizes": {}}
_KEY = "pipebench_profile"


def write_profile(profile: Profile) -> str:
    """Return versioned JSON that `read_profile` reads back exactly."""
    data = asdict(profile)
    rows = [row for part in (data, *data["lengths"]) for rows in part["layers"].values() for row in rows]
    for found, nothing in ((data, _OPTIONAL), *((row, _OPTIONAL_IN_ROWS) for row in rows)):
        for name, value in nothing.items():
            if found[name] == value:
                del found[name]
    return json.dumps({_KEY: VERSION, **data}, indent=1)


def read_profile(text: str) -> Profile:
    """Read what `write_profile` wrote; raises a ProfileError that says where it isn't a profile of this version."""
    try:
        data = read(dict[str, Any], text)
        if _KEY not in data:
            raise JsonError(f"isn't a pipebench profile: an object with the key {_KEY!r} is expected")
        version = data.pop(_KEY)
        if type(version) is not int or version not in (7, VERSION):
            raise JsonError(f"is a profile of version {shown(version)}, version {VERSION} is expected: profile again")
        if version == 7:
            data = json.loads(json.dumps(data), object_hook=_with_new_keys)
        profile = read(Profile, data)
        _check_complete(data)
    except JsonError as error:
        raise ProfileError(str(error)) from None
    check_profile(profile)
    return profile


def _with_new_keys(data: dict[str, Any]) -> dict[str, Any]:
    return {_RENAMED.get(key, key): value for key, value in data.items()}


def _check_complete(data: Mapping[str, Any]) -> None:
    """Refuse a missing field, even one with a default: a layer that lacks `reads` would make another graph."""
    parts = [("", data), *((f"lengths[{i}].", each) for i, each in enumerate(data.get("lengths", ())))]
    rows = [
        (f"{part}layers[{size}][{i}]: ", row)
        for part, held in parts
        for size, each in held["layers"].items()
        for i, row in enumerate(each)
    ]
    for kind, places in ((Profile, [("", data)]), (LayerProfile, rows)):
        for where, found in places:
            for field in fields(kind):
                if field.name not in found and field.name not in (*_OPTIONAL, *_OPTIONAL_IN_ROWS):
                    raise JsonError(f"{where}{field.name!r} is missing")


def check_profile(profile: Profile) -> None:
    """Check a profile's fields against each other; raises a ProfileError that says where, what is given and allowed."""
    if not profile.layers:
        raise ProfileError("has no layers: at least one number of samples is needed")
    _layers(profile.layers, profile.load_s, "")
    (first_size, first), *others = profile.layers.items()
    for columns, length in _by_columns(profile).items():
        where = f" of length {columns}"
        if {*length.layers} != {*profile.layers}:
            sizes = (", ".join(map(str, sorted(layers))) or "no" for layers in (length.layers, profile.layers))
            raise ProfileError(f"has layers{where} at {next(sizes)} samples, expected is as of all: {next(sizes)}")
        _layers(length.layers, length.load_s, where)
        others += length.layers.items()
    for size, rows in others:
        if [(row.name, row.reads) for row in rows] != [(row.name, row.reads) for row in first]:
            raise ProfileError(f"has other layers, or edges between them, at {size} samples than at {first_size}")
    for size, whole_s in profile.whole_step_s.items():
        if size not in profile.layers or whole_s <= 0:
            raise ProfileError(
                f"has whole_step_s {whole_s:g} for {size} samples, but a time goes with layers and is > 0"
            )


def _by_columns(profile: Profile) -> dict[int, LengthProfile]:
    """Return the lengths by `columns`, after checking that each is there once and that shares add up to 1."""
    found = {each.columns: each for each in profile.lengths}
    if len(found) < len(profile.lengths):
        raise ProfileError(f"has lengths {[each.columns for each in profile.lengths]}, allowed is each once")
    if profile.lengths and not math.isclose(sum(each.share for each in profile.lengths), 1.0, rel_tol=1e-6):
        shares = [each.share for each in profile.lengths]
        raise ProfileError(f"has lengths with shares {shares}, allowed are ones that add up to 1")
    return found


def _layers(layers: Mapping[int, Sequence[LayerProfile]], load_s: Mapping[int, float], where: str) -> None:
    for size, rows in layers.items():
        _rows(rows, f"layers at {size} samples{where}")
        if size not in load_s:
            raise ProfileError(f"has layers at {size} samples{where}, but no load_s for them")


def _rows(rows: Sequence[LayerProfile], where: str) -> None:
    """Check the rows of one size; `where` says which, for errors."""
    if all(row.is_input for row in rows):
        raise ProfileError(f"has no layer that computes: {where}")
    if not any(row.forward_s or row.backward_s for row in rows if not row.is_input):
        raise ProfileError(f"{where}: every forward_s and backward_s is 0, allowed is at least one layer above 0")
    index_of: dict[str, int] = {}
    for index, row in enumerate(rows):
        problem = _problem(row, index, rows, index_of)
        if problem:
            name = row.name if row.name.isprintable() else shown(row.name)
            raise ProfileError(f"{where}, layer {index} ({name}): {problem}")
        index_of[row.name] = index
    computing = {row.name for row in rows if not row.is_input}
    for index, row in enumerate(rows):
        for name in row.inputs:
            if name in computing:
                raise ProfileError(f"{where}, layer {index} ({row.name}): input {name!r} is the name of a layer")
            if index_of.get(name, -1) >= index:
                raise ProfileError(f"{where}, layer {index} ({row.name}): input {name!r} comes after it")


def _problem(row: LayerProfile, index: int, rows: Sequence[LayerProfile], index_of: Mapping[str, int]) -> str | None:
    """Return what is wrong with one row, given the rows before it by name, or None."""
    if not row.name or not row.name.isprintable() or not row.kind.isprintable():
        return "name and kind must be printable, and the name not empty"
    if row.name in index_of:
        return f"layer {index_of[row.name]} has that name already"
    if list(row.reads) != sorted(set(row.reads)) or any(not 0 <= read < index for read in row.reads):
        return f"reads are {list(row.reads)}, allowed are ascending indices of layers before it"
    if any(rows[read].is_input for read in row.reads):
        return "it reads a model input by index, which belongs into inputs, by name"
    if row.is_input and (row.reads or row.inputs):
        return "a model input reads nothing"
    if row.output_parts and sum(row.output_parts) != row.output_bytes:
        return f"output_parts add up to {sum(row.output_parts)} bytes, output_bytes are {row.output_bytes}"
    if row.weight_s > row.backward_s:
        return f"weight_s is {row.weight_s:g}, more than backward_s, {row.backward_s:g}"
    if [layer for layer, _ in row.saved_with] != sorted({layer for layer, _ in row.saved_with if layer < index}):
        return f"saved_with names layers {[layer for layer, _ in row.saved_with]}, allowed are ascending ones before it"
    if row.gradient_bytes > row.output_bytes:
        return f"gradient_bytes are {row.gradient_bytes}, more than output_bytes, {row.output_bytes}"
    return None
