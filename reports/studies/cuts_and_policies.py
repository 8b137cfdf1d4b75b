"""The best cuts and memory policies together: the optimum that vPipe's algorithms are compared with.

Paper: vPipe (TPDS'21) section 4.1, objective (3) under (1) and (2): least seconds of the slowest stage's forward and
backward, including recomputation and waiting for swaps. Dynamic programming over stages and places to cut, with the
best policies of every stage that can still be part of the answer. The result is exact if all these policies are (see
`pipebench.planner.swap_recompute`); beyond some tens of layers it takes minutes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipebench.planner.stage_problem import StageOutcome, StageProblem
from pipebench.planner.swap_recompute import best_policies

StageOf = Callable[[int, int, int], StageProblem]  # the stage of an index, its first layer, the layer after its last


@dataclass(frozen=True)
class CutsAndPolicies:
    """A pipeline's stages with their policies."""

    slowest_s: float  # seconds of the slowest stage's forward and backward
    outcomes: tuple[StageOutcome, ...]  # the policies of every stage and their costs

    @property
    def starts(self) -> tuple[int, ...]:
        """First layers of the stages after the first."""
        return tuple(outcome.problem.start for outcome in self.outcomes[1:])

    @property
    def is_exact(self) -> bool:
        """Whether every stage's policies are the best."""
        return all(outcome.is_exact for outcome in self.outcomes)


def lasts_s(outcome: StageOutcome) -> float:
    """Return the seconds of a stage's forward and backward, including what its policies add."""
    return outcome.problem.window_s + outcome.extra_s


def best_cuts_and_policies(
    stage_of: StageOf, places: Sequence[int], num_layers: int, num_stages: int
) -> CutsAndPolicies | None:
    """Return the cuts and policies with the fastest slowest stage; None if nothing fits in memory.

    Args:
        stage_of: makes the problem of a stage with certain layers.
        places: layers that a stage may begin with, ascending, without the first layer.
        num_layers: of the model.
        num_stages: of the pipeline.
    """
    ends = [0, *places, num_layers]
    # The best stages so far, by the index in `ends` of where they end.
    reached = {0: CutsAndPolicies(0.0, ())}
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
    """Return the best stages 0 to `part` that end at `ends[stop]`; `reached` are the best stages 0 to `part` - 1."""
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
