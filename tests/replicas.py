"""Makes replicas of a model's stages without an engine, and runs units through all of them."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from pipebench.engine.replica import Replica, UnitInput
from pipebench.model.graph import trace
from pipebench.model.plan import make_plan
from pipebench.model.stage import cut_stage

Unit = tuple[torch.Tensor, torch.Tensor]


def replicas_of(model: nn.Module, starts: Sequence[int], memory: str | Sequence[str]) -> list[Replica]:
    """Return one replica of every stage of a model; `memory` is a policy, or one per layer."""
    graph = trace(model)
    plan = make_plan(graph, starts, [1] * (len(starts) + 1), memory=memory)
    stages = (cut_stage(graph, plan, index) for index in range(len(plan.stages)))
    return [Replica(s, lambda p: torch.optim.SGD(p, 0.1), device=torch.device("cpu"), seed=0) for s in stages]


def run(replicas: Sequence[Replica], units: Sequence[Unit], *, late: bool = False) -> dict[str, torch.Tensor]:
    """Run units forward through all stages, then backward; return gradients and buffers.

    Units are swapped out after their forward. With `late` they aren't swapped in before the backward needs them.
    """
    for unit, (x, target) in enumerate(units):
        values: dict[int, object] = {}
        for replica in replicas:
            stage = replica.stage
            received = {layer: values[layer] for layers in stage.receives.values() for layer in layers}
            loss = (lambda o, t=target: functional.cross_entropy(o, t)) if stage.is_last else None
            out, _ = replica.forward(UnitInput(unit, (unit, 0), [x for _ in stage.inputs], received, 0, loss=loss))
            values |= out
            if stage.swapped:
                replica.swap_out(unit)
    for unit in reversed(range(len(units))):
        gradients: dict[int, list[torch.Tensor]] = {}
        for replica in reversed(replicas):
            if replica.stage.swapped and not late:
                replica.swap_in(unit)
            for layer, own in replica.backward(unit, gradients).items():
                known = gradients.get(layer)
                gradients[layer] = own if known is None else [a + b for a, b in zip(known, own, strict=True)]
    found: dict[str, torch.Tensor] = {}
    for replica in replicas:
        found |= {n: g for n, g in zip(replica.weights.names, replica.gradients, strict=True) if g is not None}
        found |= dict(replica.module.named_buffers())
    return found
