"""The planning part of vPipe's Algorithm 1: better cuts and policies from the measured times and memory of stages.

Paper: vPipe (TPDS'21) sections 4.1 and 4.2. If stage times are unbalanced, Algorithm 3 cuts anew and Algorithm 2
chooses the new stages' policies, until stages are balanced or nothing improves. Recomputation and waits for copies
count.
Differs: the listing does not define unbalanced: here the slowest stage exceeds the mean by `UNBALANCED`, or a stage
does not fit in memory.

Measurements correct predictions: a layer's time is scaled by its stage's measured over profiled time. A stage's bytes
by equation 1 are scaled by the largest measured ratio of a stage that had some of its layers, never below 1, since a
stage may not have reached its peak yet.
"""

import bisect
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from operator import attrgetter
from typing import NamedTuple

from pipebench.extensions.moves.repartition_plan import CutLayout, Starts
from pipebench.planner.partition import TOLERANCE, Fits, LayerChain, repartition, timed_graph
from pipebench.planner.stage_problem import StageOutcome, StageProblem, input_bytes_of
from pipebench.planner.swap_recompute import best_policies
from pipebench.profile.model import LayerProfile, ParameterBytes, Profile
from pipebench.schedule.modes import KEEP, RECOMPUTE
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.programs import most_in_flight
from pipebench.schedule.weights import WEIGHT_POLICIES

UNBALANCED = 0.05  # slowest stage over mean, less 1
WORTHWHILE = 0.01  # least relative gain of the slowest stage
_MOST_ROUNDS = 10  # of cutting for times under new policies; the paper says 3 to 9
_MOST_LOOKED_AT = 100  # cuts, on the way to better ones
_SLOW = 0.999  # of the slowest stage's time: also a bottleneck
_SAME = 1e-9  # floats' own rounding, as a share
_MOST_LABELS = 512  # of the policy search, for which training waits

ProblemOf = Callable[[int, int, int], StageProblem]  # from (stage, start, stop)


class StageTimes(NamedTuple):
    """Measurements of one stage."""

    seconds: float  # forward and backward of a unit
    num_bytes: float = 0.0  # peak; 0 if unknown


class Proposal(NamedTuple):
    """Cuts and policies, and their cost."""

    layout: CutLayout
    stage_s: tuple[float, ...]  # forward and backward of a unit by stage, with recomputation and waits for copies
    num_unfit: int  # stages that don't fit in memory

    @property
    def badness(self) -> tuple[int, list[float]]:
        """Sort key: stages that don't fit, then stage times from the slowest."""
        return self.num_unfit, sorted(self.stage_s, reverse=True)


