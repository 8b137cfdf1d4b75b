"""Try a user's model, loss and metrics as an evaluation uses them: in evaluation mode, on held-out samples.

A model may return something else there than in training, such as scores instead of its loss, and a run would fail only
after its first epoch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipebench.engine.whole_set import NotComputedError, WholeSet
from pipebench.errors import UserCodeError, print_notice
from pipebench.model.graph import forget_states
from pipebench.recipe.schema import Recipe
from pipebench.recipe.users_code import message_of, users_code
from pipebench.run.trial_means import NO_MEAN
from pipebench.run.trial_measures import is_mean, refuse_changed_targets, refuse_sums, refuse_what_changes, spread
from pipebench.zoo.measures import loss_of_model
from pipebench.zoo.registry import Dataset


@dataclass(frozen=True)
class Names:
    """What sentences call a recipe's model and data set, and the keys of what may be wrong."""

    model: str
    data: str
    model_key: str
    data_key: str
    loss_key: str
    metrics_key: str

    @classmethod
    def of(cls, recipe: Recipe) -> "Names":
        """Return the names in a recipe of which at least one of the two is a target."""
        model, data = (section.get("target") or section["name"] for section in (recipe.model, recipe.dataset))
        data_key = "dataset" if recipe.dataset.get("target") is None else "dataset.target"
        return cls(
            model,
            data,
            data_key if recipe.model.get("target") is None else "model.target",
            data_key,
            "dataset.loss" if "loss" in recipe.dataset else data_key,
            "dataset.metrics" if "metrics" in recipe.dataset else data_key,
        )


def try_evaluation(recipe: Recipe, model: nn.Module, dataset: Dataset, trained: Any, count: int) -> None:
    """Try a model in evaluation mode, with the loss and the metrics; leave it in training mode.

    Args:
        recipe: what is run.
        model: the whole one.
        dataset: the recipe's.
        trained: the model's output in training.
        count: as many held-out samples are read, if there are as many.
    """
    names, count = Names.of(recipe), min(count, dataset.num_eval)
    if not count:
        return
    with users_code(f"{names.data} gives no held-out minibatch", names.data_key):
        fields = dataset.fetch("eval", spread(count, dataset.num_eval), [*dataset.inputs, *dataset.targets])
    positional, named = dataset.arguments(fields)
    forget_states(model)
    with users_code(f"{names.model} fails in evaluation, on {count} samples of {names.data}", names.model_key):
        with torch.no_grad():
            output = model.eval()(*positional, **named)
        model.train()
    forget_states(model)
    targets = {name: fields[name] for name in dataset.targets}
    suits = f"of {names.data} doesn't suit the output of {names.model}"
    with users_code(f"in evaluation, the loss {suits}", names.loss_key), torch.no_grad():
        float(dataset.loss(output, targets))
        if recipe.dataset.get("loss") == "model":
            _refuse_another_loss(names, trained, output)
    with users_code(f"in evaluation, a metric {suits}", names.metrics_key):
        _try_metrics(dataset, output, targets, names.metrics_key)


def _refuse_another_loss(names: Names, trained: Any, evaluated: Any) -> None:
    """Refuse a model whose loss has other dimensions in evaluation: it may be something else there, such as scores."""
    kinds = ("a number", "one number per sample")
    first, then = (kinds[torch.as_tensor(loss_of_model(output, None)).dim()] for output in (trained, evaluated))
    if first != then:
        raise UserCodeError(
            f"{names.model} returns {first} as its loss in training, and {then} in evaluation, on samples of "
            f"{names.data}: needed is the same loss in both, with scores beside it, as (loss, scores)",
            names.loss_key,
        )


def _try_metrics(dataset: Dataset, output: Any, targets: Mapping[str, torch.Tensor], given: str) -> None:
    """Try metrics, from the recipe or the data set as the key `given` says."""
    are_own, count = given == "dataset.metrics", next(iter(targets.values())).shape[0]
    detached = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output)
    for name, value in dataset.score(detached, targets).items():
        key = f"dataset.metrics.{name}" if are_own else given
        if value.dim() or not math.isfinite(float(value)):
            raise UserCodeError(f"{name} of {count} samples is {float(value.sum()):g}, needed is a number", key)
        measure = partial(_score, dataset, name)
        refuse_changed_targets(name, measure, detached, targets, key)
        refuse_sums(name, measure, detached, targets, value, key)
        refuse_what_changes(name, measure, detached, targets, key)
        if are_own:
            why = "and it is averaged over minibatches: return one number per sample, or a class (update, compute)"
            if not is_mean(measure, detached, targets):
                raise UserCodeError(f"{name} {NO_MEAN}, {why}", key)
    for name in dataset.whole_set_metrics():
        measure = partial(_of_whole_set, dataset, name)
        try:
            measure(detached, targets)
        except NotComputedError as error:
            if not isinstance(error.__cause__, ValueError | ArithmeticError):
                raise
            print_notice(f"{message_of(error)}; it had {count} held-out samples, which may be too few, or of one class")
            continue
        refuse_what_changes(name, measure, detached, targets, f"dataset.metrics.{name}" if are_own else given)


def _of_whole_set(dataset: Dataset, name: str, output: Any, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a metric of the whole set, which has one minibatch only; of samples of one class it may be NaN."""
    whole_set = WholeSet(dataset)
    whole_set.add(0, output, targets)
    return torch.tensor(whole_set.compute()[name])


def _score(dataset: Dataset, name: str, output: Any, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return dataset.score(output, targets)[name]
