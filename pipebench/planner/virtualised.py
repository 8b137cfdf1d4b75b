"""Straight plans whose stages choose each layer's policy so that they fit, as in vPipe.

Paper: vPipe (TPDS'21) section 4. The model is cut by its layers' times without memory limits. Then every stage chooses
what to keep, swap and recompute (`swap_recompute`). Unless the recipe fixes the cuts, the model is cut again by the
resulting times, and so on.

A stage's memory is first a closed form and then simulated. If a stage exceeds its memory there, because transfers
queue, it chooses again with that much less memory.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from pipebench.errors import PlanError
from pipebench.formats import a_or_an, num_bytes
from pipebench.planner.estimates import Estimator
from pipebench.planner.flat import FlatProblem, SearchStage, bottleneck_s, plan_flat, stages_between
from pipebench.planner.partition import LayerChain, best_consecutive, repartition, timed_graph
from pipebench.planner.plans import PlanEstimate
from pipebench.planner.stage_problem import StageProblem
from pipebench.planner.swap_recompute import best_policies

_MOST_TRIALS = 8  # choices of policies; two or three suffice if any do
_MOST_REPARTITIONS = 10  # the paper says 3 to 9
_GAINS = 0.999  # times the bottleneck, at most, to continue with other cuts
_SHARES = (1.0, 0.95, 0.9, 0.8)  # of a device's memory for the closed form; the rest is for what it leaves out
_AGAIN = ", repartitioned"


class UnfitError(PlanError):
    """A stage doesn't fit with any policies."""


def virtualised(estimator: Estimator, stages: Sequence[SearchStage], found_by: str) -> PlanEstimate:
    """Return a plan whose stages choose their layers' policies, without a prediction.

    Raises:
        UnfitError: a stage doesn't fit; says which, and by how much.
    """
    limit = estimator.memory_limit_bytes
    problems = _problems(estimator, stages)
    outcomes = [best_policies(problem) for problem in problems]
    for _ in range(_MOST_TRIALS):
        memory = tuple(policy for outcome in outcomes for policy in outcome.memory)
        found = estimator.under(memory=memory).estimate(found_by, stages)
        if math.isinf(limit):
            return found
        over = [most - limit for most in _most_bytes(estimator, found)]
        late = [index for index, excess in enumerate(over) if excess > 0]
        if not late:
            return found
        if not all(outcomes[index].fits for index in late):
            break
        for index in late:
            problems[index] = replace(problems[index], limit_bytes=problems[index].limit_bytes - over[index])
            outcomes[index] = best_policies(problems[index])
    index = max(range(len(over)), key=lambda stage: over[stage])
    weights = problems[index].constant_bytes + problems[index].in_flight * problems[index].each_bytes
    smaller = ", or a smaller minibatch" if weights <= limit else ""
    raise UnfitError(
        f"stage {index} of mode {estimator.name} doesn't fit whatever its layers do: they take "
        f"{num_bytes(over[index])} more than the {num_bytes(limit)} of {a_or_an(estimator.request.cluster.device)}; "
        f"what would help: more workers, for more stages{smaller}"
    )


def best_virtualised(estimator: Estimator) -> PlanEstimate:
    """Return the best straight plan found whose stages choose their layers' policies, without a prediction.

    Starts from the best cuts for the layers' times or, if these can't fit, the best that can. Then, as in vPipe's
    Algorithm 1, every layer's time is scaled to its stage's time, Algorithm 3 cuts by these times, and so on until
    nothing improves.

    Raises:
        UnfitError: no plan was found that fits.
    """
    stages = _fastest(estimator)
    try:
        best = virtualised(estimator, stages, "flat, straight, policies chosen per stage")
    except UnfitError as unfit:
        stages, best = _best_that_fit(estimator, len(stages), unfit)
    for _ in range(_MOST_REPARTITIONS):
        before, stages = stages, _repartitioned(estimator, best)
        if stages == before:
            break
        try:
            found = virtualised(estimator, stages, f"{best.found_by.removesuffix(_AGAIN)}{_AGAIN}")
        except UnfitError:
            break
        if found.bottleneck_s >= best.bottleneck_s * _GAINS:
            break
        best = found
    return best


