"""Learning rates, written from docs/optimizers.md and PipeMare's section 3.1; shares no code with the package.

The rate of an update is a function of the samples seen before it and, during warm-up, of its own samples.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch


@dataclass(frozen=True)
class Rates:
    """A schedule of learning rates."""

    lr: float  # of the input stage
    name: str  # `constant`, `step`, `cosine`, `polynomial` or a class of torch.optim.lr_scheduler
    arguments: Mapping[str, Any]  # of the schedule
    step_every: int  # minibatches after which a class is stepped
    warmup: float  # samples
    total: int  # samples of the whole run
    num_train: int  # samples of an epoch
    size: int  # samples of a minibatch
    annealing: float = 0.0  # PipeMare's K, in samples; 0 for no rescheduling
    _played: list[float] = field(default_factory=list)  # rates of a class of torch, by number of steps

    def rate(self, scale: float, tau: float, before: int, own: int) -> float:
        """Return the rate of an update.

        Args:
            scale: factor of the stage, see `scale_of`.
            tau: updates by which its gradients are late.
            before: samples seen before it.
            own: samples of the update.
        """
        if self.annealing > 0:
            scale *= max(1.0, tau) ** -max(0.0, 1 - before / self.annealing)
        if before < self.warmup:
            return self.lr * scale * min(1.0, (before + own) / self.warmup)
        return scale * self._scheduled(before)

    def _scheduled(self, before: int) -> float:
        given = self.arguments
        if self.name == "constant":
            return self.lr
        if self.name == "step":
            falls: float = given["factor"] ** (before // (Fraction(str(given["every_epochs"])) * self.num_train))
            return self.lr * falls
        if self.name == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * (before - self.warmup) / max(1, self.total - self.warmup)))
        if self.name == "polynomial":
            left: float = (1 - before / self.total) ** given["power"]
            return self.lr * left
        epochs, within = divmod(before, self.num_train)
        done = epochs * math.ceil(self.num_train / self.size) + within // self.size
        return self._stepped(done // self.step_every)

    def _stepped(self, times: int) -> float:
        """Return the rate of a scheduler class of torch after `times` steps."""
        if len(self._played) <= times:
            optimizer = torch.optim.SGD([torch.zeros(1)], self.lr)
            scheduler = getattr(torch.optim.lr_scheduler, self.name)(optimizer, **self.arguments)
            self._played.clear()
            for _ in range(times + 64):
                self._played.append(float(optimizer.param_groups[0]["lr"]))
                optimizer.step()
                scheduler.step()
        return self._played[times]


def scale_of(scaling: str, own: int, first: int) -> float:
    """Return the factor of a stage's rate, given the minibatches of its updates and of the input stage's (`first`)."""
    return {"replicas": own / first, "none": 1.0, "linear": float(own), "sqrt": math.sqrt(own)}[scaling]
