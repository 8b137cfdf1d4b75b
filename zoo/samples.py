"""The structure of a user's samples: which tensors are inputs and which are targets, and the names of their fields.

Inputs and targets are each a tensor, or a tuple or dict of tensors. A tensor alone is the field `input` or `target`;
one in a tuple or dict also has its index or key in its name: `input.0`, `input.mask`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

from pipebench.zoo.registry import DataError

INPUT, TARGET = "input", "target"
_LABELS = ("label", "labels", "target", "targets", "y")


@dataclass(frozen=True)
class Fields:
    """The inputs and targets of samples that aren't pairs: keys of a dict, names in a dataclass, indices in a tuple."""

    # For the model's forward: of a dict, under the names of its arguments; None: everything.
    inputs: Sequence[str | int] | None = None
    # For the loss and the metrics; None: what is neither an input nor a text, or if there is nothing, the last input.
    targets: Sequence[str | int] | None = None

    def pair(self, sample: Any) -> tuple[Any, Any]:
        """Return a sample's input and target.

        Raises:
            DataError: the sample is no dict or tuple, or has no such key or index.
        """
        sample = _with_names(sample, (*(self.inputs or ()), *(self.targets or ())))
        if not isinstance(sample, Mapping | tuple | list):
            raise DataError(f"a sample is {in_words(sample)}, needed is a dict or a tuple")
        parts: dict[Any, Any] = dict(sample) if isinstance(sample, Mapping) else dict(enumerate(sample))
        names = [*parts]
        inputs = names if self.inputs is None else [*self.inputs]
        rest = [name for name in names if name not in inputs and not _is_text(parts[name])] or inputs[-1:]
        targets = rest if self.targets is None else [*self.targets]
        for name in (*inputs, *targets):
            if name not in names:
                raise DataError(f"a sample has no {name!r}, it is {in_words(sample)}")
        if isinstance(sample, Mapping):
            target = {name: parts[name] for name in targets} if len(targets) > 1 else parts[targets[0]]
            return {name: parts[name] for name in inputs}, target
        given, wanted = (tuple(parts[name] for name in each) for each in (inputs, targets))
        return given if len(given) > 1 else given[0], wanted if len(wanted) > 1 else wanted[0]


def _with_names(sample: Any, names: Iterable[str | int]) -> Any:
    """Return a sample as a dict if it is a dataclass, or a named tuple and some of its parts are named; else itself."""
    if isinstance(sample, Mapping):
        return sample
    if is_dataclass(sample) and not isinstance(sample, type):
        return {each.name: getattr(sample, each.name) for each in fields(sample)}
    is_named = hasattr(sample, "_asdict") and any(isinstance(name, str) for name in names)
    return sample._asdict() if is_named else sample


def _is_text(part: Any) -> bool:
    """Return whether a part of a sample, or of a minibatch, is a text, texts or None, such as names and remarks."""
    parts = part if isinstance(part, tuple | list) else [part]
    return all(isinstance(each, str | bytes | None) for each in parts)


def how_to_name(sample: Any) -> str:
    """Return the end of an error's sentence: the recipe's keys for a sample that isn't a pair, or ""."""
    sample = _with_names(sample, ())
    if not isinstance(sample, Mapping | tuple | list) or len(sample) < 2:
        return ""
    names = [*sample] if isinstance(sample, Mapping) else [*range(len(sample))]
    labels = [name for name in names if str(name) in _LABELS] or names[-1:]
    parts = sample if isinstance(sample, Mapping) else [*sample]
    inputs = [name for name in names if name not in labels and not isinstance(parts[name], str | bytes | None)]
    written = (f"[{', '.join(map(str, each))}]" for each in (inputs, labels))
    return "; or name what is whose in dataset: `inputs: {}, targets: {}`".format(*written)


def tensor_names(name: str, value: Any) -> Iterator[str]:
    """Yield the names of the fields of an input or target, `name` being `input` or `target`.

    Raises:
        DataError: it has no tensors, or anything but tensors, nested containers included.
    """
    parts = _parts(name, value)
    if not parts:
        raise DataError(f"the {name} of a sample is empty")
    for field, part in parts.items():
        if not isinstance(part, torch.Tensor):
            raise DataError(
                f"{field} of the samples is {in_words(part)}, needed is a tensor or number; a sample's input and "
                f"target are each one, or a tuple or dict of them, of which dataset.{name}s names those that are used"
            )
        yield field


def _parts(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {f"{name}.{key}": part for key, part in value.items()}
    if isinstance(value, tuple | list):
        return {f"{name}.{index}": part for index, part in enumerate(value)}
    return {name: value}


def flat(collated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a collated input and target by their fields' names, without what they were computed of."""
    parts = {field: part for name, value in collated.items() for field, part in _parts(name, value).items()}
    return {field: part.detach() if isinstance(part, torch.Tensor) else part for field, part in parts.items()}


def apart(value: Any, samples: Sequence[Any]) -> Any:
    """Return an input or target that is no view of samples, or of something larger, such as all of a data set.

    A model that changes its input in place would otherwise change the data set, in the process that reads it only.
    """
    leaves = pytree.tree_leaves(samples)
    memories = {each.untyped_storage().data_ptr() for each in leaves if isinstance(each, torch.Tensor)}
    memories |= {each.ctypes.data for each in leaves if isinstance(each, numpy.ndarray)}

    def own(part: Any) -> Any:
        if not isinstance(part, torch.Tensor) or part.layout is not torch.strided:
            return part
        memory = part.untyped_storage()
        return part.clone() if memory.nbytes() > part.nbytes or memory.data_ptr() in memories else part

    if isinstance(value, Mapping):
        return {key: own(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [own(part) for part in value]
        return type(value)._make(parts) if hasattr(value, "_make") else parts
    return own(value)


@dataclass(frozen=True)
class Structure:
    """The structure of an input or target: a tensor, or a tuple, a named tuple or a dict of tensors."""

    fields: tuple[str, ...]  # their names, as `tensor_names` has them
    keys: tuple[Any, ...] | None = None  # of a dict
    named: Any = None  # the class of a named tuple
    is_one: bool = False  # a tensor alone

    @classmethod
    def of(cls, name: str, value: Any) -> "Structure":
        """Return the structure of a collated input or target, `name` being `input` or `target`.

        Raises:
            DataError: as `tensor_names` does.
        """
        names = tuple(tensor_names(name, value))
        if isinstance(value, Mapping):
            return cls(names, keys=tuple(value))
        is_one, is_named = not isinstance(value, tuple | list), hasattr(value, "_fields")
        return cls(names, named=type(value) if is_named else None, is_one=is_one)

    def with_tensors(self, given: Mapping[str, torch.Tensor]) -> Any:
        """Return tensors in this structure, given all fields by name."""
        parts = [given[field] for field in self.fields]
        if self.keys is not None:
            return dict(zip(self.keys, parts, strict=True))
        if self.named is not None:
            return self.named._make(parts)
        return parts[0] if self.is_one else tuple(parts)


def in_words(value: Any) -> str:
    """Describe a value for an error: a tensor's shape and dtype, a container's content, or the class."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    name = type(value).__name__
    kind = f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"
    if isinstance(value, tuple | list) and len(value) <= 4:
        return f"{kind} of {', '.join(in_words(part) for part in value) or 'nothing'}"
    if isinstance(value, Mapping) and len(value) <= 4:
        return f"{kind} of {', '.join(f'{key}: {in_words(part)}' for key, part in value.items())}"
    return "None" if value is None else kind
