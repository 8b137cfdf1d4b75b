"""The model's state in a checkpoint: under the model's own names, so independent of the plan."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from pipebench.errors import UserError
from pipebench.model.slice_modules import Cut

_ADDED_LATER = ("mean_change", "loss_scale", "pieces", "slices")  # sections that the first checkpoints don't have
_WRITTEN_IF_ANY = ("pieces", "slices")  # sections that are left out if they are empty


class CheckpointError(UserError, ValueError):
    """A checkpoint that can't be read, written or loaded; names the file or the entry, and the reason."""


@dataclass
class ModelState:
    """The state of one replica of a stage, or of several merged."""

    # The newest weights, frozen ones included, by the model's own name
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    # The optimizer's state (tensors, numbers) by the parameter's name
    optimizer: dict[str, dict[str, Any]] = field(default_factory=dict)
    # By the model's own name: buffers that replicas average, and the other buffers of the first replica
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    # By `replica/name`: buffers that aren't averaged (integers), of replicas other than the first
    counters: dict[str, torch.Tensor] = field(default_factory=dict)
    # By `stream/microbatch/module`: the state that a module carries to the stream's next minibatch
    carried: dict[str, Any] = field(default_factory=dict)
    # A parameter's mean change per update, by its name, where the weight policy uses it
    mean_change: dict[str, torch.Tensor] = field(default_factory=dict)
    # In fp16, the loss scale of a parameter's stage and its two counters, by the parameter's name
    loss_scale: dict[str, torch.Tensor] = field(default_factory=dict)
    # Where replicas are sharded, by a parameter's name: [first element in the flat whole, *shape of the whole] int64.
    # Parameter and optimizer state are those of the piece
    pieces: dict[str, torch.Tensor] = field(default_factory=dict)
    # Where layers are divided into tensor slices, by a parameter's name: [dimension, first index in it, *shape of the
    # whole] int64. Parameter and optimizer state are those of the slice, and `pieces` are pieces of the slice
    slices: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def joined(cls, states: Iterable["ModelState"]) -> "ModelState":
        """Merge states, and join the pieces and slices of parameters and their optimizer state into whole ones.

        Raises:
            CheckpointError: a piece or a slice of a parameter is missing.
        """
        given = list(states)
        if any(state.slices for state in given):
            return _with_slices(cls.joined([state._named_by_slice() for state in given]), given)
        if not any(state.pieces for state in given):
            return cls.merge(given)
        merged = cls.merge(replace(state, parameters={}, optimizer={}, pieces={}) for state in given)
        num_joined: dict[str, int] = {}  # elements
        for state in given:
            merged.parameters.update({n: p for n, p in state.parameters.items() if n not in state.pieces})
            merged.optimizer.update({n: own for n, own in state.optimizer.items() if n not in state.pieces})
            for name, place in state.pieces.items():
                num_joined[name] = num_joined.get(name, 0) + _join(merged, state, name, place)
        for name, count in num_joined.items():
            if count != merged.parameters[name].numel():
                total = merged.parameters[name].numel()
                raise CheckpointError(f"{name}: found {count:,} elements, expected of all replicas are {total:,}")
        return merged

    @classmethod
    def merge(cls, states: Iterable["ModelState"]) -> "ModelState":
        """Return one state with all that is in several, of other stages and replicas; tensors are shared."""
        merged = cls()
        for state in states:
            for section in fields(cls):
                getattr(merged, section.name).update(getattr(state, section.name))
        return merged

    def clear(self) -> None:
        """Drop all tensors."""
        for section in fields(self):
            getattr(self, section.name).clear()

    def of_slice(self, cuts: Mapping[str, Cut]) -> "ModelState":
        """Return the state of a process that has these slices of the whole tensors, by name: views."""

        def cut(name: str, value: Any) -> Any:
            is_whole = name in cuts and isinstance(value, torch.Tensor) and tuple(value.shape) == cuts[name].shape
            return cuts[name].of(value) if is_whole else value

        return replace(
            self,
            parameters={name: cut(name, value) for name, value in self.parameters.items()},
            optimizer={
                name: {key: cut(name, value) for key, value in state.items()} for name, state in self.optimizer.items()
            },
            mean_change={name: cut(name, value) for name, value in self.mean_change.items()},
        )

    def _named_by_slice(self) -> "ModelState":
        """Return the state with names that tell slices apart: a divided parameter's, and where its slice begins."""
        sections = {
            section: {_name_of(self.slices, name): value for name, value in getattr(self, section).items()}
            for section in ("parameters", "optimizer", "mean_change", "pieces")
        }
        return replace(self, **sections, slices={})

    def to_plain(self) -> dict[str, dict[str, Any]]:
        """Return dictionaries of tensors on the CPU, none of them a view of a larger storage, which would be written.

        Raises:
            CheckpointError: a state is of a type that `torch.load(weights_only=True)` wouldn't read back.
        """
        plain = self._mapped(_on_cpu)
        return {section: values for section, values in plain.items() if values or section not in _WRITTEN_IF_ANY}

    def copied(self) -> "ModelState":
        """Return a copy on the host, which training doesn't change; from a GPU, complete once that synchronises.

        Raises:
            CheckpointError: as `to_plain`.
        """
        return ModelState(**self._mapped(_copied))

    def _mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, dict[str, Any]]:
        sections = {section.name: getattr(self, section.name) for section in fields(self)}
        for values in sections.values():
            for name, value in values.items():
                check_types(value, name)
        mapped: dict[str, dict[str, Any]] = tree_map_only(torch.Tensor, function, sections)
        return mapped

    @classmethod
    def from_plain(cls, data: object) -> "ModelState":
        """Return the state that `to_plain` wrote; raises a CheckpointError if it isn't one."""
        names = {section.name for section in fields(cls)}
        if isinstance(data, dict):
            data = {**{section: {} for section in _ADDED_LATER}, **data}
        if not isinstance(data, dict) or data.keys() != names or not all(map(_is_section, data.values())):
            raise CheckpointError("is not a checkpoint of pipebench")
        for section in ("parameters", "buffers", "counters", *_ADDED_LATER):
            if not all(isinstance(value, torch.Tensor) for value in data[section].values()):
                raise CheckpointError(f"holds something that isn't a tensor among its {section}")
        if not all(map(_is_section, data["optimizer"].values())):
            raise CheckpointError("holds something that isn't a parameter's state among its optimizer state")
        return cls(**data)


