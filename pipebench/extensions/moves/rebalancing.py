"""The search in Algorithm 1 of vPipe: better cuts and policies from the measured times and memory of stages.

Paper: vPipe (TPDS'21), sections 4.1 and 4.2. If stage times are unbalanced, Algorithm 3 finds new cuts for the layers'
times, and Algorithm 2 chooses the new stages' policies, which change the times. This repeats until stages are balanced
or nothing improves. Stage times include recomputation and waits for copies to the host.

Differs: the listing does not define unbalanced. Here the slowest stage exceeds the mean by `UNBALANCED`, or a stage
does not fit in memory. If any layer recomputes or swaps, cuts are then improved by hill climbing (`_climbed`).

Measurements correct the profile. A layer's time is multiplied by its stage's measured time over its profiled time. A
stage's bytes by equation 1 are multiplied by the measured over the predicted bytes of a current stage that has some of
its layers: the largest such ratio, and at least 1, since a stage may not have reached its peak yet.
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

UNBALANCED = 0.05  # (slowest stage's time / mean) - 1 above which stages are cut anew
WORTHWHILE = 0.01  # share by which the slowest stage must become faster
_MOST_ROUNDS = 10  # of cuts, then policies; the paper needs 3 to 9
_MOST_LOOKED_AT = 100  # cuts that `_climbed` evaluates
_SLOW = 0.999  # a stage with this share of the slowest stage's time is a bottleneck, too
_SAME = 1e-9  # relative rounding of floats
_MOST_LABELS = 512  # of `best_policies`, for which training waits

ProblemOf = Callable[[int, int, int], StageProblem]  # (stage, start, stop): layers [start, stop) as that stage


class StageTimes(NamedTuple):
    """Measurements of one stage."""

    seconds: float  # forward and backward of a unit
    num_bytes: float = 0.0  # peak; 0 if unknown


class Proposal(NamedTuple):
    """Cuts and policies, and their cost."""

    layout: CutLayout
    stage_s: tuple[float, ...]  # by stage: a unit's forward and backward, recomputation and waits for copies included
    num_unfit: int  # stages that don't fit in memory

    @property
    def badness(self) -> tuple[int, list[float]]:
        """Sort key, smaller is better: stages that don't fit, then stage times from the slowest down."""
        return self.num_unfit, sorted(self.stage_s, reverse=True)


@dataclass(frozen=True)
class RepartitionSearch:
    """Searches for better cuts and policies, given measurements under the current ones."""

    rows: Sequence[LayerProfile]  # the profile of the layers and, last, of the loss, at the size of a unit
    layout: CutLayout  # the current cuts and policies
    measured: Sequence[StageTimes]  # by stage
    problem_of: ProblemOf  # a stage's memory, and the policies that its layers may choose
    may_start: Collection[int] | None = None  # layers that a stage may begin with; None: any but the first
    # A cache of policies chosen, by units in flight, first layer, the layer after the last, and limit in bytes
    known: dict[tuple[int, int, int, float], StageOutcome] = field(default_factory=dict)

    @property
    def is_needed(self) -> bool:
        """Whether stages are unbalanced, or one does not fit in memory."""
        stage_s = [each.seconds for each in self.measured]
        return max(stage_s) > (1 + UNBALANCED) * sum(stage_s) / len(stage_s) or self.now.num_unfit > 0

    @cached_property
    def predicted_bytes(self) -> tuple[float, ...]:
        """Peak bytes of every current stage by the closed form of equation 1."""
        memory = self.layout.memory
        problems = (
            self.problem_of(stage, *layers) for stage, layers in enumerate(itertools.pairwise(self.layout.ends))
        )
        return tuple(problem.outcome(memory[problem.start : problem.stop]).num_bytes for problem in problems)

    @cached_property
    def now(self) -> Proposal:
        """The current layout, as a proposal."""
        memory = self.layout.memory
        return self._proposal(self.layout.starts, lambda problem: problem.outcome(memory[problem.start : problem.stop]))

    def next_step(self) -> CutLayout | None:
        """Return the next layout towards the best one; None if none is needed, or none is better.

        No layer moves further than to a neighbouring stage, and the number of stages that don't fit does not grow.
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
        """Return cuts with policies chosen again for this search's limits; None if they don't fit, or are too slow."""
        step = self.chosen(starts)
        is_slower = max(step.stage_s) > max(self.now.stage_s) and not self.now.num_unfit
        return None if step.num_unfit or is_slower or step.layout == self.layout else step.layout

    def best(self) -> Proposal | None:
        """Return the best proposal with fewer stages that don't fit or a clearly faster slowest stage, or None."""
        found = [*self._searched(None)]
        if any(each.num_unfit for each in found):  # only then, since it evaluates memory for all possible stages
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
        """Yield layouts by Algorithms 3 and 2 in turn: cuts for the times under the last policies, while they improve.

        `fits`, if given, restricts cuts to stages that fit in memory.
        """
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
        """Return a proposal improved by hill climbing: the slowest stages give layers to others.

        Differs: not in the paper. A layer's recomputation and copies change with the cuts, so that Algorithm 3, which
        takes them for constant, moves too many layers.
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
        """Return whether cuts may be better than a proposal, without choosing their policies.

        By lower bounds: a stage takes at least the time of its layers if all save their activations. A stage that has
        only gained layers recomputes and waits at least as long as before.
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
        """Return the seconds of a stage whose layers all save their activations; the last stage has the loss."""
        return self._begun_s[stop + (stop == len(self.layout.memory))] - self._begun_s[start]

    @cached_property
    def _begun_s(self) -> list[float]:
        """Prefix sums of the layers' seconds: entry i has those of all layers before i."""
        return [0.0, *itertools.accumulate(row.forward_s + row.backward_s for row in self._scaled)]

    def _lighter(self, found: Proposal, stage: int) -> Iterator[Starts]:
        """Yield cuts under which a stage has fewer layers.

        A neighbour gets one layer, or as many as make both equally slow, or half of these. For a stage further away,
        one layer is passed on across every boundary in between.
        """
        begun_s = [0.0, *itertools.accumulate(self._lasting(found))]
        ends, stage_s = found.layout.ends, found.stage_s
        places = [*range(1, ends[-1])] if self.may_start is None else sorted(self.may_start)
        for other in range(len(stage_s)):
            between = range(min(stage, other) + 1, max(stage, other) + 1)  # boundaries
            step = 1 if other < stage else -1  # direction in which the boundaries move
            counts = {1}  # layers to pass on
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
        """Yield every layer's seconds, the loss last, scaled so that stages add up to a proposal's times."""
        own_s = [row.forward_s + row.backward_s for row in self._scaled]
        for layers, stage_s in zip(_with_loss(given.layout.ends), given.stage_s, strict=True):
            whole_s = sum(own_s[layer] for layer in layers)
            yield from (own_s[layer] * (stage_s / whole_s if whole_s else 1.0) for layer in layers)

    def _can_fit(self, stage: int, start: int, stop: int) -> bool:
        """Return whether a stage fits if all its layers have one policy; without a choice, if it fits as it is."""
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
        """Return the problem of a stage, corrected by measured seconds and bytes."""
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
        """The profile with measured times, recomputation left out."""
        return [*as_measured(self.rows, self.layout, [each.seconds for each in self.measured])]


