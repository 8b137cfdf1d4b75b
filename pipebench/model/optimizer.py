"""Makes the recipe's optimizer, and answers questions about it, for engines and profiles."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch

from pipebench.errors import UserCodeError
from pipebench.model.without_compiler import without_compiler
from pipebench.recipe.named import KINDS, OPTIMIZER, given_arguments
from pipebench.recipe.schema import OptimizerRecipe
from pipebench.recipe.targets import import_target
from pipebench.recipe.users_code import users_code

MakeOptimizer = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]

_SIDE = 64  # rows and columns of the matrix on which an optimizer's state is counted
FUSED = ("sgd", "adam", "adamw")  # made with `fused=True`: a step is one pass over the parameters
_ELEMENTWISE = (
    *FUSED, "adadelta", "adagrad", "adamax", "nadam", "radam", "rmsprop", "rprop",
)  # fmt: skip
_EXCLUDE_FUSED = ("foreach", "fused", "differentiable")  # options with which a recipe chooses the implementation itself


def make_optimizer(recipe: OptimizerRecipe, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """Return a recipe's optimizer of `parameters`; raises a UserCodeError if its class or target doesn't return one."""
    made = KINDS[OPTIMIZER].make(str(recipe.name)) if recipe.target is None else import_target(recipe.target)
    arguments = given_arguments(recipe)
    are_real = all(parameter.is_floating_point() for parameter in parameters)
    if recipe.name in FUSED and are_real and not any(name in arguments for name in _EXCLUDE_FUSED):
        arguments["fused"] = True
    with users_code(f"{called(recipe)} can't make the optimizer", key_of(recipe)):
        optimizer = made(list(parameters), lr=recipe.lr, **arguments)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserCodeError(
            f"{called(recipe)} returned {type(optimizer).__name__}, needed is a torch.optim.Optimizer", key_of(recipe)
        )
    if not hasattr(optimizer, "defaults") or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise UserCodeError(
            f"{called(recipe)} makes a {type(optimizer).__name__} without torch.optim.Optimizer.__init__, which its "
            "steps and its state in a checkpoint need: call super().__init__(params, defaults)",
            key_of(recipe),
        )
    # `GroupRates` relates the groups' rates to this one. A target may have left the class's own default there.
    optimizer.defaults["lr"] = recipe.lr
    _step_without_compiler(optimizer)
    return optimizer


def _step_without_compiler(optimizer: torch.optim.Optimizer) -> None:
    """Let the step of one of torch's optimizers run without importing torch's compiler.

    torch imports it to exclude a step from compiled graphs, but steps here are never compiled. The step keeps its hooks
    and the profiler's record.
    """
    made = type(optimizer)
    if made.__module__.startswith("torch.optim.") and not optimizer.defaults.get("differentiable"):
        step = optimizer.profile_hook_step(torch.no_grad()(inspect.unwrap(made.step)))
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


# The same for making, saving and loading an optimizer.
without_compiler(
    getattr(torch.optim.Optimizer, name) for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad")
)


class GroupRates:
    """The learning rates of an optimizer's parameter groups, in the ratios that they had when it was made."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer  # loading a state replaces its groups, so they are looked up at every use
        whole = optimizer.defaults.get("lr")
        self._shares = [_share(group.get("lr"), whole) for group in optimizer.param_groups]
        self._were_set: list[tuple[Any, float]] = []  # each group's rate, a float or a tensor, and its mark

    def set(self, lr: float) -> None:
        """Set the rates of an update, `lr` being that of a group without a rate of its own.

        A rate that is a tensor is filled, as torch's schedulers do: a step's rounding depends on the rate's type, and a
        step may call a tensor's methods on it.
        """
        for group, share in zip(self._optimizer.param_groups, self._shares, strict=True):
            if isinstance(group.get("lr"), torch.Tensor):
                group["lr"].fill_(lr * share)
            else:
                group["lr"] = lr * share
        self._were_set = [(group["lr"], _mark(group["lr"])) for group in self._optimizer.param_groups]

    def have_changed(self) -> bool:
        """Return whether a step has set other rates since."""
        were_set = zip(self._optimizer.param_groups, self._were_set, strict=True)
        return any(group["lr"] is not rate or _mark(rate) != mark for group, (rate, mark) in were_set)


def _mark(rate: float | torch.Tensor) -> float:
    """Return a number that differs after a rate has changed: its value, or the count of writes into a GPU's tensor.

    The host would wait for the GPU at every update to read the tensor's value.
    """
    return float(rate._version if isinstance(rate, torch.Tensor) and rate.is_cuda else rate)


def _share(rate: float | torch.Tensor | None, whole: float | None) -> float:
    """Return a group's rate as a multiple of the optimizer's, `whole`, both rounded to the type of the group's rate."""
    if rate is None or not whole:
        return 1.0
    return float(rate) / float(rate.new_tensor(float(whole)) if isinstance(rate, torch.Tensor) else whole)


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step runs only code of torch's or pipebench's: no class and no hook of the user's own."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return type(optimizer).__module__.startswith(("torch.optim", "pipebench.")) and not hooks


def is_elementwise(recipe: OptimizerRecipe) -> bool:
    """Return whether an optimizer steps on every element by itself, so that pieces of a parameter can be stepped on.

    Others, such as LARS, LAMB and Adafactor, adapt steps to whole tensors. Of a target nothing is known.
    """
    name = None if recipe.name is None else KINDS[OPTIMIZER].find(recipe.name)
    return name in _ELEMENTWISE


def knows_slices(recipe: OptimizerRecipe) -> bool:
    """Return whether an optimizer adapts steps to the norms of whole tensors even where it has slices of them."""
    return recipe.name is not None and KINDS[OPTIMIZER].find(recipe.name) in ("lars", "lamb")


def called(recipe: OptimizerRecipe) -> str:
    """Return the optimizer's name or target, for messages."""
    return str(recipe.name if recipe.target is None else recipe.target)


def key_of(recipe: OptimizerRecipe) -> str:
    """Return the recipe's key that names the optimizer."""
    return f"train.optimizer.{'name' if recipe.target is None else 'target'}"


def average_in(state: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the average of a parameter's values that an optimizer's state has for evaluations, or None.

    It is `ax` of torch's ASGD: equal to the parameter until averaging begins, and never read by training.
    """
    return state.get("ax")


def keeps_averages(recipe: OptimizerRecipe) -> bool:
    """Return whether an optimizer averages parameters for evaluations; raises as `state_bytes_per_byte` does."""
    _, states = _after_a_step(recipe)
    return any(average_in(state) is not None for state in states)


def state_bytes_per_byte(recipe: OptimizerRecipe) -> int:
    """Return the bytes of optimizer state per byte of parameters, by a step on a matrix: 1 for momentum, 2 for Adam.

    Raises:
        UserCodeError: the class or target raises, or doesn't return an optimizer.
    """
    parameter, states = _after_a_step(recipe)
    tensors = (v for state in states for v in state.values() if isinstance(v, torch.Tensor))
    return round(sum(tensor.nbytes for tensor in tensors) / parameter.nbytes)


def _after_a_step(recipe: OptimizerRecipe) -> tuple[torch.Tensor, list[Mapping[str, Any]]]:
    """Return a matrix and the optimizer's states after one step on it."""
    parameter = torch.zeros(_SIDE, _SIDE, requires_grad=True)
    optimizer = make_optimizer(recipe, [parameter])
    parameter.grad = torch.ones_like(parameter)
    with users_code(f"{called(recipe)} can't take a step", key_of(recipe)):
        optimizer.step()
    return parameter, [*optimizer.state.values()]
