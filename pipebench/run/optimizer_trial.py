"""Does an optimizer train stages? A trial on small parameters, before anything runs.

A stage's optimizer sees the stage's parameters only, steps without a closure, and finds its parameters in another
buffer after every update that minibatches in flight keep from happening in place. Whatever comes of that must be what a
plain loop over the whole model comes to.
"""

import copy
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from pipebench.engine.weights import Weights
from pipebench.errors import UserCodeError
from pipebench.model.optimizer import called, key_of, make_optimizer
from pipebench.recipe.schema import OptimizerRecipe
from pipebench.recipe.users_code import users_code

_STEPS = 5
_RESTORED_AT = 3  # after so many, the moving one goes on from its state in another, as from a checkpoint
_LARGEST_SIDE, _MOST_SHAPES = 3, 8


def try_optimizer(recipe: OptimizerRecipe, parameters: Sequence[torch.Tensor]) -> None:
    """Train small parameters of the same numbers of dimensions in three ways that must agree.

    Args:
        recipe: with a target, or the name of a class.
        parameters: those of the whole model that are trained.

    Raises:
        UserCodeError: it fails, or the ways disagree.
    """
    shapes = dict.fromkeys(tuple(min(side, _LARGEST_SIDE) for side in parameter.shape) for parameter in parameters)
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in list(shapes)[:_MOST_SHAPES] for _ in range(2)]
    gradients = [[torch.randn(p.shape, generator=generator) for p in start] for _ in range(_STEPS)]
    rates = [recipe.lr * factor for factor in (1.0, 1.0, 0.5, 0.25, 0.5)]
    name, key = called(recipe), key_of(recipe)
    with users_code(f"{name} can't take a step of a stage", key):
        together = _trained(recipe, start, gradients, rates)
        apart = [_trained(recipe, [p], [[step[i]] for step in gradients], rates)[0] for i, p in enumerate(start)]
        moving = _trained(recipe, start, gradients, rates, moving=True)
    if not _agree(together, apart):
        raise UserCodeError(
            f"{name} updates a parameter otherwise without the others; a stage has some of them, so the plan "
            "would change what is learnt",
            key,
        )
    if not _agree(together, moving):
        raise UserCodeError(
            f"{name} comes to other weights when its parameters are moved or its state is taken up from a "
            "checkpoint; what it knows of a parameter has to be in its state",
            key,
        )


def _trained(
    recipe: OptimizerRecipe,
    start: Sequence[torch.Tensor],
    gradients: Sequence[Sequence[torch.Tensor]],
    rates: Sequence[float],
    *,
    moving: bool = False,
) -> list[torch.Tensor]:
    """Train in place; or moving, with two minibatches in flight, so that every update writes into another buffer."""
    weights = Weights(_module(start), partial(make_optimizer, recipe))
    held: list[int] = []
    for num_done, (step, lr) in enumerate(zip(gradients, rates, strict=True), 1):
        if moving:
            held.append(weights.newest.number)
            weights.use(held[-1])
        weights.update([gradient.clone() for gradient in step], lr, keep_from=weights.newest.number + 1)
        if len(held) > 1:
            weights.release(held.pop(0))
        if moving and num_done == _RESTORED_AT:
            kept = copy.deepcopy(weights.optimizer_state())
            values = {
                name: p.detach().clone() for name, p in zip(weights.names, weights.newest.parameters, strict=True)
            }
            weights, held = Weights(_module(start), partial(make_optimizer, recipe)), []
            weights.restore(values, kept)
    return [parameter.detach() for parameter in weights.newest.parameters]


def _module(parameters: Sequence[torch.Tensor]) -> nn.Module:
    return nn.ParameterList([nn.Parameter(parameter.detach().clone()) for parameter in parameters])


def _agree(these: Sequence[torch.Tensor], those: Sequence[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True) for a, b in zip(these, those, strict=True))
