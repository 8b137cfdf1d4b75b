"""What a plan comes to in one mode: memory, seconds by the cost model, bytes, and what the simulator predicts."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from pipebench.errors import PlanError
from pipebench.model.plan import Plan, as_they_run, make_plan
from pipebench.planner.activations import Activations, VirtualMemory
from pipebench.planner.cost_models import UnitWork
from pipebench.planner.flat import SearchStage
from pipebench.planner.loops import loops_s
from pipebench.planner.memory import MemoryRule, in_flight_interleaved
from pipebench.planner.placement_costs import along, cut_levels, placed_s, spanned
from pipebench.planner.plans import PlanEstimate, Request, StageEstimate
from pipebench.planner.predict import PlannedWorkload, arrange, arranged, course_of, payload, predict
from pipebench.planner.stage_problem import StageProblem, input_bytes_of
from pipebench.planner.states import States, antichains, prefixes
from pipebench.planner.straight import Straight
from pipebench.profile.model import Profile, Rows
from pipebench.schedule.modes import KEEP, MODES, RECOMPUTE
from pipebench.schedule.orders import ALL_FORWARDS, order_of
from pipebench.schedule.pipeline import Pipeline, chain, noam
from pipebench.schedule.weights import WEIGHT_POLICIES
from pipebench.simulate.memory import stage_memories
from pipebench.simulate.memory_meter import MemoryMeter
from pipebench.simulate.meter import Meter
from pipebench.simulate.steady import estimate_rate, simulate_all

MOST_SIMULATED = 256  # workers; beyond, what is predicted is the cost model's bottleneck
_LONGEST_BLOCK = 512  # minibatches per round of all stages together; beyond, likewise


class _Kept(NamedTuple):
    """What a replica of a stage keeps at most, with so many units in flight, and what becomes of activations."""

    num_bytes: float
    in_flight: int
    virtual: VirtualMemory | None = None


class Estimator:
    """Weighs plans of one mode."""

    def __init__(self, request: Request, mode: str, known: dict[int, States] | None = None) -> None:
        """Take a request.

        Args:
            request: what to plan.
            mode: the mode.
            known: states by the size that travels, made for other modes; those made here are added.
        """
        self.request = request
        self.name = mode
        self.mode = request.row or MODES[mode]
        self._known = {} if known is None else known
        self._in_flight_of: dict[int, list[int]] = {}  # by positions, where workers have several stages

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
    def work(self) -> UnitWork:
        """The model at the size that travels."""
        profile = self.request.profile
        rows = profile.layers[self.unit_size]
        by_antichains = self.request.model.antichains and not self.request.runnable
        if self.unit_size not in self._known:
            self._known[self.unit_size] = antichains(rows) if by_antichains else prefixes(rows)
        states = self._known[self.unit_size]
        if RECOMPUTE in self.memory_policies:
            states = states.recomputing(self.memory_policies)
        if self.request.memory is not None and states.is_chain:
            pcie = self.request.cluster.pcie_bytes_per_s
            states = replace(states, activations=Activations(rows, self.memory_policies, pcie))
        load_s = profile.load_s.get(self.unit_size, 0.0)
        update_s_per_byte = profile.update_s_per_byte * WEIGHT_POLICIES[self.mode.weights].update_cost
        return UnitWork(states, update_s_per_byte, profile.update_floor_s, load_s)

    @cached_property
    def memory_policies(self) -> tuple[str, ...]:
        """What is done with the activations of every layer of the profile."""
        rows = self.request.profile.layers[self.unit_size]
        recomputes = self.mode.recompute and not (self.request.chooses and self.mode.chooses)
        return as_they_run(rows[:-1], self.request.memory or (RECOMPUTE if recomputes else KEEP,) * (len(rows) - 1))

    @cached_property
    def sizes(self) -> Profile:
        """The profile at the sizes that matter, of one length: the one that stands for all where it varies."""
        layers = self.request.profile.layers
        wanted = {self.unit_size, self.request.minibatch_size} & {*layers}
        return replace(self.request.profile, layers={size: layers[size] for size in sorted(wanted)}, lengths=())

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

    def at_width(self, rule: MemoryRule, width: int | None) -> MemoryRule:
        """Return a rule for plans of stages equally wide, which a depth beyond NOAM makes keep more.

        Args:
            rule: the mode's.
            width: replicas of every stage; None where that is for the search to find: how far a depth is beyond NOAM is
                known of whole plans only, and `_fits_beyond_noam` looks at them.
        """
        if width is None or self.request.depth is None:
            return rule
        positions = min(self.request.cluster.num_workers // width, len(self.work.states) - 1)
        return replace(rule, beyond=max(0, self.request.depth - positions) * width)

    def straight(self) -> Straight:
        """Return what says whether any straight plan fits."""
        return Straight(self.work, self.request.cluster.num_workers, self.memory(math.inf))

    @property
    def keeps_as_input_stage(self) -> bool:
        """Whether every stage keeps as many versions as the input stage."""
        return WEIGHT_POLICIES[self.mode.weights].as_input_stage

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
        chunks, work = self.mode.chunks, self.work
        replicas = [stage.replicas for stage in stages]
        widths = replicas[: len(replicas) // chunks]
        if devices is None:
            devices = along(widths) * chunks
        units = self.request.microbatches if self.mode.microbatches else 1
        depth = self.depth_of(widths, depth)
        seconds, port_s = self._seconds(stages, devices, depth, bottleneck_s)
        order, starts = arrange(work.states, stages)
        accumulate = self._accumulated(units, depth)
        rows = arranged(self.sizes, order).layers[self.unit_size]
        plan = make_plan(
            Rows.of(rows),
            starts,
            replicas,
            mode=self.name,
            devices=[device for own in devices[: len(widths)] for device in own],
            depth=depth,
            chunks=chunks,
            memory=[self.memory_policies[layer] for layer in order],
            relay=self.request.relay,
        )
        kept = [self._kept(plan, stages, index) for index in range(len(stages))]
        slowest_s = max(sum(seconds[position :: len(widths)]) for position in range(len(widths)))
        return PlanEstimate(
            plan=plan,
            order=order,
            found_by=found_by,
            stages=self._stage_estimates(stages, devices, seconds, kept, units, bottleneck_s),
            microbatches=units,
            accumulate=accumulate,
            bottleneck_s=(bottleneck_s or max(slowest_s, port_s)) * units,
            port_s=port_s * units,
            minibatch_s=math.inf,
            num_bytes=payload(rows, plan, self.mode, units, accumulate),
        )

    def _seconds(
        self, stages: Sequence[SearchStage], devices: Sequence[Sequence[int]], depth: int, bottleneck_s: float | None
    ) -> tuple[list[float], float]:
        """Return every stage's seconds per unit, and those of the busiest port."""
        model, cluster, relay = self.request.model, self.request.cluster, self.request.relay
        in_loops = model.has_ports and not self.mode.flush
        seconds, port_s = placed_s(self.work, model, cluster, stages, devices, ways=not in_loops)
        if in_loops:
            loops = loops_s(self.work, model, cluster, stages, devices, depth, relay=relay)
            seconds = [max(pair) for pair in zip(seconds, loops, strict=True)]
        if bottleneck_s is not None:  # the recurrence sums level by level, which costs no more than all at once
            seconds = [min(each, bottleneck_s) for each in seconds]
        return seconds, port_s

    def _kept(self, plan: Plan, stages: Sequence[SearchStage], index: int) -> _Kept:
        """Return what a replica of a stage keeps, and what its layers do where the request says that."""
        rule, stage, replicas = self.memory(math.inf), stages[index], [stage.replicas for stage in stages]
        in_flight = self.in_flight(replicas, index, plan.depth)
        if self.keeps_as_input_stage:
            rule = replace(rule, versions=-(-plan.depth * replicas[0] // stage.replicas))
        num_bytes = rule.num_bytes(self.work.states, stage.start, stage.stop, in_flight)
        if self.work.states.activations is None:
            return _Kept(num_bytes, in_flight)
        start, stop = self.work.states.bounds[[stage.start, stage.stop]]
        return _Kept(num_bytes, in_flight, self.work.states.activations.virtual(start, stop))

    def _stage_estimates(
        self,
        stages: Sequence[SearchStage],
        devices: Sequence[Sequence[int]],
        seconds: Sequence[float],
        kept: Sequence[_Kept],
        units: int,
        bottleneck_s: float | None,
    ) -> tuple[StageEstimate, ...]:
        """Return what stages come to per minibatch, of so many units, each of which takes them these seconds."""
        parts_s = (self._parts_s(self.work, stages, devices, index) for index in range(len(stages)))
        return tuple(
            StageEstimate(
                compute_s * units,
                min(sync_s, bottleneck_s or sync_s) * units,
                transfer_s * units,
                stage_s * units,
                own.num_bytes,
                own.in_flight,
                own.virtual,
            )
            for (compute_s, sync_s, transfer_s), stage_s, own in zip(parts_s, seconds, kept, strict=True)
        )

    @property
    def memory_limit_bytes(self) -> float:
        """The memory of a device; infinite without a limit."""
        limit = self.request.cluster.memory_bytes
        return math.inf if limit is None else float(limit)

    def depth_of(self, widths: Sequence[int], depth: int | None = None) -> int:
        """Return the minibatches in flight per input-stage replica.

        Args:
            widths: replicas of every position in the pipeline.
            depth: where the mode leaves it open; None for the request's, or NOAM.
        """
        return self.mode.depth or depth or self.request.depth or self._usual_depth(widths)

    def stage_problem(self, rule: MemoryRule, stage: SearchStage, in_flight: int) -> StageProblem:
        """Return a stage of consecutive layers, whose policies can be looked at or chosen.

        Args:
            rule: how the mode fills memory.
            stage: which layers.
            in_flight: units in flight on one replica.
        """
        states, rows = self.work.states, self.request.profile.layers[self.unit_size]
        layers = states.layers(stage.start, stage.stop)
        constant_bytes, each_bytes = rule.beside_activations(states, stage.start, stage.stop)
        return StageProblem(
            rows, layers[0], layers[-1] + 1, in_flight, rule.limit_bytes, constant_bytes, each_bytes,
            self.request.cluster.pcie_bytes_per_s, self.request.chooses, input_bytes_of(rows),
        )  # fmt: skip

    def in_flight(self, replicas: Sequence[int], index: int, depth: int) -> int:
        """Return the minibatches (or microbatches) in flight on one replica of a stage."""
        if self.mode.chunks > 1:
            return self.interleaved_in_flight(len(replicas) // self.mode.chunks)[index]
        if order_of(self.mode.order).splits:
            return min(self._units_per_flush, depth)
        rule = replace(self.memory(math.inf), depth_at_most=depth if set(replicas) == {1} else None)
        if rule.in_flight is None and depth > noam(replicas):
            shape = Pipeline(tuple(replicas), chain(len(replicas)), self.mode.order, self.mode.flush, depth)
            own = shape.block // replicas[index] * self._units_per_flush
            return min(shape.warmups[index], own) if self.mode.flush else shape.warmups[index]
        return rule.depth(replicas[index], sum(replicas[index + 1 :]))

    def interleaved_in_flight(self, positions: int) -> list[int]:
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
        self, work: UnitWork, stages: Sequence[SearchStage], devices: Sequence[Sequence[int]], index: int
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
        if sum(replicas) > MOST_SIMULATED or math.lcm(*replicas) > _LONGEST_BLOCK:
            one_by_one = self.mode.depth == 1
            return replace(
                found, minibatch_s=sum(each.stage_s for each in found.stages) if one_by_one else found.bottleneck_s
            )
        course, count = self._course(found)
        return replace(found, minibatch_s=predict(course, count), is_simulated=True)

    def simulated_peaks(self, found: PlanEstimate) -> list[int] | None:
        """Return the bytes that a replica of every stage keeps at most in the simulator; None if that takes long.

        Inputs of the model that a recomputed layer reads count as nothing: a profile doesn't know their bytes.
        """
        if sum(found.plan.replicas) > MOST_SIMULATED or math.lcm(*found.plan.replicas) > _LONGEST_BLOCK:
            return None
        course, count = self._course(found)
        memories = stage_memories(arranged(self.sizes, found.order), found.plan, course.pipeline)
        meter = MemoryMeter(course.pipeline, memories, course.costs)
        simulate_all(course, count, Meter(course.pipeline, meter))
        peaks = [peak.num_bytes for peak in meter.timeline().peaks]
        workers = map(course.pipeline.workers_of, range(len(found.stages)))
        return [max(peaks[worker] for worker in own) for own in workers]

    def units_simulated(self, found: PlanEstimate) -> float:
        """Return how many microbatches times stages a prediction simulates, infinite if it doesn't simulate."""
        if math.lcm(*found.plan.replicas) > _LONGEST_BLOCK:
            return math.inf
        _, count = self._course(found)
        return 3 * count * found.microbatches * len(found.stages)

    def estimate_rate(self, found: PlanEstimate, num_instructions: int) -> tuple[float, int]:
        """Return about what `with_prediction` says a minibatch takes, and how many instructions that simulated."""
        course, count = self._course(found)
        return estimate_rate(course, 2 * count, num_instructions)

    def _course(self, found: PlanEstimate) -> tuple[PlannedWorkload, int]:
        return course_of(
            arranged(self.sizes, found.order),
            self.request.cluster,
            self.request.model,
            found.plan,
            self.mode,
            self.request.minibatch_size,
            microbatches=found.microbatches,
            accumulate=found.accumulate,
        )
