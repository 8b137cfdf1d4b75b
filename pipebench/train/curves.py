"""The curves of a run: their best point, the first one that reaches the target, and the training loss in between."""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile

import torch

from pipebench.engine.engine import CUDA_LOSS_EVERY
from pipebench.recipe.rules_zoo import EVAL_LOSS
from pipebench.recipe.schema import TargetRecipe
from pipebench.train.result import Point


def _counted(point: Point, metric: str) -> float:
    """Return a metric of an evaluation, NaN if it is infinite or if the loss is NaN.

    Scores of outputs that aren't numbers mean nothing: `argmax` takes the first NaN, so an accuracy would be the share
    of the first class.
    """
    value = point.metrics[metric]
    return value if math.isfinite(value) and not math.isnan(point.metrics.get(EVAL_LOSS, 0.0)) else math.nan


def _is_not_finite(value: float) -> bool:
    return not math.isfinite(value)


class Curves:
    """Collects a point per evaluation, in time order.

    `metrics` are the data set's: name to the better direction, `min` or `max`.
    """

    def __init__(self, target: TargetRecipe | None, metrics: Mapping[str, str]) -> None:
        self._target, self._metrics = target, metrics
        self.points: list[Point] = []
        self.training_s_at: list[float] = []  # seconds in training before each point
        self.checkpoint_s_at: list[float] = []  # seconds in checkpoints before each point
        self.best_point: Point | None = None  # by the target's metric or, without a target, the data set's first
        self.reached: Point | None = None  # the first point at the target
        self.reached_training_s = 0.0  # seconds in training before it
        self.reached_checkpoint_s = 0.0  # seconds in checkpoints before it

    def add(self, point: Point, training_s: float, checkpoint_s: float) -> None:
        """Add a point, with the seconds in training and in checkpoints before it."""
        self.points.append(point)
        self.training_s_at.append(training_s)
        self.checkpoint_s_at.append(checkpoint_s)
        if self._is_best(point):
            self.best_point = point
        if self._target is not None and self.reached is None and self.reaches(_counted(point, self._target.metric)):
            self.reached = point
            self.reached_training_s, self.reached_checkpoint_s = training_s, checkpoint_s

    def reaches(self, value: float) -> bool:
        """Return whether a value of the target's metric is at the target; requires a target."""
        assert self._target is not None
        is_max = self._metrics[self._target.metric] == "max"
        return value >= self._target.value if is_max else value <= self._target.value

    def has_point_at(self, samples: int) -> bool:
        """Return whether there was an evaluation after `samples`."""
        return any(point.samples == samples for point in self.points)

    def is_best_at(self, samples: int) -> bool:
        """Return whether the best evaluation so far was after `samples`."""
        return self.best_point is not None and self.best_point.samples == samples

    def best(self, metric: str) -> float:
        """Return the best finite value of a metric, NaN if no evaluation gave one; requires an evaluation."""
        counted = [_counted(point, metric) for point in self.points]
        values = [value for value in counted if not math.isnan(value)] or counted
        return max(values) if self._metrics[metric] == "max" else min(values)

    def metrics_without_value(self) -> Iterator[tuple[str, Point]]:
        """Yield the metrics that are NaN or infinite at the last point, each with the point since which it is.

        Scores count beside an infinite loss, so of the loss only NaN is yielded.
        """
        for name in (EVAL_LOSS, *self._metrics):
            lacks = math.isnan if name == EVAL_LOSS else _is_not_finite
            count = len([*takewhile(lacks, (point.metrics.get(name, 0.0) for point in reversed(self.points)))])
            if count:
                yield name, self.points[-count]

    def _is_best(self, point: Point) -> bool:
        """Return whether a point is better than all before; any finite number is better than NaN or infinity."""
        name = self._target.metric if self._target is not None else next(iter(self._metrics), EVAL_LOSS)
        if self.best_point is None:
            return True
        value, best = _counted(point, name), _counted(self.best_point, name)
        better = value > best if self._metrics.get(name) == "max" else value < best
        return better or math.isnan(best) > math.isnan(value)

    def final_metrics(self) -> dict[str, float]:
        """Return the last and best value of every metric of the data set."""
        if not self.points:
            return {}
        last = self.points[-1].metrics
        return {
            key: value
            for name in self._metrics
            for key, value in ((f"final_{name}", last[name]), (f"best_{name}", self.best(name)))
        }


class TrainingLoss:
    """The training loss: of this process since the last drain, and of all processes since the last evaluation."""

    def __init__(self, total: float = 0.0, weight: float = 0.0) -> None:
        self.total, self.weight = total, weight  # of all processes since the last evaluation
        self._own: float | torch.Tensor = 0.0  # of this process since the last drain; on a GPU a tensor
        self._own_weight = 0.0
        self._num_units = 0

    def add(self, loss: torch.Tensor, weight: float) -> bool:
        """Add a unit's summed loss; return whether the sum is finite, as far as it has been read from a GPU."""
        self._own_weight += weight
        self._own = self._own + loss
        self._num_units += 1
        if loss.is_cuda and self._num_units % CUDA_LOSS_EVERY:
            return True
        self._own = float(self._own)
        return math.isfinite(self._own)

    def take_share(self) -> dict[str, float]:
        """Return this process's sums since the last drain, and reset them."""
        share = {"loss": float(self._own), "weight": self._own_weight}
        self._own = self._own_weight = 0.0
        return share

    def add_shares(self, shares: Iterable[Mapping[str, float]]) -> bool:
        """Add what `take_share` has returned in all processes; return whether the sum is finite."""
        for share in shares:
            self.total += share["loss"]
            self.weight += share["weight"]
        return math.isfinite(self.total)

    def take_mean(self) -> float:
        """Return the mean loss since the last evaluation, NaN if nothing was a target, and reset it."""
        mean = self.total / self.weight if self.weight else math.nan
        self.total = self.weight = 0.0
        return mean
