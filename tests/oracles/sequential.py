"""A plain training loop, which every mode without staleness has to equal; shares no code with the engine."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    updates: Iterable[Sequence[tuple[tuple[torch.Tensor, ...], Any]]],
    loss_sum: Callable[[Any, Any], torch.Tensor],
    weight: Callable[[Any], float],
    clip_norm: float | None = None,
) -> list[float]:
    """Train a module in place.

    Args:
        model: the module.
        optimizer: of its parameters.
        updates: inputs and targets of the minibatches of every update, whose mean gradient it uses.
        loss_sum: the summed loss of (output, targets).
        weight: of targets; the summed loss of an update is divided by the sum of its weights.
        clip_norm: largest norm of the gradient, if any.

    Returns:
        The mean loss of every update.
    """
    model.train()
    means = []
    for minibatches in updates:
        total = sum(weight(targets) for _, targets in minibatches)
        optimizer.zero_grad()
        mean = 0.0
        for inputs, targets in minibatches:
            loss = loss_sum(model(*inputs), targets) / total
            loss.backward()  # type: ignore[no-untyped-call]
            mean += loss.item()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        means.append(mean)
    return means
