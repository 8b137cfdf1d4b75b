"""Whether a user's loss is a mean over what the recipe says, so that microbatches add up to the loss of the whole."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipebench.errors import UserCodeError
from pipebench.recipe.schema import Recipe
from pipebench.recipe.targets import target_in
from pipebench.run.trial_measures import Summed, is_mean, spread
from pipebench.zoo.measures import loss_of_model
from pipebench.zoo.registry import Dataset

NO_MEAN = "of some samples isn't the mean of what it is of each part of them"
_OF_OTHERS = (
    "the loss of a sample depends on the other samples of its minibatch, of which microbatches have fewer: compute it "
    "from that sample alone, or cut nothing (parallelism.microbatches: 1)"
)
_DRAWS = (
    "the model draws random numbers in evaluation mode, too, so that the loss of some samples can't be compared with "
    "that of each part of them, as microbatches need: draw only if self.training, leave the draws to the data set, or "
    "cut nothing (parallelism.microbatches: 1)"
)
_COUNTED = 16  # samples in which something has to count
_FACTORS = (1, 8, 64)  # powers of two, which lose no bit


def refuse_other_means(
    recipe: Recipe, model: nn.Module, dataset: Dataset, fields: Mapping[str, torch.Tensor], output: Any
) -> None:
    """Refuse a loss that isn't a mean over what the recipe says, where that matters, or that counts nothing.

    At the initial weights a classifier gives all classes nearly the same probability, so that samples' losses are the
    same, and with them all means. So it is tried with larger outputs, or matrices of a model that computes it, too.

    Args:
        recipe: what is run.
        model: the whole one.
        dataset: the recipe's.
        fields: of some samples.
        output: the model's, of these samples.
    """
    targets, mean_over = {name: fields[name] for name in dataset.targets}, recipe.dataset.get("mean_over") or "samples"
    if mean_over != "samples":
        # More than a small minibatch may have, in which nothing may count.
        some = spread(_COUNTED, dataset.num_train)
        if dataset.weigh(dataset.fetch("train", some, dataset.targets)) == 0:
            nothing = f"it counts 0 in {len(some)} samples, needed is what the loss is a mean over"
            raise UserCodeError(nothing, "dataset.mean_over")
    if "loss" not in recipe.dataset or (mean_over == "samples" and recipe.parallelism.microbatches == 1):
        return
    is_models = recipe.dataset["loss"] == "model"
    measured, parameters = (fields, [*model.parameters()]) if is_models else (output, [])
    for factor in _FACTORS:
        measure = _of_larger_model(model, dataset, factor) if is_models else _of_larger_outputs(dataset, factor)
        if not is_mean(measure, measured, targets, factor, parameters):
            each = is_models and mean_over == "samples" and torch.as_tensor(loss_of_model(output, None)).dim() == 1
            problem = _OF_OTHERS if each else f"the loss {NO_MEAN}, {_way_out(mean_over)}"
            if is_models and not torch.equal(measure(fields, targets), measure(fields, targets)):
                problem = _DRAWS
            raise UserCodeError(problem, "dataset.loss")


def _way_out(mean_over: Any) -> str:
    """Return the end of the sentence that refuses a loss because it isn't a mean over what the recipe says."""
    if mean_over == "samples":
        return (
            "which microbatches would make another loss: name what it is a mean over (dataset.mean_over: labels, or "
            "next_labels in models that shift them), return one number per sample, of that sample alone, or cut "
            "nothing (parallelism.microbatches: 1)"
        )
    counts = target_in(mean_over) or mean_over
    return f"each weighed by its {counts} (dataset.mean_over): count what the loss is a mean over"


def _of_larger_outputs(dataset: Dataset, factor: int) -> Summed:
    """Return the loss of larger outputs."""

    def measure(output: Any, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        def larger(part: torch.Tensor) -> torch.Tensor:
            return part * factor if part.is_floating_point() else part

        return dataset.loss(pytree.tree_map_only(torch.Tensor, larger, output), targets)

    return measure


def _of_larger_model(model: nn.Module, dataset: Dataset, factor: int) -> Summed:
    """Return the loss that a model with larger matrices computes, without draws and a minibatch's statistics."""
    matrices = [p.data for p in model.parameters() if p.dim() > 1 and p.is_floating_point()]

    def measure(fields: Any, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        positional, named = dataset.arguments(fields)
        try:
            for matrix in matrices:
                matrix.mul_(factor)
            return dataset.loss(model.eval()(*positional, **named), targets)
        finally:
            for matrix in matrices:
                matrix.div_(factor)

    return measure
