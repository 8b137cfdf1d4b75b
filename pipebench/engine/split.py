"""Backwards in two parts: gradients of a stage's inputs first, so that they can leave, those of its weights later.

Every layer whose backward can be split has a small graph of its own. The stage's graph runs through it only for the
gradient of its input, and is gone afterwards; what stays for the second part is the layer's own graph and the gradient
that arrived at its output. The first part gives all gradients of the other layers, whose backwards run whole.

A layer that is recomputed has its own graph only once it runs again, right before the first part.
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
    """A layer's own graph: where gradients come in, where that of its input comes out, and the input it keeps."""

    edge: GradientEdge
    input: GradientEdge | None
    kept: torch.Tensor


class Rest(NamedTuple):
    """What a layer still has to do, with the gradient of its output and the input it keeps."""

    edge: GradientEdge
    gradient: torch.Tensor
    kept: torch.Tensor


class SplitBackward:
    """Gives the layers of a stage that can be split graphs of their own, and collects what is left to do of each.

    Args:
        stage: the stage; the modules it calls are changed.
        device: where it computes.

    Attributes:
        rests: what the input part that runs has put off.
        recomputed: own graphs of layers that have run again, by a number.
        numbers: for them.
    """

    def __init__(self, stage: Stage, device: torch.device) -> None:
        self.rests: list[Rest] = []
        self.recomputed: dict[int, _Own] = {}
        self.numbers = itertools.count()
        # Without it autograd would pass by a first layer, whose input has no gradient.
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        graphs = (stage.module, *(each.run for each in stage.recomputed))
        parts = (module.get_submodule(name) for module in graphs for name in splittable(module, module.graph))
        for part in dict.fromkeys(parts):  # one may be called here and there
            part.forward = partial(self._forward, part.forward)

    def backward_input(
        self,
        results: Sequence[GradientEdge],
        heads: Sequence[torch.Tensor | None],
        wanted: Sequence[torch.Tensor],
    ) -> list[Rest]:
        """Run a backward without the weights of the layers that are split; return what is left to do.

        Args:
            results: what is differentiated.
            heads: their gradients.
            wanted: leaves in whose `grad` gradients are added, as far as they are known after this part.
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
    """Run what an input part has left; gradients are added in the parameters' `grad`, and the layers' graphs freed."""
    if rests:
        edges, gradients = [rest.edge for rest in rests], [rest.gradient for rest in rests]
        torch.autograd.backward(edges, gradients, inputs=list(parameters))


def kept_bytes(rests: Sequence[Rest]) -> int:
    """Return the bytes of what layers keep for their weight parts, what several of them share counted once."""
    storages = (tensor.untyped_storage() for rest in rests for tensor in (rest.gradient, rest.kept))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class _Split(torch.autograd.Function):
    """A layer in the stage's graph, of which its backward computes the gradient of the input only."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, value: torch.Tensor, split: SplitBackward, forward: Forward
    ) -> torch.Tensor:
        """Run a layer on a value apart from the stage's graph; `anchor` lets autograd come here in any case.

        A layer that is recomputed runs twice, and what the second time keeps is found by a number: autograd takes from
        the second run only what was saved.
        """
        ctx.split, ctx.own = split, None
        time = running.get()
        if time == FIRST:
            ctx.save_for_backward(torch.tensor(-1))  # its number will be known when it runs again
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
        """Return the gradient of the value, and leave for the weight part what it needs."""
        split, (gradient,) = ctx.split, gradients
        own = split.recomputed.pop(int(ctx.saved_tensors[0])) if ctx.own is None else ctx.own
        split.rests.append(Rest(own.edge, gradient, own.kept))
        if own.input is None:
            return None, None, None, None
        (found,) = torch.autograd.grad(own.edge, own.input, gradient, retain_graph=True)
        return None, found, None, None


def _run(forward: Forward, value: torch.Tensor, time: str) -> tuple[_Own, torch.Tensor]:
    """Run a layer forward with a graph of its own; one that runs again keeps what it keeps, whatever was left out."""
    with torch.enable_grad():
        if time == AGAIN:
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                result = forward(value)
        else:
            result = forward(value)
    edge = get_gradient_edge(value) if value.requires_grad else None
    return _Own(get_gradient_edge(result), edge, value.detach()), result.detach()
