"""Updates from a round's gradients: their mean, clipping, and the learning rate of the round's samples.

A gradient is divided once, by the weight of its update (the weight of all samples of the round). If the updates of all
stages average over the same minibatches, the loss is divided before its backward; otherwise every stage divides its
gradients at its own update.
"""

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from pipebench.engine.clipping import clip, gradient_norm, replace_each
from pipebench.engine.feed import Feed
from pipebench.engine.prediction import AS_IT_IS, Displacement
from pipebench.engine.protocols import StageRunner
from pipebench.engine.setup import Setup
from pipebench.model.slice_modules import Divided
from pipebench.model.stage import LossFunction
from pipebench.schedule.instructions import Instruction

_WEIGHTS_CACHED = 64  # rounds; more than are in flight
_Gradients = list[torch.Tensor | None]


class Updates:
    """The updates of one segment of training.

    Args:
        setup: what is run.
        feed: the segment's data.
        first: the segment's first minibatch, numbered since the run's start.
        num_minibatches: minibatches of the segment.
    """

    def __init__(self, setup: Setup, feed: Feed, first: int, num_minibatches: int) -> None:
        self._setup = setup
        self._first = first
        self.num_minibatches = num_minibatches  # lowered if the segment ends early
        sizes = {setup.pipeline.round_size(stage) for stage in range(setup.pipeline.num_stages)}
        self._divides_losses = len(sizes) == 1
        self._weight = lru_cache(maxsize=_WEIGHTS_CACHED)(feed.round_weight)

    def loss_function(self, targets: Mapping[str, torch.Tensor], minibatch: int, weight: float) -> LossFunction:
        """Return the map from the model's output to the loss to differentiate.

        Args:
            targets: of a unit.
            minibatch: of the unit, counted from the drain.
            weight: of the unit in the mean loss. Without any, its gradients are 0, also of losses that divide by it.
        """
        divisor = self._divisor(minibatch)

        def loss(output: Any) -> torch.Tensor:
            value = None if weight else _nothing(output)
            if value is None:
                value = self._setup.dataset.loss(output, targets)
            return value if divisor is None else value / divisor

        return loss

    def summed_loss(self, loss: torch.Tensor, minibatch: int) -> torch.Tensor:
        """Return a unit's loss, summed over its samples, from the loss that was differentiated."""
        divisor = self._divisor(minibatch)
        return loss if divisor is None else loss * divisor

    def apply(
        self,
        replica: StageRunner,
        gradients: _Gradients,
        stage: int,
        round_index: int,
        shared_norm: torch.Tensor | None,
        *,
        keep_from: int,
    ) -> None:
        """Apply a round's update, or skip it if scaled gradients overflowed.

        Args:
            replica: the stage's.
            gradients: summed over the replicas, in the stage's order; they are replaced in this list.
            stage: its index.
            round_index: numbered since the drain.
            shared_norm: of the gradients of all stages, if these clip or skip together; else None.
            keep_from: the oldest version of the weights that a forward may still request.
        """
        norm = shared_norm
        if replica.scale is not None:
            scale = replica.scale.value
            if norm is None:
                norm = gradient_norm(gradients, self._setup.device, scale, replica.divided)
            finite = bool(norm.isfinite())  # waits for the GPU, as torch's GradScaler does
            replica.scale.update(finite=finite)
            if not finite:
                replica.skip_update(keep_from=keep_from)
                return
            replace_each(gradients, range(len(gradients)), lambda gradient: gradient / scale)
        if not self._divides_losses:
            weight = self._weight(self._round(stage, round_index))
            replace_each(gradients, range(len(gradients)), lambda gradient: gradient / weight)
            norm = None  # it was that of the undivided gradients
        self.clip(gradients, norm, replica.tied_positions, replica.divided)
        replica.update(gradients, self._lr(stage, round_index), keep_from=keep_from)

    def clip(
        self,
        gradients: _Gradients,
        norm: torch.Tensor | None = None,
        tied_positions: Collection[int] = (),
        divided: Divided | None = None,
    ) -> None:
        """Clip gradients, in their list, to the run's `clip_norm`, if it has one.

        Args:
            gradients: of a stage's parameters, in order.
            norm: of the gradients of all stages; None: the stage clips by the norm of its own.
            tied_positions: of tied weights. Without a shared norm each is clipped by its own norm, which is the same
                on all stages that have the weight.
            divided: which gradients are slices of whole ones.
        """
        largest = self._setup.clip_norm
        if largest is None:
            return
        everything = range(len(gradients))
        if norm is not None:
            clip(gradients, everything, norm, largest)
            return
        for group in ({*everything} - {*tied_positions}, *({index} for index in sorted(tied_positions))):
            own = [gradient if index in group else None for index, gradient in enumerate(gradients)]
            clip(gradients, group, gradient_norm(own, self._setup.device, divided=divided), largest)

    def move(self, it: Instruction) -> Displacement:
        """Return how far a pass's weights are displaced; the rate is that of the update after the pass's version."""
        return Displacement(it.ahead, self._lr(it.stage, it.version)) if it.ahead else AS_IT_IS

    def _lr(self, stage: int, round_index: int) -> float:
        sampler, minibatches = self._setup.sampler, self._round(stage, round_index)
        samples_before = sampler.samples_before(self._first + minibatches.start)
        own_samples = sum(sampler.size(self._first + k) for k in minibatches)
        return self._setup.lr(stage, samples_before, own_samples)

    def _divisor(self, minibatch: int) -> float | None:
        """Return what a minibatch's loss is divided by; None if every stage divides at its own update."""
        if not self._divides_losses:
            return None
        size = self._setup.pipeline.round_size(0)
        return self._weight(self._round(0, minibatch // size))

    def _round(self, stage: int, round_index: int) -> range:
        """Return the minibatches of a stage's round, numbered since the drain."""
        return self._setup.pipeline.round_minibatches(stage, round_index, self.num_minibatches)


def _nothing(output: Any) -> torch.Tensor | None:
    """Return 0 as a function of a model's output; None if the output is no more than a loss."""
    parts = [part for part in tree_leaves(output) if isinstance(part, torch.Tensor) and part.requires_grad]
    sums = [part.flatten()[:0].sum() for part in parts if part.dim()]
    return torch.stack(sums).sum() if sums else None
