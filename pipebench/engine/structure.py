"""Structures of tuples, lists, dictionaries and named tuples around tensors, in a form that can be sent as JSON.

torch's pytree can also serialise structures, but the names that it uses depend on the release: `torch.return_types.max`
has none in 2.11 and 2.14. Here containers have pipebench's own names, and classes are `module:class`.

For safety, received names are looked up, and nothing is imported or called: a class must be a named tuple in a module
that this process has imported. Attributes are read in a way that runs no module's `__getattr__`, which may import.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple, Union

import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list

from pipebench.errors import UserError

_SEQUENCES = {"tuple": tuple, "list": list, "torch.Size": torch.Size, "immutable_list": immutable_list}
_MAPPINGS = {"dict": dict, "OrderedDict": OrderedDict, "immutable_dict": immutable_dict}
_KINDS: dict[str, type] = {**_SEQUENCES, **_MAPPINGS}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_IS_SEQUENCE, _IS_MAPPING = frozenset(_SEQUENCES.values()), frozenset(_MAPPINGS.values())
# Exact types: an enumeration's member or NumPy's float64 would arrive as another type.
_IS_PLAIN = frozenset((type(None), bool, int, float, str))
# Attributes used to make similar tensors: `torch.arange(n, device=x.device)`.
_OF_A_TENSOR = frozenset((torch.device, torch.dtype))
_CAN = "tensors, their devices and types, numbers, text and None can, in tuples, lists, dictionaries and named tuples"


class CrossingError(UserError, TypeError):
    """A value can't be sent to another stage; says what it is and what can."""


class Node(NamedTuple):
    """A container."""

    kind: type
    # Of a dictionary, in order, with types, since 1, 1.0 and True are equal
    keys: tuple[tuple[type, Any], ...]
    parts: "tuple[Structure, ...]"  # the values' structures, in order


Structure = Union[Node, None]  # noqa: UP007 # None is a leaf; a name in quotes can't be joined by |


def flatten(values: Any) -> tuple[list[Any], Structure]:
    """Return a value's leaves (tensors, devices, types, numbers, text, None) in order, and its structure.

    Raises:
        CrossingError: another type of leaf.
    """
    leaves: list[Any] = []
    return leaves, _flatten(values, leaves)


def _flatten(value: Any, leaves: list[Any]) -> Structure:
    kind: type = type(value)
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise CrossingError(f"a tensor of layout {value.layout} crosses from stage to stage; dense ones can")
    elif kind in _IS_MAPPING:
        keys = tuple((type(key), key) for key in value)
        for key_kind, _ in keys:
            if key_kind not in _IS_PLAIN:
                raise CrossingError(
                    f"a dictionary with a key of type {key_kind.__name__} crosses from stage to stage; "
                    f"numbers, text and None can be keys"
                )
        return Node(kind, keys, tuple([_flatten(item, leaves) for item in value.values()]))
    elif kind in _IS_SEQUENCE or issubclass(kind, tuple):
        _name_of(kind)
        return Node(kind, (), tuple([_flatten(item, leaves) for item in value]))
    elif kind not in _IS_PLAIN and kind not in _OF_A_TENSOR:
        raise CrossingError(f"a {kind.__name__} crosses from stage to stage; {_CAN}")
    leaves.append(value)
    return None


def unflatten(structure: Structure, leaves: Iterator[Any]) -> Any:
    """Rebuild a value from its structure and leaves."""
    if structure is None:
        return next(leaves)
    kind, keys, parts = structure
    items = [unflatten(part, leaves) for part in parts]
    if kind in _IS_MAPPING:
        return kind(zip((key for _, key in keys), items, strict=True))
    if kind in _IS_SEQUENCE or _is_struct_sequence(kind):
        return kind(items)
    # As sent, without running the class's own constructor.
    return tuple.__new__(kind, items)


def to_words(structure: Structure) -> Any:
    """Return a structure as JSON: null for a leaf, otherwise its name, keys and parts."""
    if structure is None:
        return None
    kind, keys, parts = structure
    return [_name_of(kind), [key for _, key in keys], [to_words(part) for part in parts]]


def from_words(words: Any) -> Structure:
    """Read the output of `to_words`; raises a CrossingError if it names a class unknown here."""
    if words is None:
        return None
    name, keys, parts = words
    kind = _KINDS.get(name) or _class_of(name)
    if name not in _KINDS and len(parts) != _num_fields(kind):
        raise CrossingError(
            f"a {name} of {len(parts)} values arrives from another stage; here it has {_num_fields(kind)}"
        )
    return Node(kind, tuple((type(key), key) for key in keys), tuple(from_words(part) for part in parts))


@cache
def _name_of(kind: type) -> str:
    """Return a container class's name, for `_class_of` in another process."""
    if kind in _NAMES:
        return _NAMES[kind]
    if not _is_named_tuple(kind):
        raise CrossingError(f"a {kind.__name__} crosses from stage to stage; {_CAN}")
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _found(name) is not kind:
        raise CrossingError(
            f"a {kind.__name__} crosses from stage to stage, a named tuple that other processes can't find as {name}; "
            f"define it at the top of a module, under its own name"
        )
    return name


def _class_of(name: str) -> type:
    found = _found(name)
    if not isinstance(found, type) or not _is_named_tuple(found):
        raise CrossingError(
            f"a {name[:200]!r} arrives from another stage, and this process knows no named tuple of that name; "
            f"import its module where the model is defined"
        )
    return found


def _found(name: str) -> object:
    """Return the object named `module:a.b`, looked up in namespaces only; None if there is none."""
    module, _, path = name.partition(":")
    found: object = sys.modules.get(module)
    for part in path.split("."):
        owner = next((owner for owner in (ModuleType, type) if isinstance(found, owner)), None)
        # Attribute access would make some modules import.
        found = owner.__getattribute__(found, "__dict__").get(part) if owner is not None else None
    return found


def _is_named_tuple(kind: type) -> bool:
    if not issubclass(kind, tuple):
        return False
    fields = getattr(kind, "_fields", None)
    return _is_struct_sequence(kind) or (isinstance(fields, tuple) and all(type(field) is str for field in fields))


def _is_struct_sequence(kind: type) -> bool:
    """Return whether a class is that of a torch operator's several results, such as `torch.return_types.max`."""
    return vars(torch.return_types).get(kind.__name__) is kind and hasattr(kind, "n_sequence_fields")


def _num_fields(kind: Any) -> int:
    return int(kind.n_sequence_fields) if _is_struct_sequence(kind) else len(kind._fields)
