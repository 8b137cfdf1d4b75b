"""The structure of a user's samples: which tensors are inputs and which are targets, and the names of their fields.

Inputs and targets are each a tensor, or a tuple or dict of tensors. A tensor alone is the field `input` or `target`;
one in a tuple or dict also has its index or key in its name: `input.0`, `input.mask`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipebench.zoo.registry import DataError

INPUT, TARGET = "input", "target"
_LABELS = ("label", "labels", "target", "targets", "y")


@dataclass(frozen=True)
class Fields:
    """The inputs and targets of samples that aren't pairs (input, target), as keys of a dict or indices in a tuple."""

    # For the model's forward: of a dict, under the names of its arguments; None: everything.
    inputs: Sequence[str | int] | None = None
    # For the loss and the metrics; None: what isn't an input, or if all are, the last one.
    targets: Sequence[str | int] | None = None

    def pair(self, sample: Any) -> tuple[Any, Any]:
        """Return a sample's input and target.

        Raises:
            DataError: the sample is no dict or tuple, or has no such key or index.
        """
        if not isinstance(sample, Mapping | tuple | list):
            raise DataError(f"a sample is {in_words(sample)}, needed is a dict or a tuple")
        parts: dict[Any, Any] = dict(sample) if isinstance(sample, Mapping) else dict(enumerate(sample))
        names = [*parts]
        inputs = names if self.inputs is None else [*self.inputs]
        rest = [name for name in names if name not in inputs] or inputs[-1:]
        targets = rest if self.targets is None else [*self.targets]
        for name in (*inputs, *targets):
            if name not in names:
                raise DataError(f"a sample has no {name!r}, it is {in_words(sample)}")
        target = {name: parts[name] for name in targets} if len(targets) > 1 else parts[targets[0]]
        if isinstance(sample, Mapping):
            return {name: parts[name] for name in inputs}, target
        return tuple(parts[name] for name in inputs) if len(inputs) > 1 else parts[inputs[0]], target


def how_to_name(sample: Any) -> str:
    """Return the end of an error's sentence: the recipe's keys for a sample that isn't a pair, or ""."""
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
                "target are each one, or a tuple or dict of them"
            )
        yield field


def _parts(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {f"{name}.{key}": part for key, part in value.items()}
    if isinstance(value, tuple | list):
        return {f"{name}.{index}": part for index, part in enumerate(value)}
    return {name: value}


def flat(collated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a collated input and target by their fields' names."""
    return {field: part for name, value in collated.items() for field, part in _parts(name, value).items()}


def shaped(fields: Sequence[str], given: Mapping[str, torch.Tensor]) -> Any:
    """Return the target in the structure of the samples: a tensor, a tuple or a dict, given all fields by name."""
    if list(fields) == [TARGET]:
        return given[TARGET]
    keys = [field.partition(".")[2] for field in fields]
    if keys == [str(index) for index in range(len(keys))]:
        return tuple(given[field] for field in fields)
    return {key: given[field] for key, field in zip(keys, fields, strict=True)}


def in_words(value: Any) -> str:
    """Describe a value for an error: a tensor's shape and dtype, a container's content, or the class."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple | list) and len(value) <= 4:
        return f"a {type(value).__name__} of {', '.join(in_words(part) for part in value) or 'nothing'}"
    if isinstance(value, Mapping) and len(value) <= 4:
        return f"a {type(value).__name__} of {', '.join(f'{key}: {in_words(part)}' for key, part in value.items())}"
    return "None" if value is None else f"a {type(value).__name__}"
