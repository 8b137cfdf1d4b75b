"""The planner: the best plan of a mode on a cluster, and why.

Candidates are exact for the cost model, up to very many places to cut (see `thinning`): the flat plan at every level's
links, placed along the devices; the paper's hierarchical plan; the best straight plan; pure data parallelism; under
`overlap` also a few given shapes, cut best. Under `sosp19` and `artifact` the smallest bottleneck is chosen, as
published. Under `overlap`, and between modes, what the simulator predicts decides: a bottleneck says nothing about
flushes, and little about minibatches that wait for a transfer with no other in flight to take their turn.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial

from pipebench.cluster import Cluster
from pipebench.errors import PlanError
from pipebench.formats import num_bytes
from pipebench.planner.cost_models import Work
from pipebench.planner.fixed import plan_fixed
from pipebench.planner.flat import FlatProblem, Stage, any_fits, bottleneck_s, fits, flat_bound_s, plan_flat
from pipebench.planner.hierarchical import HierarchicalProblem, hierarchical_bound_s, plan_hierarchical
from pipebench.planner.loops import loops_s
from pipebench.planner.memory import MemoryRule
from pipebench.planner.payload import payload
from pipebench.planner.placement import along, cut_levels, placed_s, spanned
from pipebench.planner.plans import Planned, PlannedStage, Request
from pipebench.planner.predict import Course, arrange, arranged, course_of, predict
from pipebench.planner.seating import seatings
from pipebench.planner.states import States, antichains, prefixes
from pipebench.planner.thinning import is_thinned
from pipebench.profile.model import Profile
from pipebench.schedule.modes import MODES
from pipebench.schedule.notation import streams_problem
from pipebench.schedule.orders import ALL_FORWARDS
from pipebench.schedule.pipeline import STASH, noam
from pipebench.schedule.weights import VERTICAL_SYNC

# Components of one level: the hierarchical tables grow with their number, flat plans do not. 128 take seconds.
MOST_COMPONENTS = 128
_MOST_SIMULATED = 256  # workers; beyond, what is predicted is the cost model's bottleneck
_MOST_CUTS_OF_SHAPES = 500  # beyond, straight plans and given shapes would take longer than the search for any
_LONGEST_BLOCK = 512  # minibatches per round of all stages together; beyond, likewise
_MOST_SEATING_UNITS = 4000  # simulated to find where workers stand, microbatches times stages: a quarter of a second
_CLEARLY_FASTER = 0.99  # what a seating has to win against the one along the devices; below is prediction error


def searches_levels(cluster: Cluster) -> bool:
    """Return whether hierarchical plans are among the candidates; flat ones placed along the devices always are."""
    return all(level.count <= MOST_COMPONENTS for level in cluster.levels)


class Planner:
    """Plans one mode."""

    def __init__(
        self,
        request: Request,
        mode: str,
        *,
        known: dict[int, States] | None = None,
        tell: Callable[[str], None] = lambda _search: None,
    ) -> None:
        """Take a request.

        Args:
            request: what to plan.
            mode: the mode.
            known: states by the size that travels, made for other modes; those made here are added.
            tell: is told of every search that begins.
        """
        self.request = request
        self.name = mode
        self.mode = request.row or MODES[mode]
        self.search_s = self.predict_s = 0.0
        self._known = {} if known is None else known
        self._tell = tell
        self._thinned: list[tuple[float, Callable[[], float]]] = []  # bottlenecks found, and what bounds them

    def best(self) -> Planned:
        """Return the best plan.

        Raises:
            PlanError: none fits in memory.
        """
        started = time.perf_counter()
        fitting = list(self._found(self._rule))
        found = [plan for plan in fitting if streams_problem(plan.replicas, self.request.streams) is None]
        if not found and self.mode.weights in (STASH, VERTICAL_SYNC) and self.request.depth is None:
            found = list(self._shallower())
        self.search_s = time.perf_counter() - started
        if not found and fitting:
            problem = streams_problem(fitting[0].replicas, self.request.streams)
            raise PlanError(f"no plan of mode {self.name} keeps streams of text together: train.streams is {problem}")
        if not found:
            raise PlanError(_why_nothing_fits(self))
        if not self.mode.flush and not self.request.model.has_ports:
            found = [min(found, key=lambda plan: plan.bottleneck_s)]
        self._tell("simulating")
        best = min(map(self.predicted, found), key=lambda plan: plan.minibatch_s)
        self.predict_s = time.perf_counter() - started - self.search_s
        return best

    def at_most(self) -> float:
        """Return how many times the smallest bottleneck one that `best` searched for can be; 1 if all are exact."""
        worst = 1.0
        for found_s, bound in self._thinned:
            self._tell("bounding what a thinned search missed")
            bound_s = bound() if found_s > 0 else math.inf
            worst = max(worst, found_s / bound_s if bound_s > 0 else math.inf)
        return worst

    def given(self, replicas: Sequence[int], starts: Sequence[int] | None = None) -> Planned:
        """Return a plan that somebody else made, memory not weighed.

        Args:
            replicas: per stage.
            starts: first layers of the stages after the first; None: cut where the cost model wants it.

        Raises:
            PlanError: more stages than places to cut, or no place to cut before one of `starts`.
        """
        return self.predicted(self._seated(self._given_stages(replicas, starts)))

    def starts_of(self, replicas: Sequence[int]) -> list[int]:
        """Return the first layers of the stages after the first of a plan with these replicas, cut best.

        Raises:
            PlanError: more stages than places to cut.
        """
        return arrange(self.work.states, self._given_stages(replicas, None))[1]

    def devices_of(self, replicas: Sequence[int], starts: Sequence[int]) -> tuple[int, ...]:
        """Return the device of every worker of a given plan: those that suit it best, see `given`."""
        try:
            return self._seated(self._given_stages(replicas, starts)).devices
        except PlanError:  # it runs all the same, the cost model just has no place to cut there
            return tuple(range(sum(replicas)))

    def _given_stages(self, replicas: Sequence[int], starts: Sequence[int] | None) -> tuple[Stage, ...]:
        if starts is None:
            return plan_fixed(self.work, self.request.model, self.request.cluster, replicas)
        states = self.work.states
        found = {members.bit_count(): state for state, members in enumerate(states.members)}
        if not {*starts} <= {*found}:
            raise PlanError(f"the model can't be cut before layers {sorted({*starts} - {*found})}")
        bounds = [0, *(found[start] for start in starts), len(states) - 1]
        return tuple(Stage(a, b, r) for (a, b), r in zip(itertools.pairwise(bounds), replicas, strict=True))

    def _seated(self, stages: Sequence[Stage]) -> Planned:
        """Return the recipe's stages on the devices that suit them best.

        Along the devices unless another seating is predicted to be clearly faster: the simulator decides among those
        with the smallest bottlenecks, or the bottleneck itself if simulating takes long or isn't the cost model's way.
        A bottleneck says nothing about flushes, so that a flushing pipeline too large to simulate stays as it is.
        """
        request, flushes = self.request, self.mode.flush
        small = sum(stage.replicas for stage in stages) <= _MOST_SIMULATED
        choices = seatings(request.cluster, [stage.replicas for stage in stages]) if small else [None]
        in_order, *others = (self.placed("the recipe", stages, each, depth=request.depth) for each in choices)
        if not others:
            return in_order
        others.sort(key=lambda plan: plan.bottleneck_s)
        num_simulated = int(_MOST_SEATING_UNITS / self._units_simulated(in_order))
        if num_simulated >= 2 and (flushes or request.model.has_ports):
            in_order = self.predicted(in_order)
            best = min(map(self.predicted, others[: num_simulated - 1]), key=lambda plan: plan.minibatch_s)
            return best if best.minibatch_s < _CLEARLY_FASTER * in_order.minibatch_s else in_order
        return (
            others[0] if not flushes and others[0].bottleneck_s < _CLEARLY_FASTER * in_order.bottleneck_s else in_order
        )

    @cached_property
    def unit_size(self) -> int:
        """Samples of what travels: the largest microbatch the profile has."""
        parts = self.request.microbatches if self.mode.microbatches else 1
        size = -(-self.request.minibatch_size // parts)
        if size not in self.request.profile.layers:
            raise PlanError(
                f"mode {self.name} sends {size} samples at a time, and the profile has no times for so many, only for "
                f"{', '.join(map(str, sorted(self.request.profile.layers)))}"
            )
        return size

    @cached_property
    def work(self) -> Work:
        """The model at the size that travels."""
        profile = self.request.profile
        rows = profile.layers[self.unit_size]
        by_antichains = self.request.model.antichains and not self.request.runnable
        if self.unit_size not in self._known:
            self._known[self.unit_size] = antichains(rows) if by_antichains else prefixes(rows)
        states = self._known[self.unit_size]
        if self.mode.recompute:
            states = replace(states, backward_s=states.backward_s + states.forward_s)
        load_s = profile.load_s.get(self.unit_size, 0.0)
        return Work(states, profile.update_s_per_byte, profile.update_floor_s, load_s)

    @cached_property
    def _sizes(self) -> Profile:
        """The profile at the sizes that matter."""
        layers = self.request.profile.layers
        wanted = {self.unit_size, self.request.minibatch_size} & {*layers}
        return replace(self.request.profile, layers={size: layers[size] for size in sorted(wanted)})

    @cached_property
    def _rule(self) -> MemoryRule | None:
        limit = self.request.cluster.memory_bytes
        if limit is None:
            return None
        return self.memory(limit)

    def memory(self, limit_bytes: float) -> MemoryRule:
        """Return how this mode fills so much memory."""
        in_flight = None
        if self.mode.order == ALL_FORWARDS:
            in_flight = self._units_per_flush
        elif self.mode.depth is not None:
            in_flight = self.mode.depth
        return MemoryRule(
            limit_bytes,
            stashes=self.mode.weights in (STASH, VERTICAL_SYNC),
            recompute=self.mode.recompute,
            state_bytes_per_byte=self.request.profile.state_bytes_per_byte,
            in_flight=in_flight,
            depth_at_most=self.request.depth,
        )

    @property
    def _units_per_flush(self) -> int:
        """Units that each replica of a single stage, or a straight pipeline, runs between two updates."""
        if not self.mode.flush:
            return 1
        if self.mode.shape != "any":
            return self.request.accumulate or 1
        parts = self.request.microbatches if self.mode.microbatches else 1
        # More minibatches than there can be stages fill nothing more.
        stages_at_most = min(self.request.cluster.num_workers, len(self.work.states) - 1)
        return parts * (self.request.accumulate or (1 if parts > 1 else stages_at_most))

    def _found(self, rule: MemoryRule | None) -> Iterator[Planned]:
        """Yield the plans to choose from."""
        cluster, work, model = self.request.cluster, self.work, self.request.model
        last, count = len(work.states) - 1, cluster.num_workers
        if self.mode.shape in ("one", "one-stage"):
            whole = Stage(0, last, 1 if self.mode.shape == "one" else count)
            plan = self.placed("one stage", (whole,))
            if rule is None or plan.stages[0].memory_bytes <= rule.limit_bytes:
                yield plan
            return
        any_width = self.mode.shape == "any" and not self.mode.flush
        replicated = self.placed("one stage", (Stage(0, last, count),))
        if any_width and (rule is None or replicated.stages[0].memory_bytes <= rule.limit_bytes):
            yield replicated
        widths: list[int | None] = [None] if any_width else [1]
        if any_width and last <= _MOST_CUTS_OF_SHAPES:
            widths.append(1)
        if any_width and self.request.streams is not None:  # equal widths do; what else is found may not
            others = (width for width in range(1, count + 1) if self.request.streams % width == 0)
            widths += [width for width in others if width not in widths]
        best_s = math.inf
        for level in cluster.levels:
            where = f", links of level {level.name}" if len(cluster.levels) > 1 else ""
            for width in widths:
                shape = {None: "", 1: ", straight"}.get(width, f", stages of {width}")
                name = f"flat{shape}{where}"
                stages = self._flat(name, FlatProblem(work, model, level, count, rule, width))
                if stages is not None:
                    plan = self.placed(name, stages)
                    best_s = min(best_s, plan.bottleneck_s)
                    yield plan
        if len(cluster.levels) > 1 and any_width and searches_levels(cluster):
            # Where loops judge a plan, the recurrence's own bottleneck bounds nothing.
            at_most_s = math.inf if model.has_ports else best_s
            problem = HierarchicalProblem(work, model, cluster.levels, rule)
            self._tell("hierarchical")
            nested = plan_hierarchical(problem, at_most_s)
            if nested is not None:
                if is_thinned(work.states):
                    found_s = min(nested.bottleneck_s, at_most_s)
                    self._thinned.append((found_s, partial(hierarchical_bound_s, problem)))
                stages = tuple(each.stage for each in nested.stages)
                devices = tuple(each.workers for each in nested.stages)
                bottleneck_s = None if model.has_ports else nested.bottleneck_s
                yield self.placed("hierarchical", stages, devices, bottleneck_s=bottleneck_s)
        if any_width and model.has_ports and last <= _MOST_CUTS_OF_SHAPES:
            yield from self._of_known_shapes(rule)

    def _of_known_shapes(self, rule: MemoryRule | None) -> Iterator[Planned]:
        """Yield plans of the shapes the papers' tables are full of: nearly all workers first, and two halves.

        The searches weigh stages one by one; where the simulator decides, these are often better than they look.
        """
        work, model, cluster = self.work, self.request.model, self.request.cluster
        count = cluster.num_workers
        shapes = ((count - 1, 1), (count - 2, 1, 1), (count - 2, 2), (count // 2, count - count // 2))
        for replicas in dict.fromkeys(shape for shape in shapes if min(shape) >= 1 and len(shape) < len(work.states)):
            try:
                stages = plan_fixed(work, model, cluster, replicas)
            except PlanError:
                continue
            if fits(FlatProblem(work, model, cluster.levels[0], count, rule), stages):
                yield self.placed(f"given shape {'-'.join(map(str, replicas))}", stages)

    def _shallower(self) -> Iterator[Planned]:
        """Yield straight plans with the largest depth that fits in memory."""
        rule, cluster = self._rule, self.request.cluster
        assert rule is not None
        deepest = min(cluster.num_workers, len(self.work.states) - 1)  # a straight plan has no more stages
        for depth in range(deepest - 1, 0, -1):
            lowered = replace(rule, depth_at_most=depth)
            if not _any_straight(self, lowered):
                continue
            for level in cluster.levels:
                name = "flat, straight, at a depth that fits"
                problem = FlatProblem(self.work, self.request.model, level, cluster.num_workers, lowered, 1)
                stages = self._flat(name, problem)
                if stages is not None:  # what fits at one level's links fits at every other's
                    yield self.placed(name, stages, depth=depth)
            return

    def _flat(self, name: str, problem: FlatProblem) -> tuple[Stage, ...] | None:
        """Search; remember what bounds a search that isn't exact."""
        self._tell(name)
        stages = plan_flat(problem)
        if stages is not None and is_thinned(problem.work.states):
            self._thinned.append((bottleneck_s(problem, stages), partial(flat_bound_s, problem)))
        return stages

    def placed(
        self,
        found_by: str,
        stages: Sequence[Stage],
        devices: Sequence[Sequence[int]] | None = None,
        *,
        depth: int | None = None,
        bottleneck_s: float | None = None,
    ) -> Planned:
        """Return a plan with its costs, not yet predicted; workers stand along the devices unless told."""
        work, model, cluster = self.work, self.request.model, self.request.cluster
        if devices is None:
            devices = along([stage.replicas for stage in stages])
        replicas = [stage.replicas for stage in stages]
        units = self.request.microbatches if self.mode.microbatches else 1
        depth = self.mode.depth or depth or self.request.depth or noam(replicas)
        in_loops = model.has_ports and not self.mode.flush
        seconds, port_s = placed_s(work, model, cluster, stages, devices, ways=not in_loops)
        if in_loops:
            loops = loops_s(work, model, cluster, stages, devices, depth)
            seconds = [max(pair) for pair in zip(seconds, loops, strict=True)]
        rule = replace(self.memory(math.inf), depth_at_most=depth if set(replicas) == {1} else None)
        if bottleneck_s is not None:  # the recurrence sums level by level, which costs no more than all at once
            seconds = [min(each, bottleneck_s) for each in seconds]
        order, starts = arrange(work.states, stages)
        accumulate = self._units_per_flush // units if self.mode.flush else 1
        reported = []
        for index, stage in enumerate(stages):
            compute_s, sync_s, transfer_s = self._parts_s(stages, devices, index)
            in_flight = rule.depth(stage.replicas, sum(replicas[index + 1 :]))
            layers = work.states.layers(stage.start, stage.stop)
            reported.append(
                PlannedStage(
                    tuple(layers),
                    work.states.rows[layers[0]].name,
                    work.states.rows[layers[-1]].name,
                    stage.replicas,
                    compute_s * units,
                    min(sync_s, bottleneck_s or sync_s) * units,
                    transfer_s * units,
                    seconds[index] * units,
                    rule.num_bytes(work.states, stage.start, stage.stop, in_flight),
                    in_flight,
                    tuple(devices[index]),
                )
            )
        return Planned(
            mode=self.name,
            found_by=found_by,
            stages=tuple(reported),
            starts=tuple(starts),
            order=order,
            depth=depth,
            microbatches=units,
            accumulate=accumulate,
            bottleneck_s=(bottleneck_s or max(*seconds, port_s)) * units,
            port_s=port_s * units,
            minibatch_s=math.inf,
            num_bytes=payload(arranged(self._sizes, order).layers[self.unit_size], starts, replicas, units, accumulate),
        )

    def _parts_s(
        self, stages: Sequence[Stage], devices: Sequence[Sequence[int]], index: int
    ) -> tuple[float, float, float]:
        """Return a stage's computing, gradient sum and transfers in seconds per unit, each on its own."""
        work, model, cluster = self.work, self.request.model, self.request.cluster
        level = cluster.levels[spanned(cluster, devices[index])]
        compute_s, sync_s, transfer_s = model.parts(work, level, *stages[index])
        if not model.has_ports:
            transfer_s = max(model.cuts_s(work, *cut_levels(cluster, devices, index), *stages[index]))
        return float(compute_s), float(sync_s), float(transfer_s)

    def predicted(self, plan: Planned) -> Planned:
        """Return a plan with the simulator's prediction."""
        if plan.is_simulated:
            return plan
        if sum(plan.replicas) > _MOST_SIMULATED or math.lcm(*plan.replicas) > _LONGEST_BLOCK:
            return replace(plan, minibatch_s=plan.bottleneck_s)
        course, count = self._course(plan)
        return replace(plan, minibatch_s=predict(course, count), is_simulated=True)

    def _units_simulated(self, plan: Planned) -> float:
        """Return how many microbatches times stages a prediction simulates, infinite if it doesn't simulate."""
        if math.lcm(*plan.replicas) > _LONGEST_BLOCK:
            return math.inf
        _, count = self._course(plan)
        return 3 * count * plan.microbatches * len(plan.stages)

    def _course(self, plan: Planned) -> tuple[Course, int]:
        return course_of(
            arranged(self._sizes, plan.order),
            self.request.cluster.placed(plan.devices),
            self.request.model,
            plan.starts,
            plan.replicas,
            self.mode,
            self.request.minibatch_size,
            depth=plan.depth,
            microbatches=plan.microbatches,
            accumulate=plan.accumulate,
        )