@dataclass(frozen=True)
class RepartitionSearch:
    """Search for better cuts and policies of measured stages."""

    rows: Sequence[LayerProfile]  # the profile's layers and, last, the loss, at the size of a unit
    layout: CutLayout  # the current cuts and policies
    measured: Sequence[StageTimes]  # by stage
    problem_of: ProblemOf  # memory of stages and the policies to choose from; none: layers keep their policies
    may_start: Collection[int] | None = None  # layers that a stage may begin with; None: any but the first
    # Choices for stages of these times, by units in flight, layers and memory
    known: dict[tuple[int, int, int, float], StageOutcome] = field(default_factory=dict)

    @property
    def is_needed(self) -> bool:
        """Whether stages are unbalanced, or one does not fit."""
        stage_s = [each.seconds for each in self.measured]
        return max(stage_s) > (1 + UNBALANCED) * sum(stage_s) / len(stage_s) or self.now.num_unfit > 0

    @cached_property
    def predicted_bytes(self) -> tuple[float, ...]:
        """Peak bytes of every current stage by the closed form."""
        memory = self.layout.memory
        problems = (
            self.problem_of(stage, *layers) for stage, layers in enumerate(itertools.pairwise(self.layout.ends))
        )
        return tuple(problem.outcome(memory[problem.start : problem.stop]).num_bytes for problem in problems)

    @cached_property
    def now(self) -> Proposal:
        """The current layout."""
        memory = self.layout.memory
        return self._proposal(self.layout.starts, lambda problem: problem.outcome(memory[problem.start : problem.stop]))

    def next_step(self) -> CutLayout | None:
        """Return the next layout towards the best, or None if none is needed or better.

        No layer moves further than to the next stage, and the number of stages that don't fit does not grow.
        """
        if not self.is_needed:
            return None
        best = self.best()
        if best is None:
            return None
        starts = one_step(self.layout.starts, best.layout.starts, len(self.layout.memory))
        step = best if starts == best.layout.starts else self.chosen(starts)
        return step.layout if step.num_unfit <= self.now.num_unfit and step.layout != self.layout else None

    def chosen_again(self, starts: Sequence[int]) -> CutLayout | None:
        """Re-evaluate cuts with less memory than before; None: they don't fit, or are no longer worth it."""
        step = self.chosen(starts)
        is_slower = max(step.stage_s) > max(self.now.stage_s) and not self.now.num_unfit
        return None if step.num_unfit or is_slower or step.layout == self.layout else step.layout

    def best(self) -> Proposal | None:
        """Return the best proposal with fewer stages that don't fit or a clearly faster slowest stage, or None."""
        found = [*self._searched(None)]
        if any(each.num_unfit for each in found):  # expensive: evaluates all possible stages
            found += self._searched(self._can_fit)
        best = min(found, key=attrgetter("badness"))
        if any({*each.layout.memory} != {KEEP} for each in found):
            best = min(map(self._climbed, (best, found[0])), key=attrgetter("badness"))
        now = self.now
        is_faster = max(best.stage_s) <= (1 - WORTHWHILE) * max(now.stage_s)
        return best if (best.num_unfit, not is_faster) < (now.num_unfit, True) else None

    def chosen(self, starts: Sequence[int]) -> Proposal:
        """Return cuts with the fastest policies that fit."""
        return self._proposal(starts, self._chosen_of)

    def _chosen_of(self, problem: StageProblem) -> StageOutcome:
        """Return the best policies of a stage, or the current ones if it has no choice."""
        key = problem.in_flight, problem.start, problem.stop, problem.limit_bytes
        if key not in self.known:
            if problem.chooses:
                self.known[key] = best_policies(problem, _MOST_LABELS)
            else:
                self.known[key] = problem.outcome(self.layout.memory[problem.start : problem.stop])
        return self.known[key]

    def _searched(self, fits: Fits | None) -> Iterator[Proposal]:
        """Yield Algorithm 3's cuts for the times under the chosen policies, repeatedly while they improve."""
        found = self.chosen(self.layout.starts)
        yield found
        for _ in range(_MOST_ROUNDS):
            before, line = found, LayerChain(timed_graph(self.rows, [*self._lasting(found)]), self.may_start, fits)
            cuts = (repartition(line, before.layout.starts, tolerance) for tolerance in (TOLERANCE, 0.0))
            starts = min(cuts, key=lambda each: (not line.fit(each), line.slowest_s(each)))
            if starts == before.layout.starts:
                break
            found = self.chosen(starts)
            yield found
            if found.badness >= before.badness:
                break

    def _climbed(self, found: Proposal) -> Proposal:
        """Return a proposal improved at single boundaries of the slowest stages.

        What a layer costs under its policy changes with the cuts, so Algorithm 3 overshoots.
        """
        left = _MOST_LOOKED_AT
        while left > 0:
            before, stage_s = found, found.stage_s
            slow = [stage for stage, each_s in enumerate(stage_s) if each_s >= _SLOW * max(stage_s)]
            for stage in sorted(slow, key=stage_s.__getitem__, reverse=True):
                lighter = (each for each in self._lighter(before, stage) if self._may_be_better(each, before))
                others = [self.chosen(starts) for starts in itertools.islice(lighter, left)]
                found, left = min([before, *others], key=attrgetter("badness")), left - len(others)
                if found is not before:
                    break
            if found is before:
                break
        return found

    def _may_be_better(self, starts: Sequence[int], found: Proposal) -> bool:
        """Return whether cuts may beat a proposal.

        A stage takes at least its layers' time if they keep all; one that only gained layers recomputes and waits no
        less than before.
        """
        if found.num_unfit:
            return True
        ends, slowest_s = (0, *starts, len(self.layout.memory)), 0.0
        layers = zip(itertools.pairwise(ends), itertools.pairwise(found.layout.ends), found.stage_s, strict=True)
        for (start, stop), (first, end), stage_s in layers:
            more_s = stage_s - self._kept_s(first, end) if start <= first and end <= stop else 0.0
            slowest_s = max(slowest_s, self._kept_s(start, stop) + more_s)
        return slowest_s <= max(found.stage_s) * (1 + _SAME)

    def _kept_s(self, start: int, stop: int) -> float:
        """Return the time of a stage that keeps all; the loss goes with the last."""
        return self._begun_s[stop + (stop == len(self.layout.memory))] - self._begun_s[start]

    @cached_property
    def _begun_s(self) -> list[float]:
        """Seconds of all layers before each."""
        return [0.0, *itertools.accumulate(row.forward_s + row.backward_s for row in self._scaled)]

    def _lighter(self, found: Proposal, stage: int) -> Iterator[Starts]:
        """Yield cuts under which a stage has fewer layers.

        A neighbour gets one layer, half of what equalizes the two, or all of it; a stage further away gets one, as does
        every stage in between.
        """
        begun_s = [0.0, *itertools.accumulate(self._lasting(found))]
        ends, stage_s = found.layout.ends, found.stage_s
        places = [*range(1, ends[-1])] if self.may_start is None else sorted(self.may_start)
        for other in range(len(stage_s)):
            between = range(min(stage, other) + 1, max(stage, other) + 1)  # boundaries
            step, counts = (1 if other < stage else -1), {1}
            if len(between) == 1:
                (first,) = (bisect.bisect_left(places, ends[each]) for each in between)
                given = places[first::step]
                more_s = [2 * abs(begun_s[place] - begun_s[given[0]]) for place in given]
                even = bisect.bisect_right(more_s, stage_s[stage] - stage_s[other]) - 1
                counts |= {even // 2, even} - {0, -1}
            for count in sorted(counts) if between else ():
                moved = {each: bisect.bisect_left(places, ends[each]) + step * count for each in between}
                if all(0 <= index < len(places) for index in moved.values()):
                    cuts = [places[moved[each]] if each in moved else end for each, end in enumerate(ends)]
                    if all(a < b for a, b in itertools.pairwise(cuts)):
                        yield tuple(cuts[1:-1])

    def _lasting(self, given: Proposal) -> Iterator[float]:
        """Yield every layer's seconds, the loss last, scaled to its stage's time."""
        own_s = [row.forward_s + row.backward_s for row in self._scaled]
        for layers, stage_s in zip(_with_loss(given.layout.ends), given.stage_s, strict=True):
            whole_s = sum(own_s[layer] for layer in layers)
            yield from (own_s[layer] * (stage_s / whole_s if whole_s else 1.0) for layer in layers)

    def _can_fit(self, stage: int, start: int, stop: int) -> bool:
        """Return whether a stage fits under a uniform policy, or under its current ones if it has no choice."""
        problem = self._problem(stage, start, stop)
        if not problem.chooses:
            return problem.outcome(self.layout.memory[start:stop]).fits
        return any(problem.outcome((policy,) * problem.num_layers).fits for policy in problem.choices)

    def _proposal(self, starts: Sequence[int], outcome_of: Callable[[StageProblem], StageOutcome]) -> Proposal:
        ends = (0, *starts, len(self.layout.memory))
        outcomes = [outcome_of(self._problem(stage, *layers)) for stage, layers in enumerate(itertools.pairwise(ends))]
        memory = tuple(policy for outcome in outcomes for policy in outcome.memory)
        stage_s = tuple(outcome.problem.window_s + outcome.extra_s for outcome in outcomes)
        return Proposal(CutLayout(tuple(starts), memory), stage_s, sum(not outcome.fits for outcome in outcomes))

    def _problem(self, stage: int, start: int, stop: int) -> StageProblem:
        """Return a stage scaled to measured seconds and bytes."""
        problem = self.problem_of(stage, start, stop)
        held = zip(itertools.pairwise(self.layout.ends), self.measured, self.predicted_bytes, strict=True)
        more = [
            measured.num_bytes / predicted
            for (first, end), measured, predicted in held
            if predicted > 0 and max(first, start) < min(end, stop)
        ]
        return replace(problem, rows=self._scaled, limit_bytes=problem.limit_bytes / max([1.0, *more]))

    @cached_property
    def _scaled(self) -> list[LayerProfile]:
        """Layers at their measured times, without recomputation."""
        return [*as_measured(self.rows, self.layout, [each.seconds for each in self.measured])]


def as_measured(rows: Sequence[LayerProfile], layout: CutLayout, stage_s: Sequence[float]) -> Iterator[LayerProfile]:
    """Yield layers scaled to measured forward and backward seconds of their stages; the last stage's include the loss.

    `rows` are the profile's layers and, last, the loss; `layout` is that of the measurement.
    """
    again = [policy == RECOMPUTE for policy in (*layout.memory, layout.memory[-1])]
    for layers, measured_s in zip(_with_loss(layout.ends), stage_s, strict=True):
        expected_s = sum(rows[layer].forward_s * (1 + again[layer]) + rows[layer].backward_s for layer in layers)
        for row in rows[layers.start : layers.stop]:
            if expected_s:
                factor = measured_s / expected_s
                yield replace(row, forward_s=row.forward_s * factor, backward_s=row.backward_s * factor)
            else:  # no profiled times: equal shares
                yield replace(row, forward_s=0.0, backward_s=measured_s / len(layers))


def _with_loss(ends: Sequence[int]) -> list[range]:
    """Return the layers of every stage; the loss goes with the last."""
    *others, last = itertools.pairwise(ends)
    return [*(range(*layers) for layers in others), range(last[0], last[1] + 1)]


def problems_of(
    profile: Profile,
    pipeline: Pipeline,
    num_samples: int,
    limit_bytes: float,
    pcie_bytes_per_s: float | None,
    chooses: tuple[str, ...],
) -> ProblemOf:
    """Return the `StageProblem` of any layers as any stage of a straight pipeline, for units of `num_samples`.

    `limit_bytes` is of a device, infinite for no limit, `pcie_bytes_per_s` the copy rate to its host, None if unknown;
    `chooses` has policies besides keep; none: layers keep theirs.
    """
    policy, in_flight = WEIGHT_POLICIES[pipeline.weights], most_in_flight(pipeline)
    rows, versions = profile.by_size[num_samples], policy.versions
    fed = input_bytes_of(rows)

    @cache
    def problem_of(stage: int, start: int, stop: int) -> StageProblem:
        weights, stepped, untrained = ParameterBytes.of(rows[start:stop])
        copies = policy.moves(pipeline, stage) * policy.copies
        constant = untrained + stepped * (profile.has_masters + profile.state_bytes_per_byte)
        constant += weights * (1 + copies + (versions or 0))  # 1: gradients
        return StageProblem(
            rows, start, stop, in_flight[stage], limit_bytes, constant, 0 if versions else weights, pcie_bytes_per_s,
            chooses, fed,
        )  # fmt: skip

    return problem_of


def one_step(starts: Sequence[int], wanted: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the cuts nearest to the wanted ones such that no layer moves further than to the next stage."""
    ends = [0, *starts, num_layers]
    found: list[int] = []
    for boundary, start in enumerate(wanted, 1):
        nearest = min(max(start, ends[boundary - 1] + 1), ends[boundary + 1] - 1)
        found.append(max(nearest, found[-1] + 1) if found else nearest)
    return tuple(found)