def _repartitioned(estimator: Estimator, found: PlanEstimate) -> tuple[SearchStage, ...]:
    """Return Algorithm 3's stages for layers scaled to their stages' times."""
    states, rows = estimator.work.states, estimator.request.profile.layers[estimator.unit_size]
    own_s = timed_graph(rows).seconds
    scaled_s = [0.0] * len(rows)  # `timed_graph` adds the loss to the last layer
    for place, stage in zip(found.plan.stages, found.stages, strict=True):
        layers = range(place.start, place.stop)
        whole_s = sum(own_s[layer] for layer in layers)
        for layer in layers:
            scaled_s[layer] = own_s[layer] * (stage.stage_s / found.microbatches / whole_s if whole_s else 1.0)
    line = LayerChain(timed_graph(rows, scaled_s), sorted(states.after)[1:-1])
    ends = line.ends(repartition(line, found.plan.starts))
    return stages_between([states.after[end] for end in ends], [1] * (len(ends) - 1))


def predicted(estimator: Estimator, found: PlanEstimate) -> PlanEstimate:
    """Return a plan with policies per layer and the simulator's prediction."""
    return estimator.under(memory=found.plan.memory).with_prediction(found)


def _problems(estimator: Estimator, stages: Sequence[SearchStage]) -> list[StageProblem]:
    replicas = [stage.replicas for stage in stages]
    depth = estimator.depth_of(replicas)
    rules = estimator.stage_rules(estimator.memory_limit_bytes, replicas, depth)
    return [
        estimator.stage_problem(rule, stage, estimator.in_flight(replicas, index, depth))
        for index, (rule, stage) in enumerate(zip(rules, stages, strict=True))
    ]


def _most_bytes(estimator: Estimator, found: PlanEstimate) -> list[float]:
    """Return every stage's peak bytes: simulated or, if that would take long, by the closed form."""
    peaks = estimator.simulated_peaks(found)
    return [stage.memory_bytes for stage in found.stages] if peaks is None else [*map(float, peaks)]


def _fastest(estimator: Estimator) -> tuple[SearchStage, ...]:
    """Return the straight plan with the smallest bottleneck at any level's links, without memory limits."""
    cluster, work, model = estimator.request.cluster, estimator.work, estimator.request.model
    problems = [FlatProblem(work, model, level, cluster.num_workers, None, 1) for level in cluster.levels]
    found = [(problem, stages) for problem in problems if (stages := plan_flat(problem)) is not None]
    return min(found, key=lambda each: bottleneck_s(*each))[1]


def _best_that_fit(
    estimator: Estimator, num_stages: int, unfit: UnfitError
) -> tuple[tuple[SearchStage, ...], PlanEstimate]:
    """Return the fastest stages that fit with some policies by the closed form and in simulation, and their plan."""
    for share in _SHARES:
        stages = _that_fit(estimator, num_stages, share)
        if stages is not None:
            with suppress(UnfitError):
                return stages, virtualised(
                    estimator, stages, "straight, cut for what can fit, policies chosen per stage"
                )
    raise unfit


def _that_fit(estimator: Estimator, num_stages: int, share: float) -> tuple[SearchStage, ...] | None:
    """Return the fastest straight stages that each fit in a share of a device's memory with one policy, or None."""
    state_of = estimator.work.states.after

    def fits(part: int, start: int, stop: int) -> bool:
        stages = [SearchStage(state_of[start], state_of[stop], 1)] * num_stages
        problem = _problems(estimator, stages)[part]
        least = min(problem.outcome((policy,) * problem.num_layers).num_bytes for policy in problem.choices)
        return least <= share * problem.limit_bytes

    line = LayerChain(timed_graph(estimator.request.profile.layers[estimator.unit_size]), sorted(state_of)[1:-1], fits)
    try:
        ends = [state_of[end] for end in line.ends(best_consecutive(line, num_stages))]
    except PlanError:
        return None
    return stages_between(ends, [1] * num_stages)