def as_measured(rows: Sequence[LayerProfile], layout: CutLayout, stage_s: Sequence[float]) -> Iterator[LayerProfile]:
    """Yield the layers' profile with measured times.

    Args:
        rows: the profile of the layers and, last, of the loss.
        layout: the layout that was measured.
        stage_s: measured seconds of a unit's forward and backward, by stage; the last stage's include the loss.
    """
    again = [policy == RECOMPUTE for policy in (*layout.memory, layout.memory[-1])]
    for layers, measured_s in zip(_with_loss(layout.ends), stage_s, strict=True):
        expected_s = sum(rows[layer].forward_s * (1 + again[layer]) + rows[layer].backward_s for layer in layers)
        for row in rows[layers.start : layers.stop]:
            if expected_s:
                factor = measured_s / expected_s
                yield replace(row, forward_s=row.forward_s * factor, backward_s=row.backward_s * factor)
            else:  # the profile has no times: layers get equal shares
                yield replace(row, forward_s=0.0, backward_s=measured_s / len(layers))


def _with_loss(ends: Sequence[int]) -> list[range]:
    """Return the rows of every stage's layers; the last stage has the loss, too."""
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
    """Return a function that makes the `StageProblem` of any layers as any stage of a straight pipeline.

    Args:
        profile: the model's.
        pipeline: the pipeline, the same under all cuts.
        num_samples: size of a unit.
        limit_bytes: memory of a device; infinite for no limit.
        pcie_bytes_per_s: rate of copies between a device and its host; None if unknown.
        chooses: policies besides keep that layers may choose; none: layers keep theirs.
    """
    policy, in_flight = WEIGHT_POLICIES[pipeline.weights], most_in_flight(pipeline)
    rows, versions = profile.by_size[num_samples], policy.versions
    fed = input_bytes_of(rows)

    @cache
    def problem_of(stage: int, start: int, stop: int) -> StageProblem:
        weights, stepped, untrained = ParameterBytes.of(rows[start:stop])
        copies = policy.moves(pipeline, stage) * policy.copies
        constant = untrained + stepped * (profile.has_masters + profile.state_bytes_per_byte)
        constant += weights * (1 + copies + (versions or 0))  # 1 is for the gradients
        return StageProblem(
            rows, start, stop, in_flight[stage], limit_bytes, constant, 0 if versions else weights, pcie_bytes_per_s,
            chooses, fed,
        )  # fmt: skip

    return problem_of


def one_step(starts: Sequence[int], wanted: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the cuts nearest to the wanted ones such that no layer moves further than to a neighbouring stage."""
    ends = [0, *starts, num_layers]
    found: list[int] = []
    for boundary, start in enumerate(wanted, 1):
        nearest = min(max(start, ends[boundary - 1] + 1), ends[boundary + 1] - 1)
        found.append(max(nearest, found[-1] + 1) if found else nearest)
    return tuple(found)
