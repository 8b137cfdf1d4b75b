"""Updates from a round's gradients: mean, clipping, and the learning rate of its samples.

A gradient is divided once, by its update's weight: in the loss if all stages' updates average over the same
minibatches, else at every stage's own update.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from pipebench.engine.clipping import clip, gradient_norm, replace_each
from pipebench.engine.prediction import AS_IT_IS, Displacement
from pipebench.engine.protocols import StageRunner
from pipebench.engine.setup import Setup, minibatch_weight
from pipebench.model.slice_modules import Divided
from pipebench.model.stage import LossFunction
from pipebench.schedule.instructions import Instruction

_Gradients = list[torch.Tensor | None]


class Updates:
    """The updates of one segment of training, from minibatch `first` of the run on.

    `divisors` are of every minibatch's loss; None: every stage divides at its own update.
    """

    def __init__(self, setup: Setup, first: int, num_minibatches: int, divisors: Sequence[float] | None) -> None:
        self._setup = setup
        self._first = first
        self.num_minibatches = num_minibatches  # may be lowered by whole rounds that have not started
        self._divisors = divisors

    def loss_function(self, targets: Mapping[str, torch.Tensor], minibatch: int) -> LossFunction:
        """Return the map from the model's output to the loss to differentiate."""
        divisor = None if self._divisors is None else self._divisors[minibatch]

        def loss(output: Any) -> torch.Tensor:
            value = self._setup.dataset.loss(output, targets)
            return value if divisor is None else value / divisor

        return loss

    def summed_loss(self, loss: torch.Tensor, minibatch: int) -> torch.Tensor:
        """Return a unit's loss without the divisor."""
        return loss if self._divisors is None else loss * self._divisors[minibatch]

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

        `gradients` are summed over replicas, in the stage's order, and replaced in their list; `shared_norm` is of all
        stages' gradients, if they clip or skip together; `keep_from` is the oldest version of the weights still needed.
        """
        norm = shared_norm
        if replica.scale is not None:
            scale = replica.scale.value
            device = self._setup.device
            norm = gradient_norm(gradients, device, scale, replica.divided) if norm is None else norm
            finite = bool(norm.isfinite())  # waits for the GPU, as torch's GradScaler does
            replica.scale.update(finite=finite)
            if not finite:
                replica.skip_update(keep_from=keep_from)
                return
            replace_each(gradients, range(len(gradients)), lambda gradient: gradient / scale)
        if self._divisors is None:
            weight = sum(minibatch_weight(self._setup, self._first + k) for k in self._round(stage, round_index))
            replace_each(gradients, range(len(gradients)), lambda gradient: gradient / weight)
            norm = None
        self.clip(gradients, norm, replica.apart, replica.divided)
        replica.update(gradients, self._lr(stage, round_index), keep_from=keep_from)

    def clip(
        self,
        gradients: _Gradients,
        norm: torch.Tensor | None = None,
        apart: Collection[int] = (),
        divided: Divided | None = None,
    ) -> None:
        """Clip gradients, in their list, to the run's largest norm, if any, by `norm` or their own.

        Without a shared norm, each of those `apart` has one of its own, so that all stages clip a tied weight alike.
        """
        largest, device, everything = self._setup.clip_norm, self._setup.device, range(len(gradients))
        if largest is None:
            return
        if norm is not None:
            clip(gradients, everything, norm, largest)
            return
        for group in ({*everything} - {*apart}, *({index} for index in sorted(apart))):
            own = gradient_norm([g if i in group else None for i, g in enumerate(gradients)], device, divided=divided)
            clip(gradients, group, own, largest)

    def move(self, it: Instruction) -> Displacement:
        """Return the displacement of a pass's weights; its rate is that of the update after the version."""
        return Displacement(it.ahead, self._lr(it.stage, it.version)) if it.ahead else AS_IT_IS

    def _lr(self, stage: int, round_index: int) -> float:
        sampler, minibatches = self._setup.sampler, self._round(stage, round_index)
        samples = sum(sampler.size(self._first + k) for k in minibatches)
        return self._setup.lr(stage, sampler.samples_before(self._first + minibatches.start), samples)

    def _round(self, stage: int, round_index: int) -> range:
        """Return the minibatches of a stage's round, numbered since the drain."""
        return self._setup.pipeline.round_minibatches(stage, round_index, self.num_minibatches)
