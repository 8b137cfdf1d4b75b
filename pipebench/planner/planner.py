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

import numpy as np
from numpy.typing import NDArray

from pipebench.cluster import Cluster
from pipebench.errors import PlanError
from pipebench.formats import num_bytes
from pipebench.model.plan import Plan, make_plan
from pipebench.planner.cost_models import StageGrid, Work
from pipebench.planner.fixed import plan_fixed
from pipebench.planner.flat import FlatProblem, SearchStage, any_fits, bottleneck_s, flat_bound_s, plan_flat
from pipebench.planner.hierarchical import HierarchicalProblem, hierarchical_bound_s, plan_hierarchical
from pipebench.planner.loops import loops_s
from pipebench.planner.memory import MemoryRule, in_flight_interleaved
from pipebench.planner.placement_costs import along, cut_levels, placed_s, spanned
from pipebench.planner.placements import placements
from pipebench.planner.plans import PlanEstimate, Request, StageEstimate
from pipebench.planner.predict import Course, arrange, arranged, course_of, payload, predict
from pipebench.planner.states import States, antichains, prefixes
from pipebench.planner.thinning import is_thinned
from pipebench.planner.unpipelined import MOST_STATES, MOST_WORKERS, plans_unpipelined
from pipebench.profile.model import Profile, Rows
from pipebench.schedule.modes import KEEP, MODES, RECOMPUTE
from pipebench.schedule.notation import streams_problem
from pipebench.schedule.orders import ALL_FORWARDS, order_of
from pipebench.schedule.pipeline import Pipeline, chain, noam
from pipebench.schedule.weights import WEIGHT_POLICIES

