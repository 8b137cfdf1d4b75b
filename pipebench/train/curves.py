"""The curves of a run, and the first of their points that reaches the target."""

from collections.abc import Mapping

from pipebench.recipe.schema import TargetRecipe
from pipebench.train.result import Point


class Curves:
    """Takes a point per evaluation, in time order.

    Args:
        target: what is to be reached, if anything.
        metrics: the data set's, each with the direction that is better, `min` or `max`.

    Attributes:
        points: all points.
        training_s_at: seconds of training before each point.
        reached: the first point that reaches the target.
        reached_training_s: seconds of training before it.
    """

    def __init__(self, target: TargetRecipe | None, metrics: Mapping[str, str]) -> None:
        self._target, self._metrics = target, metrics
        self.points: list[Point] = []
        self.training_s_at: list[float] = []
        self.reached: Point | None = None
        self.reached_training_s = 0.0

    def add(self, point: Point, training_s: float) -> None:
        """Add a point; `training_s` is the time in training before it."""
        self.points.append(point)
        self.training_s_at.append(training_s)
        if self._target is not None and self.reached is None:
            value, goal = point.metrics[self._target.metric], self._target.value
            if value >= goal if self._metrics[self._target.metric] == "max" else value <= goal:
                self.reached, self.reached_training_s = point, training_s

    def has_point_at(self, samples: int) -> bool:
        """Return whether there was an evaluation after so many samples."""
        return any(point.samples == samples for point in self.points)

    def best(self, metric: str) -> float:
        """Return the best value of one of the data set's metrics; there has been an evaluation."""
        values = [point.metrics[metric] for point in self.points]
        return max(values) if self._metrics[metric] == "max" else min(values)

    def final_metrics(self) -> dict[str, float]:
        """Return the last and the best value of every metric of the data set."""
        if not self.points:
            return {}
        last = self.points[-1].metrics
        return {
            key: value
            for name in self._metrics
            for key, value in ((f"final_{name}", last[name]), (f"best_{name}", self.best(name)))
        }
