"""The shapes and types of the minibatches of a user's pair of data sets, known from some of their samples.

Without a collate function of the user's own, all minibatches of a split have one form, and inputs of both splits have
one type. Targets of the held-out samples may be of another kind than those to train on, such as classes where the
latter are mixed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from pipebench.zoo.samples import in_words

Form = dict[str, torch.Tensor]  # fields of no samples, on the meta device: the shapes and types of some


@dataclass(frozen=True)
class Seen:
    """The forms of some samples of a split."""

    alone: Sequence[Form]  # of each one
    together: Form
    collates: bool  # whether a function of the user's own made them, which may make minibatches of several sizes


@dataclass(frozen=True)
class Forms:
    """The forms of both splits' minibatches; `inputs` are names of fields."""

    train: Seen
    held_out: Seen
    inputs: Sequence[str]

    @property
    def of_costs(self) -> Form:
        """The form whose times, bytes and memory stand for all."""
        return self.train.together

    @cached_property
    def smallest(self) -> Form | None:
        """The smallest form among minibatches of other sizes than `of_costs`, if some have other sizes."""
        like = self.of_costs
        held_out = [like | {name: form[name] for name in self.inputs if name in form} for form in self.held_out.alone]
        kinds = _kinds(like)
        others = [
            form for form in (*self.train.alone, *held_out) if _kinds(form) == kinds and _sizes(form) != _sizes(like)
        ]
        # A size of 1 may decide how tensors broadcast, as a single sample may.
        return min(others, key=lambda form: (1 in _sizes(form), _sizes(form)), default=None)

    def differs(self, split: str, name: str, found: object) -> str | None:
        """Return how a field of a split's minibatch isn't as it must be, as the end of a sentence; None if it is."""
        of, like = self._likes[split][name]
        advice = ""
        if isinstance(found, torch.Tensor) and _kind(found) == _kind(like):
            if _differing(like, name, [{name: found}]) <= self._free[split][name]:
                return None
            advice = ": pad samples to one size, or give a collate_fn that pads those of a minibatch"
        was = "missing" if found is None else in_words(found[0] if isinstance(found, torch.Tensor) else found)
        needed = in_words(like.new_empty((1, *like.shape[1:]))[0])
        return f"{was}, needed is {needed} as in the first sample of {of}{advice}"

    @property
    def note(self) -> str:
        """What costs are of, if minibatches differ; empty if they don't."""
        free = self._free["train"]
        varied = [
            name
            for name, it in self.of_costs.items()
            if free[name] or (name in self.inputs and _differing(it, name, self.held_out.alone))
        ]
        shapes = (f"{name} [{', '.join(map(str, ('n', *self.of_costs[name].shape[1:])))}]" for name in varied)
        return f"minibatches differ in shape, costs are of {', '.join(shapes)}" if varied else ""

    @cached_property
    def _likes(self) -> dict[str, dict[str, tuple[str, torch.Tensor]]]:
        """By split and field, what its minibatches have to be like, and the split in which that was seen."""
        of_train = {name: ("train", it) for name, it in self.of_costs.items()}
        own = {name: ("eval", it) for name, it in self.held_out.alone[0].items() if self._is_own(name, it)}
        return {"train": of_train, "eval": of_train | own}

    def _is_own(self, name: str, first: torch.Tensor) -> bool:
        """Return whether a field of the held-out samples is compared with the `first` of these, not with train's."""
        like = self.of_costs.get(name)
        if like is None or name not in self.inputs:
            return like is not None
        return not self.held_out.collates and _kind(first) == _kind(like)

    @cached_property
    def _free(self) -> dict[str, dict[str, set[int]]]:
        """By split and field, the dimensions in which a function of the user's own makes minibatches differ."""
        alone, found = [*self.train.alone, *self.held_out.alone], dict[str, dict[str, set[int]]]()
        for split, seen in (("train", self.train), ("eval", self.held_out)):
            likes = ((name, it) for name, (_, it) in self._likes[split].items())
            found[split] = {name: _differing(it, name, alone) if seen.collates else set() for name, it in likes}
        return found


def form_of(fields: Mapping[str, torch.Tensor]) -> Form:
    """Return the form of a minibatch, without fields that aren't tensors."""
    return {name: value[:0].to("meta") for name, value in fields.items() if isinstance(value, torch.Tensor)}


def _differing(like: torch.Tensor, name: str, forms: Sequence[Form]) -> set[int]:
    """Return the dimensions but the first in which a field of some forms, of the same kind, differs from `like`."""
    found = [form[name] for form in forms if name in form and _kind(form[name]) == _kind(like)]
    return {dim for dim in range(1, like.dim()) if any(each.shape[dim] != like.shape[dim] for each in found)}


def _kind(value: torch.Tensor) -> tuple[int, torch.dtype]:
    return value.dim(), value.dtype


def _kinds(form: Form) -> dict[str, tuple[int, torch.dtype]]:
    return {name: _kind(value) for name, value in form.items()}


def _sizes(form: Form) -> list[int]:
    return [size for value in form.values() for size in value.shape[1:]]