# Components of one level: the hierarchical tables grow with their number, flat plans do not. 128 take seconds.
MOST_COMPONENTS = 128
_MOST_SIMULATED = 256  # workers; beyond, what is predicted is the cost model's bottleneck
_MOST_CUTS_OF_SHAPES = 500  # beyond, straight plans and given shapes would take longer than the search for any
_LONGEST_BLOCK = 512  # minibatches per round of all stages together; beyond, likewise
_MOST_PLACED_UNITS = 4000  # simulated to choose a placement, microbatches times stages: a quarter of a second
_CLEARLY_FASTER = 0.99  # what a placement has to win against the one along the devices; below is prediction error


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
        self._in_flight_of: dict[int, list[int]] = {}  # by positions, where workers have several stages
        self._thinned: list[tuple[float, Callable[[], float]]] = []  # bottlenecks found, and what bounds them

    def best(self) -> PlanEstimate:
        """Return the best plan.

        Raises:
            PlanError: none fits in memory.
        """
        started = time.perf_counter()
        fitting = [each for each in self._candidates(self._rule) if self._fits_beyond_noam(each)]
        keeping = [each for each in fitting if streams_problem(each.plan.replicas, self.request.streams) is None]
        pipelines = self.mode.shape not in ("one", "one-stage")
        if not keeping and pipelines and self.mode.weights_kept != 1 and self.request.depth is None:
            keeping = list(self._shallower())
        self.search_s = time.perf_counter() - started
        if not keeping and fitting:
            problem = streams_problem(fitting[0].plan.replicas, self.request.streams)
            raise PlanError(f"no plan of mode {self.name} keeps streams of text together: train.streams is {problem}")
        if not keeping:
            raise PlanError(_why_nothing_fits(self))
        if not self.mode.flush and not self.request.model.has_ports:
            keeping = [min(keeping, key=lambda each: each.bottleneck_s)]
        self._tell("simulating")
        best = min(map(self.with_prediction, keeping), key=lambda each: each.minibatch_s)
        self.predict_s = time.perf_counter() - started - self.search_s
        return best

    def candidates_without_limit(self) -> list[PlanEstimate]:
        """Return the plans there would be to choose from on devices with any amount of memory."""
        return list(self._candidates(None))

    def at_most(self) -> float:
        """Return how many times the smallest bottleneck one that `best` searched for can be; 1 if all are exact."""
        worst = 1.0
        for found_s, bound in self._thinned:
            self._tell("bounding what a thinned search missed")
            bound_s = bound() if found_s > 0 else math.inf
            worst = max(worst, found_s / bound_s if bound_s > 0 else math.inf)
        return worst

    def for_replicas(self, replicas: Sequence[int], starts: Sequence[int] | None = None) -> PlanEstimate:
        """Return a plan of which somebody else said how wide its stages are, memory not weighed.

        Args:
            replicas: per position in the pipeline.
            starts: first layers of the stages after the first; None: cut where the cost model wants it.

        Raises:
            PlanError: more stages than places to cut, or no place to cut before one of `starts`.
        """
        return self.with_prediction(self._on_best_devices(self._given_stages(replicas, starts)))

    def estimate_of(self, plan: Plan) -> PlanEstimate:
        """Return what a plan that somebody else made comes to, memory not weighed.

        Raises:
            PlanError: the cost model has no place to cut where the plan is cut.
        """
        if plan.chunks != self.mode.chunks:
            row = replace(self.mode, chunks=plan.chunks)
            return Planner(replace(self.request, row=row), self.name, known=self._known).estimate_of(plan)
        memory = tuple(policy for stage in plan.stages for policy in stage.memory)
        if memory != self.memory_policies:
            return Planner(replace(self.request, memory=memory), self.name, known=self._known).estimate_of(plan)
        stages = self._given_stages([stage.replicas for stage in plan.positions], [s.start for s in plan.stages[1:]])
        devices = [stage.devices for stage in plan.stages]
        return self.with_prediction(self.estimate("the plan's file", stages, devices, depth=plan.depth))

    def starts_of(self, replicas: Sequence[int]) -> list[int]:
        """Return the first layers of the stages after the first of a plan with these replicas, cut best.

        Args:
            replicas: per position in the pipeline.

        Raises:
            PlanError: more stages than places to cut.
        """
        return arrange(self.work.states, self._given_stages(replicas, None))[1]

    def devices_of(self, replicas: Sequence[int], starts: Sequence[int]) -> tuple[int, ...]:
        """Return the device of every worker of a given plan: those that suit it best, see `given`."""
        try:
            return self._on_best_devices(self._given_stages(replicas, starts)).plan.devices
        except PlanError:  # it runs all the same, the cost model just has no place to cut there
            return tuple(range(sum(replicas)))

    def _given_stages(self, widths: Sequence[int], starts: Sequence[int] | None) -> tuple[SearchStage, ...]:
        replicas = [*widths] * self.mode.chunks
        if starts is None:
            return plan_fixed(self.work, self.request.model, self.request.cluster, replicas, chunks=self.mode.chunks)
        states = self.work.states
        found = {members.bit_count(): state for state, members in enumerate(states.members)}
        if not {*starts} <= {*found}:
            raise PlanError(f"the model can't be cut before layers {sorted({*starts} - {*found})}")
        bounds = [0, *(found[start] for start in starts), len(states) - 1]
        return tuple(SearchStage(a, b, r) for (a, b), r in zip(itertools.pairwise(bounds), replicas, strict=True))

    def _on_best_devices(self, stages: Sequence[SearchStage]) -> PlanEstimate:
        """Return the recipe's stages on the devices that suit them best.

        Along the devices unless another placement is predicted to be clearly faster: the simulator decides among those
        with the smallest bottlenecks, or the bottleneck itself if simulating takes long or isn't the cost model's way.
        A bottleneck says nothing about flushes, so that a flushing pipeline too large to simulate stays as it is.
        """
        request, flushes = self.request, self.mode.flush
        chosen = self.mode.chunks == 1 and sum(stage.replicas for stage in stages) <= _MOST_SIMULATED
        choices = placements(request.cluster, [stage.replicas for stage in stages]) if chosen else [None]
        in_order, *others = (self.estimate("the recipe", stages, each, depth=request.depth) for each in choices)
        if not others:
            return in_order
        others.sort(key=lambda plan: plan.bottleneck_s)
        num_simulated = int(_MOST_PLACED_UNITS / self._units_simulated(in_order))
        if num_simulated >= 2 and (flushes or request.model.has_ports):
            in_order = self.with_prediction(in_order)
            best = min(map(self.with_prediction, others[: num_simulated - 1]), key=lambda plan: plan.minibatch_s)
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
        if RECOMPUTE in self.memory_policies:
            states = states.recomputing(self.memory_policies)
        load_s = profile.load_s.get(self.unit_size, 0.0)
        update_s_per_byte = profile.update_s_per_byte * WEIGHT_POLICIES[self.mode.weights].update_cost
        return Work(states, update_s_per_byte, profile.update_floor_s, load_s)

    @cached_property
    def memory_policies(self) -> tuple[str, ...]:
        """What is done with the activations of every layer of the profile."""
        rows = self.request.profile.layers[self.unit_size]
        return self.request.memory or (RECOMPUTE if self.mode.recompute else KEEP,) * (len(rows) - 1)

    @cached_property
    def _sizes(self) -> Profile:
        """The profile at the sizes that matter."""
        layers = self.request.profile.layers
        wanted = {self.unit_size, self.request.minibatch_size} & {*layers}
        return replace(self.request.profile, layers={size: layers[size] for size in sorted(wanted)})

    @cached_property
    def _rule(self) -> MemoryRule | None:
        limit = self.request.cluster.memory_bytes
        return None if limit is None else self.memory(limit)

    def memory(self, limit_bytes: float) -> MemoryRule:
        """Return how this mode fills so much memory."""
        in_flight = None
        if self.mode.order == ALL_FORWARDS:
            in_flight = self._units_per_flush
        elif self.mode.depth is not None:
            in_flight = self.mode.depth
        elif order_of(self.mode.order).splits:  # weight parts wait: every stage has as many as the first
            in_flight = min(self._units_per_flush, self.request.depth or self._stages_at_most)
        return MemoryRule(
            limit_bytes,
            versions=self.mode.weights_kept,
            state_bytes_per_byte=self.request.profile.state_bytes_per_byte,
            masters=self.request.profile.has_masters,
            in_flight=in_flight,
            depth_at_most=self.request.depth,
        )

    def at_width(self, rule: MemoryRule | None, width: int | None) -> MemoryRule | None:
        """Return a rule for plans of stages equally wide, which a depth beyond NOAM makes keep more.

        Args:
            rule: the mode's; None without a limit.
            width: replicas of every stage; None where that is for the search to find: how far a depth is beyond NOAM is
                known of whole plans only, and `_fits_beyond_noam` looks at them.
        """
        if rule is None or width is None or self.request.depth is None:
            return rule
        positions = min(self.request.cluster.num_workers // width, len(self.work.states) - 1)
        return replace(rule, beyond=max(0, self.request.depth - positions) * width)

    @property
    def _keeps_as_input_stage(self) -> bool:
        return WEIGHT_POLICIES[self.mode.weights].as_input_stage

    def _fits_beyond_noam(self, found: PlanEstimate) -> bool:
        """Return whether a plan fits of which more has to be known than a search does: its depth, the input stage."""
        limit, plan = self.request.cluster.memory_bytes, found.plan
        is_known = plan.depth <= plan.noam and not self._keeps_as_input_stage
        return limit is None or is_known or found.memory_bytes <= limit

    @property
    def _units_per_flush(self) -> int:
        """Units that each replica of a single stage, or a straight pipeline, runs between two updates."""
        if not self.mode.flush:
            return 1
        if not self.mode.microbatches:
            return self.request.accumulate or 1
        parts = self.request.microbatches
        # More minibatches than there can be stages fill nothing more.
        return parts * (self.request.accumulate or (1 if parts > 1 else self._stages_at_most))

    @property
    def _stages_at_most(self) -> int:
        return min(self.request.cluster.num_workers, len(self.work.states) - 1)

    def _candidates(self, rule: MemoryRule | None) -> Iterator[PlanEstimate]:
        """Yield the plans to choose from."""
        cluster, work, model = self.request.cluster, self.work, self.request.model
        last, count = len(work.states) - 1, cluster.num_workers
        if self.mode.shape in ("one", "one-stage"):
            whole = SearchStage(0, last, 1 if self.mode.shape == "one" else count)
            plan = self.estimate("one stage", (whole,))
            if rule is None or plan.memory_bytes <= rule.limit_bytes:
                yield plan
            return
        if self.mode.chunks > 1:
            yield from self._interleaved(rule)
            return
        if self.mode.shape == "any" and self.mode.depth == 1:
            yield from self._unpipelined(rule)
            return
        any_width = self.mode.shape == "any" and not self.mode.flush
        replicated = self.estimate("one stage", (SearchStage(0, last, count),))
        if any_width and (rule is None or replicated.memory_bytes <= rule.limit_bytes):
            yield replicated
        widths: list[int | None] = [None] if any_width else [*self._equal_widths]
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
                stages = self._flat(name, FlatProblem(work, model, level, count, self.at_width(rule, width), width))
                if stages is not None:
                    plan = self.estimate(name, stages)
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
                bottleneck_s = None if model.has_ports else nested.bottleneck_s
                yield self.estimate("hierarchical", nested.stages, nested.devices, bottleneck_s=bottleneck_s)
        if any_width and model.has_ports and last <= _MOST_CUTS_OF_SHAPES:
            yield from self._of_known_shapes(rule)

    @property
    def _equal_widths(self) -> list[int]:
        """Replicas that all stages of a plan may have alike."""
        count = self.request.cluster.num_workers
        if self.mode.shape != "equal":
            return [1]
        return [width for width in range(1, count + 1) if count % width == 0]

    def _interleaved(self, rule: MemoryRule | None) -> Iterator[PlanEstimate]:
        """Yield plans with several stages per worker, cut best for every number of positions in the pipeline.

        Stage s is on the workers of position s mod P (Narayanan et al. 2021, section 2.2). P is what all workers give,
        or half of that, and so on: fewer positions fill sooner. Where the best cuts don't fit in memory, those are
        tried whose every stage takes at most its share of a worker's memory.
        """
        chunks, last = self.mode.chunks, len(self.work.states) - 1
        request = self.request
        for width in self._equal_widths:
            positions = min(request.cluster.num_workers // width, last // chunks)
            while positions > 1:
                name = f"{chunks} stages per worker" + (f", stages of {width}" if width > 1 else "")
                self._tell(name)
                for share in (None, rule) if rule is not None else (None,):
                    limit = None if share is None else partial(self._fits_its_share, share, positions)
                    replicas = [width] * positions * chunks
                    try:
                        stages = plan_fixed(
                            self.work, request.model, request.cluster, replicas, chunks=chunks, fits=limit
                        )
                    except PlanError:
                        continue
                    found = self.estimate(name, stages)
                    if rule is None or found.memory_bytes <= rule.limit_bytes:
                        yield found
                        break
                positions //= 2

    def _fits_its_share(self, rule: MemoryRule, positions: int, grid: StageGrid, index: int) -> NDArray[np.bool_]:
        """Return whether stages keep at most a worker's memory over its number of stages, as the one of an index."""
        in_flight = self._interleaved_in_flight(positions)[index]
        shared = replace(rule, limit_bytes=rule.limit_bytes / self.mode.chunks, in_flight=in_flight)
        return shared.fits(grid, 1, 0)

    def _unpipelined(self, rule: MemoryRule | None) -> Iterator[PlanEstimate]:
        """Yield plans for one minibatch at a time per replica of the input stage; of large clusters, known shapes."""
        work, cluster, last = self.work, self.request.cluster, len(self.work.states) - 1
        whole = self.estimate("one stage", (SearchStage(0, last, cluster.num_workers),))
        if rule is None or whole.memory_bytes <= rule.limit_bytes:
            yield whole
        for level in cluster.levels if last < MOST_STATES else ():
            where = f", links of level {level.name}" if len(cluster.levels) > 1 else ""
            self._tell(f"unpipelined{where}")
            for stages in plans_unpipelined(FlatProblem(work, self.request.model, level, cluster.num_workers, rule)):
                yield self.estimate(f"unpipelined, input stage of {stages[0].replicas}{where}", stages)
        if cluster.num_workers > MOST_WORKERS or last >= MOST_STATES:
            yield from self._of_known_shapes(rule)

    def _of_known_shapes(self, rule: MemoryRule | None) -> Iterator[PlanEstimate]:
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
            if rule is None or rule.fit_all(work.states, stages):
                yield self.estimate(f"given shape {'-'.join(map(str, replicas))}", stages)

    def _shallower(self) -> Iterator[PlanEstimate]:
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
                    yield self.estimate(name, stages, depth=depth)
            return

    def _flat(self, name: str, problem: FlatProblem) -> tuple[SearchStage, ...] | None:
        """Search; remember what bounds a search that isn't exact."""
        self._tell(name)
        stages = plan_flat(problem)
        if stages is not None and is_thinned(problem.work.states):
            self._thinned.append((bottleneck_s(problem, stages), partial(flat_bound_s, problem)))
        return stages

    def estimate(
        self,
        found_by: str,
        stages: Sequence[SearchStage],
        devices: Sequence[Sequence[int]] | None = None,
        *,
        depth: int | None = None,
        bottleneck_s: float | None = None,
    ) -> PlanEstimate:
        """Return what a plan comes to by the cost model, not yet predicted by the simulator.

        Args:
            found_by: what made it.
            stages: its stages.
            devices: of every stage's replicas; None: workers stand along the devices, position by position.
            depth: minibatches in flight per input-stage replica; None for the request's, or NOAM.
            bottleneck_s: seconds per minibatch of the slowest stage, where the search that found it knows them better.
        """
        model, cluster, chunks = self.request.model, self.request.cluster, self.mode.chunks
        replicas = [stage.replicas for stage in stages]
        widths = replicas[: len(replicas) // chunks]
        if devices is None:
            devices = along(widths) * chunks
        work = self.work
        units = self.request.microbatches if self.mode.microbatches else 1
        depth = self.mode.depth or depth or self.request.depth or self._usual_depth(widths)
        in_loops = model.has_ports and not self.mode.flush
        seconds, port_s = placed_s(work, model, cluster, stages, devices, ways=not in_loops)
        if in_loops:
            loops = loops_s(work, model, cluster, stages, devices, depth)
            seconds = [max(pair) for pair in zip(seconds, loops, strict=True)]
        if bottleneck_s is not None:  # the recurrence sums level by level, which costs no more than all at once
            seconds = [min(each, bottleneck_s) for each in seconds]
        order, starts = arrange(work.states, stages)
        accumulate = self._accumulated(units, depth)
        rows = arranged(self._sizes, order).layers[self.unit_size]
        policies = [self.memory_policies[layer] for layer in order]
        places = [device for own in devices[: len(widths)] for device in own]
        plan = make_plan(
            Rows.of(rows), starts, replicas, mode=self.name, devices=places, depth=depth, chunks=chunks, memory=policies
        )
        estimates = []
        for index, stage in enumerate(stages):
            compute_s, sync_s, transfer_s = self._parts_s(work, stages, devices, index)
            in_flight = self._in_flight(replicas, index, depth)
            rule = self.memory(math.inf)
            if self._keeps_as_input_stage:
                rule = replace(rule, versions=-(-depth * replicas[0] // replicas[index]))
            estimates.append(
                StageEstimate(
                    compute_s * units,
                    min(sync_s, bottleneck_s or sync_s) * units,
                    transfer_s * units,
                    seconds[index] * units,
                    rule.num_bytes(work.states, stage.start, stage.stop, in_flight),
                    in_flight,
                )
            )
        slowest_s = max(sum(seconds[position :: len(widths)]) for position in range(len(widths)))
        return PlanEstimate(
            plan=plan,
            order=order,
            found_by=found_by,
            stages=tuple(estimates),
            microbatches=units,
            accumulate=accumulate,
            bottleneck_s=(bottleneck_s or max(slowest_s, port_s)) * units,
            port_s=port_s * units,
            minibatch_s=math.inf,
            num_bytes=payload(rows, plan, self.mode, units, accumulate),
        )

    def _in_flight(self, replicas: Sequence[int], index: int, depth: int) -> int:
        """Return the minibatches (or microbatches) in flight on one replica of a stage."""
        if self.mode.chunks > 1:
            return self._interleaved_in_flight(len(replicas) // self.mode.chunks)[index]
        if order_of(self.mode.order).splits:
            return min(self._units_per_flush, depth)
        rule = replace(self.memory(math.inf), depth_at_most=depth if set(replicas) == {1} else None)
        if rule.in_flight is None and depth > noam(replicas):
            shape = Pipeline(tuple(replicas), chain(len(replicas)), self.mode.order, self.mode.flush, depth)
            own = shape.block // replicas[index] * self._units_per_flush
            return min(shape.warmups[index], own) if self.mode.flush else shape.warmups[index]
        return rule.depth(replicas[index], sum(replicas[index + 1 :]))

    def _interleaved_in_flight(self, positions: int) -> list[int]:
        """Return the most microbatches in flight of every stage where workers have several."""
        if positions not in self._in_flight_of:
            # Two groups of as many microbatches as there are positions are enough for the most there can be.
            units = self._units_per_flush
            units = units if self.mode.order == ALL_FORWARDS else min(units, 3 * positions)
            self._in_flight_of[positions] = in_flight_interleaved(self.mode.order, positions, self.mode.chunks, units)
        return self._in_flight_of[positions]

    def _accumulated(self, units: int, depth: int) -> int:
        """Return the minibatches of each replica per update."""
        if self.mode.flush:
            return self._units_per_flush // units
        if not WEIGHT_POLICIES[self.mode.weights].accumulates:
            return 1
        return self._asked_to_accumulate or self.mode.accumulate or depth

    @property
    def _asked_to_accumulate(self) -> int | None:
        """Minibatches per update of this mode, if the request says; what it says is else about another mode."""
        return self.request.accumulate if self.request.row is not None else None

    def _usual_depth(self, widths: Sequence[int]) -> int:
        """Return NOAM, or less where an update has to cover all minibatches in flight and is asked to cover fewer."""
        limited = WEIGHT_POLICIES[self.mode.weights].accumulates and self._asked_to_accumulate
        return min(noam(widths), limited) if limited else noam(widths)

    def _parts_s(
        self, work: Work, stages: Sequence[SearchStage], devices: Sequence[Sequence[int]], index: int
    ) -> tuple[float, float, float]:
        """Return a stage's computing, gradient sum and transfers in seconds per unit, each on its own."""
        model, cluster = self.request.model, self.request.cluster
        level = cluster.levels[spanned(cluster, devices[index])]
        compute_s, sync_s, transfer_s = model.parts(work, level, *stages[index])
        if not model.has_ports:
            transfer_s = max(model.cuts_s(work, *cut_levels(cluster, devices, index), *stages[index]))
        return float(compute_s), float(sync_s), float(transfer_s)

    def with_prediction(self, found: PlanEstimate) -> PlanEstimate:
        """Return an estimate with the simulator's prediction."""
        if found.is_simulated:
            return found
        replicas = found.plan.replicas
        if sum(replicas) > _MOST_SIMULATED or math.lcm(*replicas) > _LONGEST_BLOCK:
            one_by_one = self.mode.depth == 1
            return replace(
                found, minibatch_s=sum(each.stage_s for each in found.stages) if one_by_one else found.bottleneck_s
            )
        course, count = self._course(found)
        return replace(found, minibatch_s=predict(course, count), is_simulated=True)

    def _units_simulated(self, found: PlanEstimate) -> float:
        """Return how many microbatches times stages a prediction simulates, infinite if it doesn't simulate."""
        if math.lcm(*found.plan.replicas) > _LONGEST_BLOCK:
            return math.inf
        _, count = self._course(found)
        return 3 * count * found.microbatches * len(found.stages)

    def _course(self, found: PlanEstimate) -> tuple[Course, int]:
        return course_of(
            arranged(self._sizes, found.order),
            self.request.cluster,
            self.request.model,
            found.plan,
            self.mode,
            self.request.minibatch_size,
            microbatches=found.microbatches,
            accumulate=found.accumulate,
        )


def _any_straight(planner: Planner, rule: MemoryRule) -> bool:
    cluster = planner.request.cluster
    fitting = planner.at_width(rule, 1)
    return any_fits(
        FlatProblem(planner.work, planner.request.model, cluster.levels[0], cluster.num_workers, fitting, 1)
    )


def _why_nothing_fits(planner: Planner) -> str:
    """Say by how much no plan of a mode fits in memory, and what would."""
    request, mode, limit = planner.request, planner.mode, float(planner.request.cluster.memory_bytes or 0)
    needed = _least_memory(planner)
    ways = []
    recomputing = Planner(replace(request, row=replace(mode, recompute=True), memory=None), planner.name)
    if not mode.recompute and mode.shape in ("any", "equal") and _least_memory(recomputing) <= limit:
        ways.append("parallelism.recompute: true")
    if mode.shape in ("one", "one-stage", "straight"):
        others = ("pipedream-flush", "gpipe")
        ways += [f"mode {name}" for name in others if _least_memory(Planner(request, name)) <= limit]
    if request.depth is not None and _least_memory(Planner(replace(request, depth=None), planner.name)) <= limit:
        ways.append("parallelism.depth: auto")
    levels = request.cluster.levels
    wider = replace(levels[-1], count=2 * levels[-1].count)
    doubled = replace(request, cluster=replace(request.cluster, levels=(*levels[:-1], wider)))
    if mode.shape not in ("one", "one-stage") and _least_memory(Planner(doubled, planner.name)) <= limit:
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
    if planner.mode.chunks > 1:
        return min((found.memory_bytes for found in planner.candidates_without_limit()), default=math.inf)
    whole = planner.estimate("", (SearchStage(0, len(planner.work.states) - 1, 1),)).memory_bytes
    if planner.mode.shape in ("one", "one-stage"):
        return whole
    low, high = 0.0, 64 * whole + 1
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        rule = planner.memory(middle)
        if planner.mode.weights_kept != 1 and planner.request.depth is None:
            rule = replace(rule, depth_at_most=1)
        if _any_straight(planner, rule):
            high = middle
        else:
            low = middle
    return high
