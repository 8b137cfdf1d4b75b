"""What makes a profile whole: types and keys of its JSON, and what holds between its rows.

A profile file may come from anywhere, so every fault is found here, before anything is planned with it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipebench.errors import ProfileError, nearest

if TYPE_CHECKING:
    from pipebench.profile.model import LayerProfile, Profile

# Beyond these a number is a slip, not a measurement: 31 years, and an exabyte.
MAX_SECONDS = 1e9
MAX_BYTES = 2**60


def check_json(data: Any, version: int) -> None:
    """Check keys and types of a profile's JSON.

    Args:
        data: what `json.loads` made of it.
        version: the version it has to have.

    Raises:
        ProfileError: says where, what was given and what is allowed.
    """
    if not isinstance(data, dict) or "pipebench_profile" not in data:
        raise ProfileError("isn't a pipebench profile: an object with the key 'pipebench_profile' is expected")
    found = data["pipebench_profile"]
    if isinstance(found, bool) or found != version:
        raise ProfileError(f"is a profile of version {_shown(found)}, version {version} is expected: profile again")
    _object(data, {"pipebench_profile": lambda *_: None, **_PROFILE}, "")


def check_profile(profile: "Profile") -> None:
    """Check what holds between the parts of a profile.

    Raises:
        ProfileError: says where, what was given and what is allowed.
    """
    if not profile.layers:
        raise ProfileError("has no layers: at least one number of samples is needed")
    for size, rows in profile.layers.items():
        _rows(rows, f"layers at {size} samples")
        if size not in profile.load_s:
            raise ProfileError(f"has layers at {size} samples, but no load_s for them")
    (first_size, first), *others = profile.layers.items()
    for size, rows in others:
        if [(row.name, row.reads) for row in rows] != [(row.name, row.reads) for row in first]:
            raise ProfileError(f"has other layers, or edges between them, at {size} samples than at {first_size}")
    for size, whole_s in profile.whole_step_s.items():
        if size not in profile.layers or whole_s <= 0:
            raise ProfileError(
                f"has whole_step_s {whole_s:g} for {size} samples, but a time goes with layers and is > 0"
            )


def _rows(rows: "Sequence[LayerProfile]", where: str) -> None:
    if all(row.is_input for row in rows):
        raise ProfileError(f"has no layer that computes: {where}")
    if not any(row.forward_s or row.backward_s for row in rows):
        raise ProfileError(f"{where}: every forward_s and backward_s is 0, allowed is at least one layer above 0")
    index_of: dict[str, int] = {}
    for index, row in enumerate(rows):
        problem = _problem(row, index, rows, index_of)
        if problem:
            shown = row.name if row.name.isprintable() else _shown(row.name)
            raise ProfileError(f"{where}, layer {index} ({shown}): {problem}")
        index_of[row.name] = index
    computing = {row.name for row in rows if not row.is_input}
    for index, row in enumerate(rows):
        for name in row.inputs:
            if name in computing:
                raise ProfileError(f"{where}, layer {index} ({row.name}): input {name!r} is the name of a layer")
            if index_of.get(name, -1) >= index:
                raise ProfileError(f"{where}, layer {index} ({row.name}): input {name!r} comes after it")


def _problem(
    row: "LayerProfile", index: int, rows: "Sequence[LayerProfile]", index_of: Mapping[str, int]
) -> str | None:
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
    if row.gradient_bytes > row.output_bytes:
        return f"gradient_bytes are {row.gradient_bytes}, more than output_bytes, {row.output_bytes}"
    return None


_Rule = Callable[[Any, str], None]


def _object(value: Any, rules: Mapping[str, _Rule], where: str) -> None:
    """Check that a value is an object with exactly these keys, each by its own rule."""
    if not isinstance(value, dict):
        raise _wrong(value, where, "an object")
    for key in value:
        if key not in rules:
            raise ProfileError(f"{_at(where)}unknown key {_shown(key)}{nearest(key, rules)}")
    for key, rule in rules.items():
        if key not in value:
            raise ProfileError(f"{_at(where)}{key!r} is missing")
        rule(value[key], f"{where}.{key}" if where else key)


def _text(value: Any, where: str) -> None:
    if not isinstance(value, str) or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise _wrong(value, where, "text")


def _flag(value: Any, where: str) -> None:
    if not isinstance(value, bool):
        raise _wrong(value, where, "true or false")


def _count(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_BYTES:
        raise _wrong(value, where, "a whole number from 0 on")


def _seconds(value: Any, where: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= MAX_SECONDS:  # NaN isn't either
        raise _wrong(value, where, f"seconds from 0 to {MAX_SECONDS:g}")


def _list_of(rule: _Rule) -> _Rule:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, list):
            raise _wrong(value, where, "a list")
        for index, item in enumerate(value):
            rule(item, f"{where}[{index}]")

    return check


def _by_name(rule: _Rule) -> _Rule:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(value, where, "an object")
        for name, item in value.items():
            _text(name, where)
            rule(item, f"{where}[{_shown(name)}]")

    return check


def _by_samples(rule: _Rule) -> _Rule:
    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(value, where, "an object")
        for size, item in value.items():
            plain = size.isascii() and size.isdecimal() and len(size) < 16
            if not plain or str(int(size)) != size or size == "0":
                raise _wrong(size, where, "numbers of samples as keys")
            rule(item, f"{where}[{size}]")

    return check


def _row(value: Any, where: str) -> None:
    _object(value, _LAYER, where)


def _wrong(value: Any, where: str, allowed: str) -> ProfileError:
    return ProfileError(f"{_at(where)}got {_shown(value)}, allowed is {allowed}")


def _at(where: str) -> str:
    return f"{where}: " if where else ""


def _shown(value: Any) -> str:
    """Return a value as it can stand in a sentence: short, on one line; what holds other things only as what it is."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, int) and abs(value) > MAX_BYTES:  # a number of thousands of digits has no text at all
        return "a huge number"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_LAYER: Mapping[str, _Rule] = {
    "name": _text,
    "kind": _text,
    "forward_s": _seconds,
    "backward_s": _seconds,
    "output_bytes": _count,
    "gradient_bytes": _count,
    "reads": _list_of(_count),
    "inputs": _list_of(_text),
    "parameter_sizes": _by_name(_count),
    "buffer_sizes": _by_name(_count),
    "saved_bytes": _count,
    "output_parts": _list_of(_count),
    "is_input": _flag,
}
_PROFILE: Mapping[str, _Rule] = {
    "model": _text,
    "device": _text,
    "source": _text,
    "note": _text,
    "layers": _by_samples(_list_of(_row)),
    "update_s_per_byte": _seconds,
    "update_floor_s": _seconds,
    "load_s": _by_samples(_seconds),
    "whole_step_s": _by_samples(_seconds),
    "state_bytes_per_byte": _count,
}
