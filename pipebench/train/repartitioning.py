"""The moves of a run: what its recipe asks for and what is decided on the way, announced, carried out and kept."""

import logging
from collections.abc import Callable

from pipebench.engine.engine import Engine
from pipebench.model.plan import Plan, layout_of, recut
from pipebench.schedule.moves import Repartition, RepartitionPlan
from pipebench.schedule.repartitions import RepartitionRecord, in_words
from pipebench.train.job import Job
from pipebench.train.moves import BALANCED, BEFOREHAND, PlannedMove, cuts_of, policies_of

_LOG = logging.getLogger(__name__)


class Repartitioning:
    """The moves of a run, from one drain to the next.

    Args:
        job: what is run.
        engine: what runs it.
        tell: takes a sentence on every move.

    Attributes:
        made: the moves so far, the first one first.
    """

    def __init__(self, job: Job, engine: Engine, tell: Callable[[str], None] = lambda sentence: None) -> None:
        self.made: list[RepartitionRecord] = []
        self._planned, self._graph, self._sampler = job.moves, job.setup.graph, job.setup.sampler
        self._engine, self._tell = engine, tell
        self._before = engine.setup
        self._announced: list[Repartition] = []
        self._decided: list[Plan] = []

    def train(self, done: int, drain: int) -> int:
        """Train up to the next drain, and take note of the moves on the way; `replan` makes those that are due there.

        Args:
            done: minibatches of the run so far.
            drain: after how many the pipeline drains in any case.

        Returns:
            Minibatches of the run up to there: fewer than `drain` where it drains to move, or is stopped.
        """
        live = self._engine.setup.live
        drain = min([drain, *(move.minibatch for move in self._planned if move.minibatch > done and not live)])
        self._announce(done, drain)
        ended = done + self._engine.train(done, drain - done)
        self._note(done, ended)
        return ended

    def _announce(self, done: int, drain: int) -> None:
        """Announce the moves that the recipe asks for between two drains, where training goes on meanwhile.

        A run that was stopped right before a move goes on too late for it: it is made at once, nothing being in flight.
        Where the stop came after it had been announced, it has been made.
        """
        planned = [move for move in self._planned if done < move.minibatch < drain] if self._engine.setup.live else []
        while planned and self._comes_too_late(planned[0], done):
            first = planned.pop(0)
            if first.plan != self._engine.setup.plan:
                self._replan(done, first.plan, BEFOREHAND)
        self._before = self._engine.setup
        self._announced = [Repartition(each.minibatch - done, *layout_of(each.plan)) for each in planned]
        for move in self._announced:
            self._engine.announce(move)

    def _comes_too_late(self, first: PlannedMove, done: int) -> bool:
        """Return whether a segment's first move has been made, or can't be made while the segment runs."""
        setup = self._engine.setup
        moves = RepartitionPlan(setup.pipeline, layout_of(setup.plan))
        move = Repartition(first.minibatch - done, *layout_of(first.plan))
        return first.plan == setup.plan or any(moves.problems(move))

    def _note(self, first: int, done: int) -> None:
        """Take note of the moves of a segment that has ended, and of what was decided for the drain after it.

        Args:
            first: the minibatch that it began with.
            done: minibatches of the run up to its end.
        """
        before, decided = self._before, self._engine.take_decisions()
        moves = [(move, BEFOREHAND) for move in self._announced]
        moves += [(move, BALANCED) for move in decided if before.live]
        plan = before.plan
        for move, why in sorted(moves, key=lambda each: each[0].at):
            was, plan = plan, recut(before.graph, plan, move.starts, move.memory)
            self._record(min(first + move.at, done), was, plan, why, live=True)
        drained = [] if before.live else decided
        self._decided = [recut(before.graph, before.plan, move.starts, move.memory) for move in drained]

    def replan(self, done: int) -> None:
        """Go on under the plans that are due, here at a drain."""
        for plan in self._decided:
            self._replan(done, plan, BALANCED)
        for move in self._planned:
            if move.minibatch == done and move.plan != self._engine.setup.plan:
                self._replan(done, move.plan, BEFOREHAND)

    def _replan(self, done: int, plan: Plan, why: str) -> None:
        was, before_s = self._engine.setup.plan, self._engine.clock_s
        self._engine.replan(plan)
        self._record(done, was, plan, why, stall_s=self._engine.clock_s - before_s)

    def _record(
        self, minibatch: int, was: Plan, plan: Plan, why: str, *, live: bool = False, stall_s: float = 0.0
    ) -> None:
        """Take note of a move, and tell of it."""
        graph, samples = self._graph, self._sampler.samples_before(minibatch)
        cuts, before, memory = cuts_of(graph, plan), cuts_of(graph, was), policies_of(graph, plan)
        if self.made and self.made[-1].minibatch == minibatch:  # nothing has run in between
            before = self.made.pop().was
        clock_s = self._engine.clock_s
        done = RepartitionRecord(minibatch, cuts, memory, before, why, live, samples, clock_s, stall_s)
        self.made.append(done)
        changed = "" if memory == policies_of(graph, was) else f"; layers: {in_words(memory)}"
        text = f"minibatch {minibatch}: stages begin at {', '.join(cuts)} now, not {', '.join(before)}{changed}; {why}"
        self._tell(text)
        _LOG.info("%s (%.3g s)", text, stall_s)
