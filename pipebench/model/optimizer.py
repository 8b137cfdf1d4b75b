"""The recipe's optimizer as a torch.optim one: one definition for the engine that steps and the profile that times."""

from collections.abc import Callable, Sequence

import torch

from pipebench.errors import UserCodeError
from pipebench.recipe.options import given_arguments
from pipebench.recipe.schema import OptimizerRecipe
from pipebench.recipe.targets import import_target
from pipebench.recipe.users_code import users_code

MakeOptimizer = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]

_SIDE = 64  # of the matrix on which a target's state is counted


def make_optimizer(recipe: OptimizerRecipe, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer for a list of parameters; those with a name are fused: a step is one pass over them.

    Raises:
        UserCodeError: a target raises, or makes something else.
    """
    if recipe.target is not None:
        return _own(recipe, recipe.target, parameters)
    betas, eps, decay = tuple(recipe.betas or ()), recipe.eps or 0.0, recipe.weight_decay or 0.0
    if recipe.name == "adam":
        return torch.optim.Adam(parameters, recipe.lr, betas, eps, decay, fused=True)  # type: ignore[arg-type]
    if recipe.name == "adamw":
        return torch.optim.AdamW(parameters, recipe.lr, betas, eps, decay, fused=True)  # type: ignore[arg-type]
    return torch.optim.SGD(parameters, recipe.lr, recipe.momentum or 0.0, weight_decay=decay, fused=True)


def state_bytes_per_byte(recipe: OptimizerRecipe) -> int:
    """Return the bytes of optimizer state per byte of parameters: Adam keeps two averages, momentum one.

    A target's are counted on a matrix, after a step.

    Raises:
        UserCodeError: a target raises, or makes something else.
    """
    if recipe.target is None:
        return 2 if recipe.name in ("adam", "adamw") else int(bool(recipe.momentum))
    parameter = torch.zeros(_SIDE, _SIDE, requires_grad=True)
    optimizer = make_optimizer(recipe, [parameter])
    parameter.grad = torch.ones_like(parameter)
    with users_code(f"{recipe.target} can't take a step", "train.optimizer.target"):
        optimizer.step()
    tensors = (v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor))
    return round(sum(tensor.nbytes for tensor in tensors) / parameter.nbytes)


def _own(recipe: OptimizerRecipe, target: str, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    make = import_target(target)
    with users_code(f"{target} can't make the optimizer", "train.optimizer.target"):
        made = make(list(parameters), lr=recipe.lr, **given_arguments(recipe))
    if not isinstance(made, torch.optim.Optimizer):
        raise UserCodeError(
            f"{target} returned {type(made).__name__}, needed is a torch.optim.Optimizer",
            "train.optimizer.target",
        )
    return made
