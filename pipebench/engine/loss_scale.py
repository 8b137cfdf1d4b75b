"""Dynamic loss scaling: fp16 gradients are multiplied by a scale, against underflow; it shrinks at overflows.

Paper: Micikevicius et al. (2018) section 3.2; rule and defaults are those of torch.amp.GradScaler. Differs: every stage
has its own scale. Gradients are sent with their scale, and a stage converts those that arrive into its own. If all
stages update together, they share every decision, so their scales stay equal.
"""

from collections.abc import Iterable, Sequence

import torch

from pipebench.recipe.schema import LossScaleRecipe


class LossScale:
    """The scale of one stage replica's gradients."""

    def __init__(self, options: LossScaleRecipe) -> None:
        self._options = options
        self.value = options.initial
        self.num_skipped = 0  # updates skipped in the run, since gradients were not finite
        self._num_finite = 0  # updates since the scale last changed

    def update(self, *, finite: bool) -> None:
        """Adapt the scale after an update; `finite`: whether all its gradients were."""
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
        """Return a checkpoint's entry: [scale, finite updates since it changed, skipped updates] float64."""
        return torch.tensor([self.value, self._num_finite, self.num_skipped], dtype=torch.float64)

    def restore(self, states: Sequence[torch.Tensor]) -> None:
        """Restore from the states of one stage or, under other cuts, of several: the most conservative of them."""
        if states:
            rows = [state.tolist() for state in states]
            self.value = min(value for value, _, _ in rows)
            self._num_finite = int(min(finite for _, finite, _ in rows))
            self.num_skipped = int(max(skipped for _, _, skipped in rows))


def scale_metrics(scales: Iterable[Sequence[float]]) -> dict[str, float]:
    """Return metrics from all workers' `loss_scales`: the smallest scale, the most updates that a stage skipped."""
    found = list(scales)
    if not found:
        return {}
    return {"loss_scale": min(scale for scale, _ in found), "skipped_updates": max(skipped for _, skipped in found)}
