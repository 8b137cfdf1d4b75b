"""The training loop's part in moves: announces those of the recipe, makes those at drains, and records all."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipebench.checkpoint.progress import SavedProgress
from pipebench.engine.engine import Engine
from pipebench.extensions.moves.engine import moves_of
from pipebench.extensions.moves.planned import (
    BALANCED,
    BEFOREHAND,
    MovesPlanned,
    PlannedMove,
    cuts_of,
    policies_of,
    under,
)
from pipebench.extensions.moves.recipe import in_words
from pipebench.extensions.moves.repartition_plan import Repartition, RepartitionPlan, layout_of
from pipebench.extensions.moves.settings import MOVES, settings_of
from pipebench.model.plan import Plan, recut
from pipebench.schedule.operations import MIGRATION
from pipebench.schedule.repartitions import RepartitionRecord
from pipebench.train.checkpointing import taken_by
from pipebench.train.clock import RunClock
from pipebench.train.interfaces import LoopExtension
from pipebench.train.job import Job

_LOG = logging.getLogger(__name__)


class Repartitioning(LoopExtension):
    """Announces, makes and records a run's moves; `note` takes a sentence on each."""

    def __init__(
        self,
        job: Job,
        engine: Engine,
        clock: RunClock | None = None,
        note: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.made: list[RepartitionRecord] = []  # the moves so far, ascending
        asked = job.extensions.get(MOVES)
        self._planned = asked.planned if isinstance(asked, MovesPlanned) else ()
        self._engine, self._graph, self._sampler = engine, job.setup.graph, job.setup.sampler
        self._note = note
        self._taken_by = taken_by(job)  # engine and plan; a checkpoint's moves continue only under the same ones
        self._before = engine.setup  # at the start of the current segment
        self._announced: list[Repartition] = []  # the recipe's moves in the current segment
        self._decided: list[Plan] = []  # Algorithm 1's decisions for the next drain

    def train(self, done: int, drain: int) -> int:
        """Train until the next drain, and record the moves before it; `drained` makes those at the drain.

        Args:
            done: minibatches of the run so far.
            drain: minibatches of the run before the next regular drain.

        Returns:
            The minibatches of the run so far: fewer than `drain` if it drains for a move, or is stopped.
        """
        drain = self.begins(done, drain)
        ended = done + self._engine.train(done, drain - done)
        self.ended(done, ended)
        return ended

    def begins(self, done: int, drain: int) -> int:
        """Announce the moves before the next drain; return the minibatches of the run before that drain.

        A run that is resumed at a drain first makes the moves that are due at it, since it was saved before them.
        """
        self._make_due(done)
        if not self._live:
            # A move to the current plan needs no drain, which would change the run and yet be in no file of moves.
            now = self._engine.setup.plan
            later = (each.minibatch for each in self._planned if each.minibatch > done and each.plan != now)
            drain = min([drain, *later])
        self._announce(done, drain)
        return drain

    @property
    def _live(self) -> bool:
        return settings_of(self._engine.setup.pipeline).live

    def _announce(self, done: int, drain: int) -> None:
        """Announce the recipe's moves between two drains, if layers move during training.

        A run that was stopped right before a move resumes too late to announce it. The move is made at once, with
        nothing in flight. If the run was stopped between the announcement and the move, the move has been made.
        """
        planned = [move for move in self._planned if done < move.minibatch < drain] if self._live else []
        while planned and self._comes_too_late(planned[0], done):
            first = planned.pop(0)
            if first.plan != self._engine.setup.plan:
                self._replan(done, first.plan, BEFOREHAND)
        self._before = self._engine.setup
        self._announced = [Repartition(each.minibatch - done, *layout_of(each.plan)) for each in planned]
        for move in self._announced:
            moves_of(self._engine).announce(move)

    def _comes_too_late(self, first: PlannedMove, done: int) -> bool:
        """Return whether a segment's first move has been made, or comes too early in the segment to be announced."""
        setup = self._engine.setup
        moves = RepartitionPlan(setup.pipeline, layout_of(setup.plan))
        move = Repartition(first.minibatch - done, *layout_of(first.plan))
        return first.plan == setup.plan or any(moves.problems(move))

    def ended(self, first: int, done: int) -> None:
        """Record the moves within minibatches [first, done) of the run, and store decisions for the drain after it."""
        before, decided = self._before, moves_of(self._engine).take_decisions()
        live = settings_of(before.pipeline).live
        moves = [(move, BEFOREHAND) for move in self._announced]
        moves += [(move, BALANCED) for move in decided if live]
        plan = before.plan
        for move, why in sorted(moves, key=lambda each: each[0].at):
            was, plan = plan, recut(before.graph, plan, move.starts, move.memory)
            self._record(min(first + move.at, done), was, plan, why, live=True)
        drained = [] if live else decided
        self._decided = [recut(before.graph, before.plan, move.starts, move.memory) for move in drained]

    def drained(self, done: int) -> None:
        """Switch to the plans due at this drain."""
        for plan in self._decided:
            self._replan(done, plan, BALANCED)
        self._make_due(done)

    def restore(self, saved: SavedProgress) -> None:
        """Resume with a checkpoint's moves, unless the run now has another plan."""
        self.made = [*saved.moves] if saved.taken_by == self._taken_by else []

    def restored_plan(self, saved: SavedProgress) -> Plan | None:
        """Return the plan after the moves of a checkpoint."""
        return under(self._engine.setup, saved.moves) if saved.moves else None

    def saved(self) -> dict[str, Any]:
        """Return the moves so far, as a checkpoint and a result keep them."""
        return {"moves": tuple(self.made)}

    def metrics(self, num_bytes: Mapping[tuple[str, str], int]) -> dict[str, float]:
        """Return the costs of moving layers."""
        return move_metrics(self.made, num_bytes)

    def _make_due(self, done: int) -> None:
        """Make the recipe's move at this drain, if there is one and it has not been made."""
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
        """Record and report a move; one at the same minibatch as the last move replaces it."""
        graph, samples = self._graph, self._sampler.samples_before(minibatch)
        cuts, before, memory = cuts_of(graph, plan), cuts_of(graph, was), policies_of(graph, plan)
        if self.made and self.made[-1].minibatch == minibatch:  # nothing has run in between
            before = self.made.pop().was
        clock_s = self._engine.clock_s
        self.made.append(RepartitionRecord(minibatch, cuts, memory, before, why, live, samples, clock_s, stall_s))
        changed = "" if memory == policies_of(graph, was) else f"; layers: {in_words(memory)}"
        text = f"minibatch {minibatch}: stages begin at {', '.join(cuts)} now, not {', '.join(before)}{changed}; {why}"
        self._note(text)
        _LOG.info("%s (%.3g s)", text, stall_s)


def move_metrics(moves: Sequence[RepartitionRecord], num_bytes: Mapping[tuple[str, str], int]) -> dict[str, float]:
    """Return the metrics of moves: their number, the bytes of layers sent, and seconds of training that waited.

    `num_bytes` are the bytes sent, by (kind, level).
    """
    return {
        "repartitions": len(moves),
        "migration_bytes": sum(count for (kind, _), count in num_bytes.items() if kind == MIGRATION),
        "migration_stall_s": sum(move.stall_s for move in moves),
    }