def _any_straight(planner: Planner, rule: MemoryRule) -> bool:
    cluster = planner.request.cluster
    problem = FlatProblem(planner.work, planner.request.model, cluster.levels[0], cluster.num_workers, rule, 1)
    return any_fits(problem)


def _why_nothing_fits(planner: Planner) -> str:
    """Say by how much no plan of a mode fits in memory, and what would."""
    request, mode, limit = planner.request, planner.mode, float(planner.request.cluster.memory_bytes or 0)
    needed = _least_memory(planner)
    ways = []
    recomputing = Planner(replace(request, row=replace(mode, recompute=True)), planner.name)
    if not mode.recompute and mode.shape == "any" and _least_memory(recomputing) <= limit:
        ways.append("parallelism.recompute: true")
    if mode.shape != "any":
        others = ("pipedream-flush", "gpipe")
        ways += [f"mode {name}" for name in others if _least_memory(Planner(request, name)) <= limit]
    levels = request.cluster.levels
    wider = replace(levels[-1], count=2 * levels[-1].count)
    doubled = replace(request, cluster=replace(request.cluster, levels=(*levels[:-1], wider)))
    if mode.shape in ("any", "straight") and _least_memory(Planner(doubled, planner.name)) <= limit:
        ways.append(f"twice as many workers, {2 * request.cluster.num_workers}, for more stages")
    size = request.minibatch_size
    ways.append(f"a minibatch smaller than {size}" if size > 1 else "a smaller minibatch")
    return (
        f"no plan of mode {planner.name} fits: the leanest needs {num_bytes(needed)} on a worker, "
        f"{num_bytes(needed - limit)} more than the {num_bytes(limit)} of a {request.cluster.device}; "
        f"what would help: {', or '.join(ways)}"
    )


def _least_memory(planner: Planner) -> float:
    """Return the bytes on a worker that a mode's leanest plan needs, within one part in a thousand."""
    whole = planner.placed("", (Stage(0, len(planner.work.states) - 1, 1),)).stages[0].memory_bytes
    if planner.mode.shape in ("one", "one-stage"):
        return whole
    low, high = 0.0, 64 * whole + 1
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        rule = planner.memory(middle)
        if planner.mode.weights in (STASH, VERTICAL_SYNC):
            rule = replace(rule, depth_at_most=1)
        if _any_straight(planner, rule):
            high = middle
        else:
            low = middle
    return high
