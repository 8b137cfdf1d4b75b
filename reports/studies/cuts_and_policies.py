"""The best cuts and policies together: what vPipe's algorithms are measured against.

Paper: vPipe (TPDS'21) section 4.1, objective (3) under (1) and (2): the slowest stage's forward and backward, with what
it computes again and waits for copies. By dynamic programming over stages and places to cut, with the best policies of
every stage that can still be part of the answer: exact where those are (see `swap_recompute`), and a matter of minutes
beyond some tens of layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipebench.planner.stage_problem import StageOutcome, StageProblem
from pipebench.planner.swap_recompute import best_policies

StageOf = Callable[[int, int, int], StageProblem]  # the stage of an index, its first layer, the layer after its last


@dataclass(frozen=True)
class CutsAndPolicies:
    """Cuts and policies."""

    slowest_s: float  # seconds of the slowest stage's forward and backward
    outcomes: tuple[StageOutcome, ...]  # what every stage does with its layers

    @property
    def starts(self) -> tuple[int, ...]:
        """First layers of the stages after the first."""
        return tuple(outcome.problem.start for outcome in self.outcomes[1:])

    @property
    def is_exact(self) -> bool:
        """Whether every stage's policies are the best."""
        return all(outcome.is_exact for outcome in self.outcomes)


def lasts_s(outcome: StageOutcome) -> float:
    """Return the seconds of a stage's forward and backward, with what its policies add."""
    return outcome.problem.window_s + outcome.extra_s


def best_cuts_and_policies(
    stage_of: StageOf, places: Sequence[int], num_layers: int, num_stages: int
) -> CutsAndPolicies | None:
    """Return the stages and policies whose slowest stage is fastest, or None if none fit.

    `stage_of` makes a stage's problem, `places` are layers that all but the first may begin with.
    """
    ends = [0, *places, num_layers]
    reached: dict[int, CutsAndPolicies] = {
        0: CutsAndPolicies(0.0, ())
    }  # by the number of the end where the stages so far end
    for part in range(num_stages):
        last = len(ends) - 1 - (num_stages - part - 1)
        following: dict[int, CutsAndPolicies] = {}
        for stop in range(part + 1, last + 1) if part < num_stages - 1 else (last,):
            found = _best_to(stage_of, ends, part, stop, reached)
            if found is not None:
                following[stop] = found
        reached = following
    return reached.get(len(ends) - 1)


def _best_to(
    stage_of: StageOf, ends: Sequence[int], part: int, stop: int, reached: dict[int, CutsAndPolicies]
) -> CutsAndPolicies | None:
    """Return the best stages up to an end, whose last is the one of an index."""
    best: CutsAndPolicies | None = None

    def is_too_slow(seconds: float) -> bool:
        return best is not None and seconds >= best.slowest_s

    for start in sorted((start for start in reached if start < stop), reverse=True):
        problem = stage_of(part, ends[start], ends[stop])
        if is_too_slow(problem.window_s):  # longer stages are slower still
            break
        if is_too_slow(reached[start].slowest_s):
            continue
        outcome = best_policies(problem)
        slowest_s = max(reached[start].slowest_s, lasts_s(outcome))
        if outcome.fits and not is_too_slow(slowest_s):
            best = CutsAndPolicies(slowest_s, (*reached[start].outcomes, outcome))
    return best
