"""Asynchronous data parallelism as a plain loop over a given order of pushes; shares no code with the engine.

Paper: ASP as in PipeDream (SOSP'19) section 2.1. Every worker has a copy of the weights, at first the same. Minibatch k
is worker k mod N's. Its gradient is computed at that worker's copy and applied to the server's weights and optimizer
state; then the worker copies the server's weights.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.func import functional_call

from tests.oracles.staleness import Parameters, Step


class Replayed(NamedTuple):
    """The result of an order of pushes."""

    weights: Parameters  # the server's
    staleness: list[int]  # of every push: the number of other pushes since its worker copied the weights


def train(
    model: torch.nn.Module,
    loss_sum: Callable[[torch.Tensor, int], torch.Tensor],
    inputs: Callable[[int], torch.Tensor],
    weight: Callable[[int], float],
    segments: Sequence[Sequence[int]],
    num_workers: int,
    step: Step,
    lr: float,
    clip_norm: float | None = None,
) -> Replayed:
    """Train in segments, given as orders of pushes; after each, all workers copy the server's weights.

    Args:
        model: with the initial weights.
        loss_sum: the summed loss of (output, minibatch).
        inputs: of a minibatch.
        weight: of a minibatch, by which its summed loss is divided.
        segments: minibatches in the order of their pushes, counted from each segment's first one.
        num_workers: N.
        step: the optimizer.
        lr: learning rate.
        clip_norm: largest norm of a minibatch's gradient, if any.
    """
    server = {name: p.detach().clone() for name, p in model.named_parameters()}
    states: dict[str, Parameters] = {name: {} for name in server}
    made, first, staleness = 0, 0, list[int]()
    for order in segments:
        copies = [dict(server) for _ in range(num_workers)]
        copied_at = [made] * num_workers
        for k in order:
            worker = k % num_workers
            parameters = {name: p.clone().requires_grad_() for name, p in copies[worker].items()}
            loss = loss_sum(functional_call(model, parameters, (inputs(first + k),)), first + k) / weight(first + k)
            found = torch.autograd.grad(loss, list(parameters.values()))
            if clip_norm is not None:
                norm = torch.stack([g.square().sum() for g in found]).sum().sqrt()
                found = tuple(g * min(1.0, clip_norm / (float(norm) + 1e-6)) for g in found)
            staleness.append(made - copied_at[worker])
            made += 1
            for name, gradient in zip(parameters, found, strict=True):
                server[name], states[name] = step(server[name], gradient, states[name], lr, made)
            copies[worker], copied_at[worker] = dict(server), made
        first += len(order)
    return Replayed(server, staleness)
