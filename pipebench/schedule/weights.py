"""Weight policies: which version of a stage's weights a minibatch uses. Versions count updates since the drain.

The numbers are the schedule's. What holds the weights keeps a version as long as it may still be asked for, and hands
it out; how stale a gradient is can be read off the printed schedule.

A policy may also aim: its passes read the newest version and move it to where the weights are thought to be, or to have
been, some updates away. How many is in the schedule, too; how weights are moved is the engine's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pipebench.schedule.pipeline import STASH, Pipeline

ONE, VERTICAL_SYNC, NONE, DOUBLE_BUFFER = "one", "stash-vertical-sync", "none", "double-buffer"
NEWEST_PULLED = "newest-pulled"
PREDICT, CORRECT = "predict", "correct"
CORRECTION_DECAY = 0.135  # PipeMare's D, about e^-2


@dataclass(frozen=True)
class WeightPolicy:
    """How versions are numbered.

    Attributes:
        summary: one line for people.
        version: from (pipeline, stage, minibatch, updates the stage has made) to the version that its forward uses.
        needs_flush: whether it goes with a flush at every update only; the others go without only.
        stashed: whether the backward uses the version of its forward; else the newest of that moment.
        versions: most versions alive at once: `depth`, or a number.
        accumulates: whether an update must cover at least `depth` minibatches of every replica.
        waits: whether it goes with a `sync` that waits for all replicas; the others go with one that doesn't.
        aim: from (pipeline, stage, round) to the version that the weights of all passes of a round are predicted to be;
            None where nothing is predicted.
        corrects: whether the weights of a backward, the newest, are taken back to about where those of its forward
            were, and learning rates shrink with the delay.
        copies: what a replica keeps besides its versions, in sizes of the stage's parameters.
        update_cost: what updating and moving weights takes for every minibatch, in optimizer steps.
        as_input_stage: whether a stage keeps versions for as many minibatches as the input stage has in flight.
    """

    summary: str
    version: Callable[[Pipeline, int, int, int], int]
    needs_flush: bool = False
    stashed: bool = True
    versions: int | None = None
    accumulates: bool = False
    waits: bool = True
    aim: Callable[[Pipeline, int, int], int] | None = None
    corrects: bool = False
    copies: int = 0
    update_cost: float = 1.0
    as_input_stage: bool = False

    def moves(self, p: Pipeline, stage: int) -> bool:
        """Return whether a pass of a stage ever needs weights that aren't a version as it is."""
        is_late = p.warmups[stage] > 1
        if self.aim is None:
            return self.corrects and is_late
        return is_late or self.aim(p, stage, 0) > 0


def delay(p: Pipeline, stage: int) -> float:
    """Return how many updates late a 1F1B pipeline's gradients are in the long run, where forwards use the newest.

    A replica runs d_s - 1 forwards between that of a unit and its backward, and an update takes in as many units as the
    replica has in a round: PipeMare's tau, a fraction where minibatches are cut.
    """
    return (p.warmups[stage] - 1) / units_per_update(p)


def units_per_update(p: Pipeline) -> int:
    """Return the units that a replica brings to one update, in a pipeline without a flush."""
    return p.microbatches * p.accumulate


def _newest(p: Pipeline, stage: int, minibatch: int, updates: int) -> int:
    """The weights as they are: in 1F1B max(0, floor(k / r_s) - d_s + 1), which is how many updates came before."""
    return updates


def _of_the_input_stage(p: Pipeline, stage: int, minibatch: int, updates: int) -> int:
    """PipeDream section 3.3, vertical sync: what has seen the minibatches that the input stage's version has seen."""
    r = p.replicas[0]
    return max(0, minibatch // r - p.depth + 1) * r // p.replicas[stage]


def _as_the_clock_has_it(p: Pipeline, stage: int, minibatch: int, updates: int) -> int:
    """The newest that the worker has pulled; no schedule knows which that is."""
    return -1


def _one_update_back(p: Pipeline, stage: int, minibatch: int, updates: int) -> int:
    """PipeDream-2BW section 3.1: the update t of minibatches t m to (t + 1) m - 1 is computed with version t - 1."""
    return max(0, minibatch // p.round_size(stage) - 1)


def _end_of_the_round_trip(p: Pipeline, stage: int, round_index: int) -> int:
    """XPipe (Guan et al. 2019), SpecTrain (Chen et al. 2018): aim at the end of a round's way through the pipeline.

    That is when its last unit is through on the input stage. Both count the updates that a stage, their rank of N,
    makes from a pass until then: from the backward of the round's first unit of T it is
    floor((T + floor(rank / 2) - 1) / T), where SpecTrain's T is 1; and from its forward N - 1 - rank more, for T = 1.
    Differs: for forwards XPipe has a formula, floor((N + T - rank / 2 - 2) / T); here they aim where their backwards
    do, and how far that is from what they read is the schedule's to say. For T = 1 that is the same number. A unit is
    taken to need r times as long on a stage of r replicas as on one, so that replicated plans are covered.
    """
    units, r = units_per_update(p), p.replicas
    after = sum(r[:stage]) // (2 * r[stage])  # units that a replica ends while the round's last returns to stage 0
    return round_index + (units - 1 + after) // units


WEIGHT_POLICIES: Final[dict[str, WeightPolicy]] = {
    ONE: WeightPolicy("one version, since every update empties the pipeline", _newest, needs_flush=True, versions=1),
    STASH: WeightPolicy("every minibatch keeps the version of its forward for its backward", _newest),
    VERTICAL_SYNC: WeightPolicy(
        "all stages use the version that the input stage used", _of_the_input_stage, as_input_stage=True
    ),
    DOUBLE_BUFFER: WeightPolicy(
        "two versions: gradients are one update late", _one_update_back, versions=2, accumulates=True
    ),
    NEWEST_PULLED: WeightPolicy(
        "the newest that was there when the worker pulled", _as_the_clock_has_it, versions=2, waits=False
    ),
    NONE: WeightPolicy("the naive pipeline: a backward meets newer weights", _newest, stashed=False, versions=1),
    PREDICT: WeightPolicy(
        "the newest version, predicted some updates ahead", _newest, stashed=False, versions=1,
        aim=_end_of_the_round_trip, copies=1, update_cost=3.0,
    ),
    CORRECT: WeightPolicy(
        "a backward's weights are taken back towards those of its forward", _newest, stashed=False, versions=1,
        corrects=True, copies=2, update_cost=3.0,
    ),
}  # fmt: skip
