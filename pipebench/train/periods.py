"""The minibatches after which a run drains: to evaluate, to write a checkpoint, at its end."""

from dataclasses import dataclass

from pipebench.recipe.schema import PeriodRecipe, TrainRecipe


@dataclass(frozen=True)
class Periods:
    """A run's drains, counted in minibatches since its start."""

    total: int  # until the last epoch ends
    evaluation: int  # between evaluations; there is one at the end, too
    checkpoint: int  # between checkpoints

    @staticmethod
    def of(train: TrainRecipe, minibatches_per_epoch: int) -> "Periods":
        """Return a recipe's periods; a checkpoint period that it doesn't give is its evaluation period."""

        def period(every: PeriodRecipe) -> int:
            return every.minibatches or (every.epochs or 1) * minibatches_per_epoch

        return Periods(
            train.max_epochs * minibatches_per_epoch,
            period(train.evaluate_every),
            period(train.checkpoint_every or train.evaluate_every),
        )

    @property
    def longest_segment(self) -> int:
        """The most minibatches between two drains, which are those before the first drain."""
        return min(self.total, self.evaluation, self.checkpoint)

    @property
    def longest_later_segment(self) -> int:
        """The most minibatches between two drains after the first one; 0 if there is only one drain."""
        done, most = self.longest_segment, 0
        while done < self.total and most < self.longest_segment:
            drain = self.next_drain(done)
            most, done = max(most, drain - done), drain
        return most

    def next_drain(self, done: int) -> int:
        """Return after how many minibatches of the run the first drain after `done` minibatches is."""
        return min(self.total, *((done // period + 1) * period for period in (self.evaluation, self.checkpoint)))

    def saves_at(self, done: int) -> bool:
        """Return whether a checkpoint is due after `done` minibatches."""
        return done % self.checkpoint == 0

    def evaluates_at(self, done: int) -> bool:
        """Return whether the run evaluates after `done` minibatches."""
        return done > 0 and (done % self.evaluation == 0 or done >= self.total)
