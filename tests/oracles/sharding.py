"""Sharded data parallelism: a plain loop, and the formulas of ZeRO (SC'20); shares no code with the engine."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction

import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


def trained(
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    updates: Iterable[Sequence[Sequence[Batch]]],
) -> dict[str, torch.Tensor]:
    """Train a model in place and return its parameters; gradients are added in the order of replicas.

    Args:
        model: the model.
        make_optimizer: makes the optimizer.
        loss: summed over samples; an update's gradient is divided by the number of its samples.
        updates: of every update, the minibatches of every replica.
    """
    parameters = list(model.parameters())
    optimizer = make_optimizer(parameters)
    for replicas in updates:
        samples = sum(len(x) for batches in replicas for x, _ in batches)
        total = [torch.zeros_like(p) for p in parameters]
        for number, batches in enumerate(replicas):
            model.zero_grad()
            for x, target in batches:
                (loss(model(x), target) / samples).backward()  # type: ignore[no-untyped-call]
            own = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            total = own if number == 0 else [a + b for a, b in zip(total, own, strict=True)]
        for parameter, gradient in zip(parameters, total, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def sent_bytes(shard: str, parameter_bytes: int, replicas: int) -> int:
    """Return the bytes that all replicas send per step (section 7).

    Each sends (1 - 1/N) times 2 Psi with sharded optimizer state or gradients, 3 Psi with sharded parameters.
    """
    volume = {"optimizer": 2, "gradients": 2, "parameters": 3}[shard]
    found = replicas * volume * parameter_bytes * (1 - Fraction(1, replicas))
    assert found.denominator == 1
    return int(found)


def state_bytes(formula: str, parameters: float, replicas: int, k: int = 12) -> float:
    """Return the bytes of model states on a device by the formula of figure 1, as published."""
    names: Mapping[str, float] = {"P": parameters, "N": replicas, "K": k}
    text = formula.replace("(2 + 2 + K) P", "(2 + 2 + K) * P").replace("(2 + K) P", "(2 + K) * P")
    return float(eval(text.replace("2P", "2 * P").replace("K P", "K * P"), {"__builtins__": {}}, dict(names)))
