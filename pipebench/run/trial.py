"""A trial of what the user has brought or chosen, before anything runs: samples through model, loss and metrics.

What doesn't go together is then told in one sentence, instead of somewhere in the run, by a worker among others.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pipebench.errors import UserCodeError
from pipebench.model.optimizer import FUSED
from pipebench.recipe.load import LoadedRecipe, faults_of
from pipebench.recipe.make import make_dataset
from pipebench.recipe.named import KINDS, SCHEDULE
from pipebench.recipe.schema import Recipe
from pipebench.recipe.users_code import users_code
from pipebench.run.optimizer_trial import try_optimizer
from pipebench.train.learning_rate import rate_of_samples
from pipebench.train.profiled_model import initial_model
from zoo.plain import seeded
from zoo.registry import Dataset

_SAMPLES = 16


def try_out(loaded: LoadedRecipe) -> None:
    """Try what a recipe names by target, and optimizers that not every model suits.

    Raises:
        RecipeError: in one sentence, what doesn't work.
    """
    recipe = loaded.recipe
    with faults_of(loaded), seeded(0):
        _try_schedule(recipe)
        own = [section for section in (recipe.model, recipe.dataset) if section.get("target") is not None]
        tries_optimizer = recipe.train.optimizer.name not in FUSED  # those are tested under every plan
        if not own and not tries_optimizer:
            return
        model = initial_model(recipe, "cpu" if own else "meta")
        if own:
            _try_minibatch(recipe, model, make_dataset(recipe.dataset))
        if tries_optimizer:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            try_optimizer(recipe.train.optimizer, trained)


def _try_schedule(recipe: Recipe) -> None:
    """Ask for the rate at the end of training: a scheduler of torch's gets there step by step."""
    if recipe.train.schedule.name in KINDS[SCHEDULE].ours:
        return
    train, num_train = recipe.train, make_dataset(recipe.dataset).num_train
    rate_of_samples(train, num_train)(train.max_epochs * num_train - 1)


def _try_minibatch(recipe: Recipe, model: torch.nn.Module, dataset: Dataset) -> None:
    model_name, data_name = (section.get("target") or section["name"] for section in (recipe.model, recipe.dataset))
    data_key = "dataset" if recipe.dataset.get("target") is None else "dataset.target"
    model_key = data_key if recipe.model.get("target") is None else "model.target"
    loss_key = "dataset.loss" if "loss" in recipe.dataset else data_key
    metrics_key = "dataset.metrics" if "metrics" in recipe.dataset else data_key
    count = min(_SAMPLES, recipe.train.minibatch_size, dataset.num_train)
    with users_code(f"{data_name} gives no minibatch", data_key):
        fields = dataset.fetch("train", range(count), [*dataset.inputs, *dataset.targets])
    positional, named = dataset.arguments(fields)
    with users_code(f"{model_name} fails on {count} samples of {data_name}", model_key):
        output = model.train()(*positional, **named)
    targets = {name: fields[name] for name in dataset.targets}
    with users_code(f"the loss of {data_name} doesn't suit the output of {model_name}", loss_key):
        total = dataset.loss(output, targets)
        _check_sum("the loss", lambda o, t: dataset.loss(o, t), output, targets, total, loss_key)
        if not total.requires_grad and any(parameter.requires_grad for parameter in model.parameters()):
            raise UserCodeError("the loss has no gradient: nothing in it depends on the model's parameters", loss_key)
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]
    with users_code(f"a metric of {data_name} doesn't suit the output of {model_name}", metrics_key):
        detached = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output)
        for name, value in dataset.score(detached, targets).items():
            key = f"dataset.metrics.{name}" if "metrics" in recipe.dataset else data_key
            if value.dim() or not math.isfinite(float(value)):
                raise UserCodeError(f"{name} of {count} samples is {float(value.sum()):g}, needed is a number", key)
            _check_sum(name, lambda o, t, name=name: dataset.score(o, t)[name], detached, targets, value, key)  # type: ignore[misc]


def _check_sum(
    what: str,
    measure: Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor],
    output: Any,
    targets: Mapping[str, torch.Tensor],
    total: torch.Tensor,
    key: str,
) -> None:
    """Refuse what grows with the number of samples twice: a sum over samples where their mean is asked for."""
    count = next(iter(targets.values())).shape[0]

    def sample(value: Any, index: int) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor[index : index + 1], value)

    try:
        with torch.no_grad():
            singles = sum(float(measure(sample(output, i), sample(dict(targets), i))) for i in range(count))
    except Exception:  # not every loss can do with a single sample
        return
    whole = float(total.detach())
    if count > 1 and whole and math.isclose(whole, count * singles, rel_tol=1e-4):
        raise UserCodeError(
            f"{what} of {count} samples is the sum of each one's, needed is their mean, or a tensor of one number per "
            "sample",
            key,
        )
