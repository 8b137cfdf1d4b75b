"""Losses and metrics for `DatasetPair`, by name: functions of a model's output and of the samples' target.

Each returns the mean over the samples, or one number per sample; `DatasetPair` turns both into sums. A model may also
compute the loss itself. Losses that are means over something else, such as tokens without padding, go with a function
that counts it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from pipebench.zoo.registry import DataError, SetMetric

Measure = Callable[[Any, Any], Any]
Count = Callable[[Any], Any]  # of the samples' target: one number per sample, or one of all of them
IGNORED = -100  # the label that torch's cross-entropy ignores
_NO_LOSS = (
    "with loss: model a forward returns its loss, a tuple with the loss first, or an object or a dict with `loss`; in "
    "a LightningModule it is training_step that does: `def forward(self, x, y): return self.module.training_step((x, "
    "y), 0)`, in a module around it"
)
_PARTS = (torch.Tensor, torch.fx.Proxy, tuple, list, Mapping, int, float, str, type(None))


@dataclass(frozen=True)
class Metric:
    """A metric that is a mean over samples: its function, and which values are better."""

    function: Measure  # of output and target
    best: str  # `max` or `min`


@dataclass(frozen=True)
class OfWholeSet:
    """A metric of all held-out samples together: what makes its object, and which values are better."""

    make: Callable[[], SetMetric]
    best: str  # `max` or `min`


def plain_output(output: Any) -> Any:
    """Return a model's output; as a dict if it is a mapping, or an object with an attribute `loss`.

    What is beside a loss and neither data nor a container of it, such as a cache of keys and values, is left out.
    """
    held = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    if "loss" in held:
        return {name: part for name, part in held.items() if isinstance(part, _PARTS)}
    return dict(output) if isinstance(output, Mapping) else output


def loss_of_model(output: Any, target: Any) -> Any:
    """Return the loss that a model computes itself: its output, the output's `loss`, or a part of a tuple or list."""
    parts = plain_output(output)
    if isinstance(parts, dict) and "loss" in parts:
        return parts["loss"]
    if isinstance(parts, tuple | list):
        return parts[_place_of_loss(parts)]
    if isinstance(parts, torch.Tensor) and parts.dim() < 2:
        return parts
    raise ValueError(_NO_LOSS)


def beside_loss(output: Any) -> Any:
    """Return the other parts of an output that has a loss: the part, if there is one, or a dict or tuple of them."""
    parts = plain_output(output)
    if isinstance(parts, dict):
        rest: Any = {name: part for name, part in parts.items() if name != "loss" and part is not None}
        return next(iter(rest.values())) if len(rest) == 1 else rest
    if isinstance(parts, tuple | list):
        place = _place_of_loss(parts)
        rest = (*parts[:place], *parts[place + 1 :])
        return rest[0] if len(rest) == 1 else rest
    raise DataError("metrics need more than the loss: let forward return {'loss': loss, 'output': output}")


def _place_of_loss(parts: Sequence[Any]) -> int:
    """Return which part is the loss: the only number, or the first part if it is one of several, or one per sample.

    Some models return it first, others last, as nanoGPT does, whose logits may have one dimension in other models.

    Raises:
        ValueError: it may be any part.
    """
    dims = [part.dim() if isinstance(part, torch.Tensor) else None for part in parts]
    if dims.count(0) == 1:
        return dims.index(0)
    if dims and (dims[0] == 0 or (dims[0] == 1 and 0 not in dims)):
        return 0
    raise ValueError(_NO_LOSS)


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return every sample's cross-entropy; output: [samples, classes, ...], target: class indices or probabilities."""
    return _per_sample(nn.functional.cross_entropy(output, target, reduction="none"))


def cross_entropy_of_labels(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return every sample's cross-entropy summed over its labels but -100; output: [samples, classes, ...]."""
    each = nn.functional.cross_entropy(output, target, reduction="none", ignore_index=IGNORED)
    return each.reshape(each.shape[0], -1).sum(1)


def squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return every sample's mean squared error; output and target must have the same shape."""
    if output.shape != target.shape:
        raise ValueError(f"the output's shape is {list(output.shape)} and the target's {list(target.shape)}")
    return _per_sample(nn.functional.mse_loss(output, target, reduction="none"))


def num_labels(target: Any, first: int = 0) -> torch.Tensor:
    """Return every sample's number of labels but -100, of a text from its token `first` on.

    Args:
        target: the labels, [samples, ...] int, or a dict of targets with `labels` among them.
        first: 1 for models that predict every token's label from the tokens before it.

    Raises:
        ValueError: there are no such labels.
    """
    labels = target
    if isinstance(target, Mapping):
        labels = next(iter(target.values())) if len(target) == 1 else target.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.dim() <= first:
        shape = "[samples, tokens]" if first else "[samples, ...]"
        raise ValueError(f"needed are labels {shape}, whole numbers: the only target, or the one named labels")
    own = labels[:, first:] if first else labels
    return (own.long() != IGNORED).reshape(own.shape[0], -1).sum(1)


@dataclass(frozen=True)
class Top:
    """Whether a sample's class is among its k largest outputs.

    This is a class with `__call__`, since a closure can't be pickled for other processes.
    """

    k: int

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return one bool per sample; output: [samples, classes], target: class indices."""
        if output.dim() < 2 or output.shape[1] <= self.k:  # the class is always among all outputs
            given = list(output.shape)
            raise ValueError(f"top{self.k} needs an output per class, {self.k + 1} at least, and is given {given}")
        best = output.topk(self.k, dim=1).indices
        return (best == target.unsqueeze(1)).any(dim=1)


@dataclass(frozen=True)
class OfClass:
    """A loss or metric that objects of a class compute, such as torch.nn's.

    Every call makes an object, so that none keeps anything from one call to the next.
    """

    make: Callable[[], Measure]

    def __call__(self, output: Any, target: Any) -> Any:
        """Return what an object gives for an output and a target; its tensors are moved to their device."""
        measure = self.make()
        if isinstance(measure, nn.Module):
            measure.to(next(part.device for part in tree_leaves([output, target]) if isinstance(part, torch.Tensor)))
        return measure(output, target)


LOSSES: dict[str, Measure] = {"cross_entropy": cross_entropy, "mse": squared_error, "model": loss_of_model}
COUNTS: dict[str, Count | None] = {"samples": None, "labels": num_labels, "next_labels": partial(num_labels, first=1)}
METRICS: dict[str, Metric] = {
    "top1": Metric(Top(1), "max"),
    "top5": Metric(Top(5), "max"),
    "mse": Metric(squared_error, "min"),
}


def _per_sample(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(values.shape[0], -1).mean(1)
