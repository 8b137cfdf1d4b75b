"""Converts a recipe with resolved keys, and its plan, to the arguments of the plain loop."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pipebench.recipe.schema import OptimizerRecipe, PeriodRecipe, Recipe
from tests.oracles import large_batch
from tests.oracles.draws import Order
from tests.oracles.meaning import Meaning
from tests.oracles.rates import Rates
from tests.random_recipes.nets import Rows, first_layers

FUSED = ("sgd", "adam", "adamw")  # optimizers with a fused implementation, as in docs/optimizers.md


class ByRule(torch.optim.Optimizer):
    """An optimizer that updates tensor by tensor with a rule of `tests.oracles.large_batch`."""

    def __init__(self, parameters: Sequence[nn.Parameter], rule: Any) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self._rule, self._made = large_batch.of_tensors(rule), 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._made += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    made, state = self._rule(p, p.grad, self.state.get(p, {}), group["lr"], self._made)
                    p.data.copy_(made)
                    self.state[p] = state


def make_optimizer(recipe: OptimizerRecipe, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that a recipe names."""
    keys = {key: getattr(recipe, key) for key in ("momentum", "weight_decay", "betas", "eps")}
    given = {key: value for key, value in keys.items() if value is not None} | dict(recipe.arguments)
    name = str(recipe.name)
    if name in ("lars", "lamb"):
        renamed = {"decay": given.pop("weight_decay", 0.0), "exclude_vectors": given.pop("exclude_vectors", True)}
        if name == "lamb":
            renamed["b1"], renamed["b2"] = given.pop("betas")
        return ByRule(parameters, getattr(large_batch, name)(**renamed, **given))
    made = next(each for key, each in vars(torch.optim).items() if key.lower() == name.replace("_", ""))
    if name in FUSED:
        given["fused"] = True
    return made(parameters, lr=recipe.lr, **given)


def meaning_of(
    recipe: Recipe, dataset: Rows, replicas: Sequence[int], stage_of: Mapping[str, int], pushes: Sequence[Sequence[int]]
) -> Meaning:
    """Return the arguments of the plain loop.

    Args:
        recipe: with all keys resolved.
        dataset: the recipe's.
        replicas: of every stage, as planned.
        stage_of: the stage of every parameter and buffer, as planned.
        pushes: of asynchronous runs, the order of pushes of every segment.
    """
    train, asked = recipe.train, recipe.parallelism
    row, order = asked.row, Order(dataset.num_train, train.minibatch_size, train.seed, dataset.buckets())
    workers = replicas[: len(replicas) // row.chunks]
    depth = row.depth or (math.ceil(sum(workers) / workers[0]) if asked.depth == "auto" else int(asked.depth))

    def minibatches(every: PeriodRecipe) -> int:
        return every.minibatches or (every.epochs or 1) * order.per_epoch

    return Meaning(
        seed=train.seed,
        order=order,
        total=train.max_epochs * order.per_epoch,
        periods=(minibatches(train.evaluate_every), minibatches(train.checkpoint_every or train.evaluate_every)),
        stage_of=stage_of,
        starts=[[*first_layers(recipe.model["steps"]), "head"].index(cut) for cut in asked.cuts or ()],
        replicas=tuple(replicas),
        depth=depth,
        flushes=row.flush,
        policy=row.weights,
        microbatches=asked.microbatches if row.microbatches else 1,
        accumulate=depth if row.accumulate is None else row.accumulate,
        asynchronous=row.sync == "asynchronous",
        recompute=row.recompute,
        make_optimizer=lambda parameters: make_optimizer(train.optimizer, parameters),
        rates=rates_of(recipe, order),
        scaling=train.optimizer.lr_scaling,
        clip_norm=train.optimizer.clip_norm,
        decay=asked.correction_decay or 0.135,
        pushes=pushes,
    )


def rates_of(recipe: Recipe, order: Order) -> Rates:
    train, schedule, annealing = recipe.train, recipe.train.schedule, 0.0
    if recipe.parallelism.row.weights == "correct":
        thumb = 5 * schedule.warmup_epochs or (schedule.every_epochs or train.max_epochs) / 4
        given = recipe.parallelism.annealing_epochs
        annealing = (thumb if given is None else given) * order.num_samples
    keys = {key: getattr(schedule, key) for key in ("every_epochs", "factor", "power")}
    every = schedule.step_every or PeriodRecipe(epochs=1)
    name = str(schedule.name)
    classes = {key.lower(): key for key in vars(torch.optim.lr_scheduler)}
    return Rates(
        lr=train.optimizer.lr,
        name=classes.get(name.replace("_", ""), name),
        arguments={key: value for key, value in keys.items() if value is not None} | dict(schedule.arguments),
        step_every=every.minibatches or (every.epochs or 1) * order.per_epoch,
        warmup=schedule.warmup_epochs * order.num_samples,
        total=train.max_epochs * order.num_samples,
        num_train=order.num_samples,
        size=train.minibatch_size,
        annealing=annealing,
    )