def _join(whole: ModelState, part: ModelState, name: str, place: torch.Tensor) -> int:
    """Copy a piece of a parameter, and of its optimizer state, into the whole; return the piece's elements."""
    start, *shape = place.tolist()
    piece, state = part.parameters[name], part.optimizer.get(name, {})
    if piece.numel() == math.prod(shape):
        whole.parameters[name] = piece.view(shape)
        whole.optimizer.update({name: state} if state else {})
        return piece.numel()

    def joined(before: Any, own: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = own.new_zeros(shape) if before is None else before
        made.view(-1)[start : start + own.numel()] = own.detach()
        return made

    whole.parameters[name] = joined(whole.parameters.get(name), piece)
    for key, value in state.items():
        found = whole.optimizer.setdefault(name, {})
        is_piece = isinstance(value, torch.Tensor) and value.shape == piece.shape
        found[key] = joined(found.get(key), value) if is_piece else value
    return piece.numel()


def _name_of(slices: Mapping[str, torch.Tensor], name: str) -> str:
    """Return the name of a slice of a parameter, or the parameter's if it isn't divided."""
    return f"{name}@{int(slices[name][1])}" if name in slices else name


def _with_slices(joined: ModelState, states: Iterable[ModelState]) -> ModelState:
    """Join the slices of parameters and of their optimizer state, which `_named_by_slice` has given names of their own.

    `states` have the places of the slices.
    """
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for state in states:
        for name, place in state.slices.items():
            parts.setdefault(name, {})[int(place[1])] = place
    for name, places in parts.items():
        dimension, _, *shape = places[min(places)].tolist()
        names = [_name_of({name: places[start]}, name) for start in sorted(places)]
        own = [joined.parameters.pop(each) for each in names]
        optimizers = [joined.optimizer.pop(each, {}) for each in names]
        if sum(each.shape[dimension] for each in own) != shape[dimension]:
            found = sum(each.numel() for each in own)
            raise CheckpointError(f"{name}: found {found:,} elements, expected of all slices are {math.prod(shape):,}")
        joined.parameters[name] = torch.cat([each.detach() for each in own], dimension)
        columns = {key: [each[key] for each in optimizers] for key in optimizers[0]}
        if columns:
            joined.optimizer[name] = {key: _of_parts(column, own, dimension) for key, column in columns.items()}
        if names[0] in joined.mean_change:
            joined.mean_change[name] = torch.cat([joined.mean_change.pop(each) for each in names], dimension)
    return joined


def _of_parts(values: list[Any], own: list[torch.Tensor], dimension: int) -> Any:
    """Join what an optimizer keeps for the slices of a parameter: along their dimension if it is of their shape."""
    alike = all(isinstance(v, torch.Tensor) and v.shape == p.shape for v, p in zip(values, own, strict=True))
    return torch.cat(values, dimension) if alike else values[0]


def _is_section(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def check_types(value: Any, name: str) -> None:
    """Raise a CheckpointError if a value isn't of a type that `torch.load(weights_only=True)` would read back."""
    if value is None or isinstance(value, torch.Tensor) or type(value) in (bool, int, float, complex, str):
        return
    if type(value) not in (dict, OrderedDict, list, tuple):
        raise CheckpointError(
            f"the state of {name} holds a {type(value).__name__}; a checkpoint holds tensors, numbers, texts and None, "
            f"in lists, tuples and dictionaries"
        )
    for each in (*value, *value.values()) if isinstance(value, dict) else value:
        check_types(each, name)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host; that of a GPU's tensor is in pinned memory, which torch reuses."""
    if not tensor.is_cuda:
        return tensor.detach().clone()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor.detach(), non_blocking=True)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    found = tensor.detach().cpu()
    is_view = found.untyped_storage().nbytes() != found.nbytes  # torch.save would write the whole storage
    return found.clone() if is_view else found
