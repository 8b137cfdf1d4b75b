"""The recipe's optimizer as a torch.optim one: one definition for the engine that steps and the profile that times."""

from collections.abc import Sequence

import torch

from pipebench.recipe.schema import OptimizerRecipe


def make_optimizer(recipe: OptimizerRecipe, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer for a list of parameters; fused, so that a step is one pass over them."""
    if recipe.name == "adam":
        beta1, beta2 = recipe.betas
        return torch.optim.Adam(parameters, recipe.lr, (beta1, beta2), recipe.eps, recipe.weight_decay, fused=True)
    return torch.optim.SGD(parameters, recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay, fused=True)


def state_bytes_per_byte(recipe: OptimizerRecipe) -> int:
    """Return the bytes of optimizer state per byte of parameters: Adam keeps two averages, momentum one."""
    return 2 if recipe.name == "adam" else int(bool(recipe.momentum))
