"""Backwards in two parts (zero-bubble): gradients of a stage's inputs first, to send them early; of its weights later.

Every splittable layer has a small autograd graph of its own. The stage's graph uses it in the first part, to compute
the gradient of the layer's input, and is then freed. The layer's own graph and the gradient of its output remain for
the second part. Layers that can't be split run their whole backward in the first part.

A recomputed layer has its own graph only after recomputation, right before the first part.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from pipebench.model.recompute import AGAIN, FIRST, ONCE, running
from pipebench.model.splitting import splittable
from pipebench.model.stage import Stage

Forward = Callable[[torch.Tensor], torch.Tensor]


class _Own(NamedTuple):
    """A layer's own graph."""

    edge: GradientEdge  # where the gradient of its output enters
    input: GradientEdge | None  # where the gradient of its input leaves; None if the input needs none
    saved: torch.Tensor  # its input


class Rest(NamedTuple):
    """What is left of a layer's backward after the first part: the gradients of its weights."""

    edge: GradientEdge  # where the gradient of its output enters its own graph
    gradient: torch.Tensor  # of its output
    saved: torch.Tensor  # its input


class SplitBackward:
    """Gives splittable layers of a stage graphs of their own, and collects what is left for the second part.

    The layers of `stage` get another `forward`.
    """

    def __init__(self, stage: Stage, device: torch.device) -> None:
        self.rests: list[Rest] = []  # of the first part that runs
        self.recomputed: dict[int, _Own] = {}  # own graphs of recomputed layers, by number
        self.numbers = itertools.count()  # of recomputations
        # An input of every split layer that requires grad: autograd would skip a first layer, whose input needs none.
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        graphs = (stage.module, *(each.run for each in stage.recomputed))
        parts = (module.get_submodule(name) for module in graphs for name in splittable(module, module.graph))
        for part in dict.fromkeys(parts):  # some are called repeatedly
            part.forward = partial(self._forward, part.forward)

    def backward_input(
        self, results: Sequence[GradientEdge], heads: Sequence[torch.Tensor | None], wanted: Sequence[torch.Tensor]
    ) -> list[Rest]:
        """Run the first part of a backward; return what is left for the second.

        Args:
            results: where gradients enter the stage's graph.
            heads: the gradients of `results`; None stands for 1.
            wanted: leaves; gradients that this part computes are added to their `grad`.
        """
        torch.autograd.backward(results, heads, inputs=[*wanted, self._anchor])
        rests, self.rests = self.rests, []
        return rests

    def _forward(self, forward: Forward, value: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return forward(value)
        result: torch.Tensor = _Split.apply(self._anchor, value, self, forward)
        return result


def backward_weight(rests: Sequence[Rest], parameters: Sequence[torch.Tensor]) -> None:
    """Run the second part of a backward: add to the `grad` of the parameters, and free the layers' own graphs."""
    if rests and parameters:
        edges, gradients = [rest.edge for rest in rests], [rest.gradient for rest in rests]
        torch.autograd.backward(edges, gradients, inputs=list(parameters))


def saved_bytes(rests: Sequence[Rest]) -> int:
    """Return the bytes saved for the second part; shared storages count once."""
    storages = (tensor.untyped_storage() for rest in rests for tensor in (rest.gradient, rest.saved))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class _Split(torch.autograd.Function):
    """A layer in the stage's graph, whose backward computes the gradient of its input only."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, value: torch.Tensor, split: SplitBackward, forward: Forward
    ) -> torch.Tensor:
        """Run a layer outside the stage's graph; `anchor` makes autograd always reach this node.

        A recomputed layer runs twice. Autograd takes nothing but saved tensors from the second run, so its own graph is
        found by a number in a saved tensor.
        """
        ctx.split, ctx.own = split, None
        time = running.get()
        if time == FIRST:
            ctx.save_for_backward(torch.tensor(-1))  # the second run saves its number in this place
            return forward(value)
        own, result = _run(forward, value.detach().requires_grad_(ctx.needs_input_grad[1]), time)
        if time == ONCE:
            ctx.own = own
        else:
            number = next(split.numbers)
            split.recomputed[number] = own
            ctx.save_for_backward(torch.tensor(number))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the input's gradient, and store what is left for the second part."""
        split, (gradient,) = ctx.split, gradients
        own = split.recomputed.pop(int(ctx.saved_tensors[0])) if ctx.own is None else ctx.own
        split.rests.append(Rest(own.edge, gradient, own.saved))
        if own.input is None:
            return None, None, None, None
        (found,) = torch.autograd.grad(own.edge, own.input, gradient, retain_graph=True)
        return None, found, None, None


def _run(forward: Forward, value: torch.Tensor, time: str) -> tuple[_Own, torch.Tensor]:
    """Run a layer with a graph of its own.

    A recomputation runs under hooks that discard what autograd saves; hooks of its own save this graph's tensors.
    """
    with torch.enable_grad():
        if time == AGAIN:
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                result = forward(value)
        else:
            result = forward(value)
    edge = get_gradient_edge(value) if value.requires_grad else None
    return _Own(get_gradient_edge(result), edge, value.detach()), result.detach()
