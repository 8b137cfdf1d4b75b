"""Weight policies: the version of a stage's weights that a minibatch uses, counted in updates since the drain.

Versions are part of the schedule, so that the staleness of a gradient can be read off its text form. Engines keep a
version while a pass may still request it. A policy may also move weights: passes read the newest version predicted
ahead, or corrected back, by a number of updates that the schedule gives. The engine computes the moved weights.
"""

import math
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
    """A numbering of versions."""

    summary: str  # one line, for lists
    # From (pipeline, stage, minibatch, the stage's updates so far) to the version that the minibatch's forward reads
    version: Callable[[Pipeline, int, int, int], int]
    needs_flush: bool = False  # whether it requires a flush at every update; if not, it excludes flushes
    stashed: bool = True  # whether a backward reads its forward's version; else the newest
    versions: int | None = None  # most versions alive at once; None: one per minibatch in flight
    accumulates: bool = False  # whether an update must cover at least `depth` minibatches of every replica
    waits: bool = True  # whether it requires a `sync` that waits for all replicas; if not, it requires one that doesn't
    # From (pipeline, stage, round) to the version that the round's passes predict; None: it predicts none
    aim: Callable[[Pipeline, int, int], int] | None = None
    # Whether a backward moves the newest weights back to about its forward's, and learning rates shrink with the delay
    corrects: bool = False
    copies: int = 0  # extra sets of the stage's parameters that a replica holds where weights are moved
    # Time of an update, including moving the weights for each of its minibatches, in optimizer steps
    update_cost: float = 1.0
    as_input_stage: bool = False  # whether a stage keeps versions for all minibatches in flight on the input stage
    # Whether all stages read one version for a minibatch, and none needs an update before the input stage can make it
    together: bool = False

    def moves(self, p: Pipeline, stage: int) -> bool:
        """Return whether a stage's passes ever use moved weights."""
        if not self.copies:
            return False
        return p.warmups[stage] > 1 or (self.aim is not None and self.aim(p, stage, 0) > 0)

    def num_sets(self, p: Pipeline, stage: int) -> int | None:
        """Return the most sets of weights that a replica of a stage holds; None for one per minibatch in flight."""
        if self.as_input_stage:
            return math.ceil(p.depth * p.replicas[0] / p.replicas[stage])
        if not self.moves(p, stage):
            return self.versions
        return self.most_sets(shares=units_per_update(p) > 1)

    def most_sets(self, *, shares: bool) -> int | None:
        """Return the most that `num_sets` is of any stage; `shares`: whether several units make up an update."""
        if self.versions is None:
            return None
        # A prediction that several units share outlives an update between them.
        return self.versions + self.copies + (self.aim is not None and shares)


def update_costs(p: Pipeline) -> list[float]:
    """Return, per stage, the time of an update and of moving weights for its minibatches, in optimizer steps."""
    policy = WEIGHT_POLICIES[p.weights]
    return [policy.update_cost if policy.moves(p, stage) else 1.0 for stage in range(p.num_stages)]


def delay(p: Pipeline, stage: int) -> float:
    """Return the delay of a gradient, in updates, in the steady state of 1F1B where forwards use the newest version.

    PipeMare's tau is (d_s - 1) / units per update: between a unit's forward and its backward a replica runs d_s - 1
    other forwards and, in the steady state, ends as many other units, each a fraction of an update.
    """
    return (p.warmups[stage] - 1) / units_per_update(p)


def units_per_update(p: Pipeline) -> int:
    """Return the units of one update on a replica, in a pipeline without a flush."""
    return p.microbatches * p.accumulate


def _newest(p: Pipeline, stage: int, minibatch: int, updates: int) -> int:
    """The newest version, the number of updates made so far: in 1F1B max(0, floor(k / r_s) - d_s + 1)."""
    return updates


def _vertical_sync(p: Pipeline, stage: int, minibatch: int, updates: int) -> int:
    """PipeDream section 3.3, vertical sync: the version made of the same minibatches as the input stage's version."""
    r = p.replicas[0]
    return max(0, minibatch // r - p.depth + 1) * r // p.replicas[stage]


def _pulled(p: Pipeline, stage: int, minibatch: int, updates: int) -> int:
    """The newest version that the worker has pulled, which the schedule can't know."""
    return -1


def _one_update_late(p: Pipeline, stage: int, minibatch: int, updates: int) -> int:
    """PipeDream-2BW section 3.1: update t, of minibatches t m to (t + 1) m - 1, is computed with version t - 1."""
    return max(0, minibatch // p.round_size(stage) - 1)


def _round_trip_end(p: Pipeline, stage: int, round_index: int) -> int:
    """XPipe (Guan et al. 2019), SpecTrain (Chen et al. 2018): the version at the end of a round's backwards.

    A round of T units ends when its last unit has returned to the input stage. Both papers count the updates that a
    stage, their rank of N, makes from a pass until then. From the backward of the round's first unit they are
    floor((T + floor(rank / 2) - 1) / T), where SpecTrain's T is 1; from its forward, N - 1 - rank more, for T = 1.

    Differs: forwards aim at the same version as their backwards, and the schedule gives the distance. XPipe has a
    formula for forwards, floor((N + T - rank / 2 - 2) / T), which is equal for T = 1. To cover replicated plans, a unit
    is assumed to take r times as long on a stage of r replicas as on a stage of one. With a depth below NOAM, the units
    that end in the meantime are at most the others in flight.
    """
    units, r = units_per_update(p), p.replicas
    # Units that a replica ends while the round's last unit returns to stage 0
    after = min(sum(r[:stage]) // (2 * r[stage]), (p.depth - 1) * r[0] // r[stage])
    return round_index + (units - 1 + after) // units


WEIGHT_POLICIES: Final[dict[str, WeightPolicy]] = {
    ONE: WeightPolicy(
        "one version, since every update empties the pipeline", _newest, needs_flush=True, versions=1, together=True
    ),
    STASH: WeightPolicy("every minibatch keeps the version of its forward for its backward", _newest),
    VERTICAL_SYNC: WeightPolicy(
        "all stages use the version that the input stage used", _vertical_sync, as_input_stage=True
    ),
    DOUBLE_BUFFER: WeightPolicy(
        "two versions: gradients are one update late", _one_update_late, versions=2, accumulates=True,
        together=True,
    ),
    NEWEST_PULLED: WeightPolicy(
        "the newest that was there when the worker pulled", _pulled, versions=2, waits=False
    ),
    NONE: WeightPolicy("the naive pipeline: a backward meets newer weights", _newest, stashed=False, versions=1),
    PREDICT: WeightPolicy(
        "the newest version, predicted some updates ahead", _newest, stashed=False, versions=1,
        aim=_round_trip_end, copies=1, update_cost=3.0,
    ),
    CORRECT: WeightPolicy(
        "a backward's weights are taken back towards those of its forward", _newest, stashed=False, versions=1,
        corrects=True, copies=2, update_cost=3.0,
    ),
}  # fmt: skip
