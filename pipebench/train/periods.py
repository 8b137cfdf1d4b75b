"""After which minibatches a run drains: to evaluate, to write a checkpoint, at its end."""

from dataclasses import dataclass

from pipebench.recipe.schema import PeriodRecipe, TrainRecipe


@dataclass(frozen=True)
class Periods:
    """A run's drains, counted in minibatches since its start.

    Attributes:
        total: minibatches until the last epoch ends.
        evaluation: minibatches from evaluation to evaluation; the end has one in any case.
        checkpoint: minibatches from checkpoint to checkpoint.
    """

    total: int
    evaluation: int
    checkpoint: int

    @staticmethod
    def of(train: TrainRecipe, minibatches_per_epoch: int) -> "Periods":
        """Return a recipe's; without a period of their own, checkpoints come with evaluations."""

        def period(every: PeriodRecipe) -> int:
            return every.minibatches or (every.epochs or 1) * minibatches_per_epoch

        return Periods(
            train.max_epochs * minibatches_per_epoch,
            period(train.evaluate_every),
            period(train.checkpoint_every or train.evaluate_every),
        )

    @property
    def longest_segment(self) -> int:
        """Minibatches from drain to drain, at most."""
        return min(self.total, self.evaluation, self.checkpoint)

    def next_drain(self, done: int) -> int:
        """Return after how many minibatches the next drain is."""
        return min(self.total, *((done // period + 1) * period for period in (self.evaluation, self.checkpoint)))

    def drains_at(self, done: int) -> bool:
        """Return whether there is a drain after so many minibatches, to evaluate or to write a checkpoint."""
        return done % self.checkpoint == 0 or self.evaluates_at(done)

    def evaluates_at(self, done: int) -> bool:
        """Return whether there is an evaluation after so many minibatches."""
        return done > 0 and (done % self.evaluation == 0 or done >= self.total)
