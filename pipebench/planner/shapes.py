"""Plans of a given shape, for schedules that aren't modes here: equal stages of one width, and chunks."""

from dataclasses import replace

from pipebench.planner.flat import FlatProblem, SearchStage, bottleneck_s, plan_flat


def plan_equal_width(problem: FlatProblem) -> tuple[SearchStage, ...] | None:
    """Return the best plan whose stages all have equally many replicas (PipeDream-2BW, section 4), or None."""
    widths = [width for width in range(1, problem.num_workers + 1) if problem.num_workers % width == 0]
    plans = [plan_flat(replace(problem, width=width)) for width in widths]
    found = [plan for plan in plans if plan is not None]
    return min(found, key=lambda plan: bottleneck_s(problem, plan), default=None)


def plan_chunks(problem: FlatProblem, per_worker: int) -> tuple[SearchStage, ...] | None:
    """Return cuts into at most `per_worker` chunks for each worker, the slowest chunk as fast as can be, or None.

    Chunk c runs on worker c mod the number of workers: an interleaved pipeline (Narayanan et al. 2021, section 2.2).
    """
    return plan_flat(replace(problem, num_workers=problem.num_workers * per_worker, width=1))
