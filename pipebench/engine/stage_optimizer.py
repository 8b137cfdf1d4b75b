"""The optimizer of a stage replica: steps on one version of the weights after another, and loads a checkpoint's state.

Momentum and Adam's averages exist once. They follow the parameters from version to version.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from pipebench.errors import UserCodeError
from pipebench.model.memory_format import laid_out_as
from pipebench.model.optimizer import GroupRates, is_known


class StageOptimizer:
    """Steps with a torch.optim optimizer, whose parameters may be replaced by those of another version."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.state_bytes = 0  # of the optimizer's state, as of the latest step
        self._rates = GroupRates(optimizer)  # a user's parameter groups keep the ratios of their rates
        self._is_known = is_known(optimizer)
        self._some_are_fresh = False  # whether the optimizer has stepped on some parameters, and never on others

    def step(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], lr: float) -> None:
        """Step on the optimizer's parameters; a gradient of None leaves its parameter unchanged.

        Raises:
            UserCodeError: an optimizer of the user's own changes the rates of its parameter groups.
        """
        if not self._is_known:
            # Replicas in one process share a sum of gradients, which a user's own step may change.
            gradients = [None if gradient is None else gradient.clone() for gradient in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self._rates.set(lr)
        if self._some_are_fresh:
            self._step_apart(parameters)
        else:
            self.optimizer.step()
        if self._rates.have_changed():
            raise UserCodeError(
                "its step changes the rates of its parameter groups, which every update sets anew: leave them to "
                "train.schedule, where a target can be of your own",
                "train.optimizer.target",
            )
        for parameter in parameters:
            parameter.grad = None
        self._count_state()

    def _step_apart(self, parameters: Sequence[torch.Tensor]) -> None:
        """Step first on parameters that the optimizer has never stepped on, then on the others.

        torch's fused SGD requires that all parameters have momentum, or none.
        """
        state = self.optimizer.state
        gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        fresh = {id(p) for p, _ in gradients if not state.get(p)}
        for turn in (True, False):
            for parameter, gradient in gradients:
                parameter.grad = gradient if (id(parameter) in fresh) is turn else None
            self.optimizer.step()
        self._some_are_fresh = any(not state.get(p) for p in parameters)

    def move(self, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
        """Step on other tensors from now on: `new` take the places, and the optimizer's state, of `old`."""
        state = self.optimizer.state
        for before, after in zip(old, new, strict=True):
            if before in state:
                state[after] = state.pop(before)
        moved = {id(before): after for before, after in zip(old, new, strict=True)}
        for group in self.optimizer.param_groups:
            group["params"] = [moved[id(parameter)] for parameter in group["params"]]

    def restore(self, parameters: Mapping[str, torch.Tensor], states: Mapping[str, Mapping[str, Any]]) -> None:
        """Load a checkpoint's states, by the name of the parameter; `parameters` are the optimizer's, by name."""
        names = {id(parameter): name for name, parameter in parameters.items()}
        order = [p for group in self.optimizer.param_groups for p in group["params"]]
        given = {i: states[names[id(p)]] for i, p in enumerate(order) if names[id(p)] in states}
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": given})
        # torch's `load_state_dict` chooses the device of every tensor. But it rounds states to the parameter's type and
        # leaves a counter of steps where it is, so the values are set again.
        steps_on_cpu = not any(self.optimizer.defaults.get(name) for name in ("fused", "capturable"))
        for index, state in given.items():
            parameter = order[index]
            loaded = self.optimizer.state[parameter]
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    device = "cpu" if key == "step" and steps_on_cpu else loaded[key].device
                    own = value.to(device, copy=True)
                    (loaded[key],) = laid_out_as([own], [parameter]) if own.shape == parameter.shape else [own]
                else:  # a list, say, of tensors: copied, since replicas in one process load the same ones
                    copy = functools.partial(torch.Tensor.to, device=parameter.device, copy=True)
                    loaded[key] = tree_map_only(torch.Tensor, copy, value)
        self._some_are_fresh = isinstance(self.optimizer, torch.optim.SGD) and 0 < len(given) < len(order)
        self._count_state()

    def _count_state(self) -> None:
        states = self.optimizer.state.values()
        self.state_bytes = sum(v.nbytes for state in states for v in state.values() if isinstance(v, torch.Tensor))
