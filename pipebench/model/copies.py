"""Copies of modules and tensors that keep what `deepcopy` loses or refuses."""

import copy
from typing import Any, TypeVar

import torch
from torch import nn

_Part = TypeVar("_Part")


def copied(part: _Part, memo: dict[int, Any] | None = None) -> _Part:
    """Return a copy of a module or a tensor, with the attributes of its parameters; `memo` is `deepcopy`'s.

    Tensors that a forward has left in a module, as torch's `weight_norm` does, lose their autograd graph, with which
    they couldn't be copied.
    """
    for module in part.modules() if isinstance(part, nn.Module) else ():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                vars(module)[name] = value.detach()
    made = copy.deepcopy(part, memo)
    for own, new in zip(_parameters_of(part), _parameters_of(made), strict=True):
        vars(new).update(vars(own))
    return made


def copied_to(module: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a module on another device; tensors that its modules share stay shared.

    `Module.to` would give every module a copy of its own of a shared buffer.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.detach().to(device)
    return copied(module, memo)


def _parameters_of(part: Any) -> list[nn.Parameter]:
    if isinstance(part, nn.Module):
        return list(part.parameters())
    return [part] if isinstance(part, nn.Parameter) else []
