"""Dynamic loss scaling: gradients of fp16 times a scale, so that small ones don't vanish, which follows overflows.

Paper: Micikevicius et al. (2018) section 3.2; the rule and its defaults are torch.amp.GradScaler's. Differs: every
stage has a scale of its own. Gradients travel with the scale that they have, and a stage brings those that arrive to
its own. Where all stages update together they share every decision, so that their scales stay equal.
"""

from collections.abc import Iterable, Sequence

import torch

from pipebench.recipe.schema import LossScaleRecipe


class LossScale:
    """The scale of the gradients of one stage replica.

    Args:
        options: how it changes.

    Attributes:
        value: the scale.
        num_skipped: updates skipped since the start of the run, since their gradients were not finite.
    """

    def __init__(self, options: LossScaleRecipe) -> None:
        self._options = options
        self.value = options.initial
        self.num_skipped = 0
        self._num_finite = 0  # updates since the scale last changed

    def update(self, *, finite: bool) -> None:
        """Take note of an update's gradients."""
        options = self._options
        if not finite:
            self.value *= options.backoff
            self._num_finite = 0
            self.num_skipped += 1
            return
        self._num_finite += 1
        if self._num_finite == options.growth_interval:
            self.value *= options.growth
            self._num_finite = 0

    def state(self) -> torch.Tensor:
        """Return what a checkpoint holds of it: the scale, finite updates since it changed, skipped ones."""
        return torch.tensor([self.value, self._num_finite, self.num_skipped], dtype=torch.float64)

    def restore(self, states: Sequence[torch.Tensor]) -> None:
        """Go on from the states of one stage or, cut otherwise, of several: with the most careful of them."""
        if states:
            rows = [state.tolist() for state in states]
            self.value = min(value for value, _, _ in rows)
            self._num_finite = int(min(finite for _, finite, _ in rows))
            self.num_skipped = int(max(skipped for _, _, skipped in rows))


def scale_metrics(scales: Iterable[Sequence[float]]) -> dict[str, float]:
    """Return metrics of all workers' `loss_scales`: the smallest scale, and the most updates that a stage skipped."""
    found = list(scales)
    if not found:
        return {}
    return {"loss_scale": min(scale for scale, _ in found), "skipped_updates": max(skipped for _, skipped in found)}
