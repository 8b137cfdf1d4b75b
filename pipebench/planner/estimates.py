"""Cost of a plan in one mode: memory, seconds by the cost model, bytes sent, and the simulator's prediction."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from pipebench.cluster import Cluster
from pipebench.errors import PlanError
from pipebench.model.plan import PARAMETER, Plan, as_they_run, make_plan, shared
from pipebench.planner.activations import Activations
from pipebench.planner.cost_models import UnitWork
from pipebench.planner.flat import SearchStage
from pipebench.planner.layer_groups import layer_groups, transient_bytes
from pipebench.planner.loops import loops_s
from pipebench.planner.memory import MemoryRule, in_flight_interleaved
from pipebench.planner.placement_costs import Sketch, cut_levels, placed_s, spanned
from pipebench.planner.plans import PlanEstimate, Request, StageEstimate
from pipebench.planner.predict import PlannedWorkload, arrange, arranged, payload, planned_workload, predict, with_sums
from pipebench.planner.stage_problem import StageProblem, input_bytes_of
from pipebench.planner.state_graph import antichains, prefixes
from pipebench.planner.states import KnownStates
from pipebench.profile.model import LayerProfile, Profile, Rows
from pipebench.schedule.modes import KEEP, MODES, RECOMPUTE
from pipebench.schedule.orders import ALL_FORWARDS, order_of
from pipebench.schedule.pipeline import Pipeline, chain, noam
from pipebench.schedule.placement import places
from pipebench.schedule.syncs import RING, SYNCS
from pipebench.schedule.weights import WEIGHT_POLICIES
from pipebench.simulate.memory import stage_memories
from pipebench.simulate.memory_meter import MemoryMeter
from pipebench.simulate.meter import Meter
from pipebench.simulate.steady import estimate_rate, simulate_all

MOST_SIMULATED = 256  # workers; beyond, the prediction is the cost model's bottleneck
LONGEST_BLOCK = 512  # minibatches per round of all stages together; beyond, likewise


class ModeRequest:
    """A request in one mode: the size of a unit, places to cut, the use of memory, minibatches in flight.

    `known` has states by unit size, shared among modes, and is extended here.
    """

    def __init__(self, request: Request, mode: str, known: KnownStates | None = None) -> None:
        self.request = request
        self.name = mode
        self.mode = request.row or MODES[mode]
        self.weights = WEIGHT_POLICIES[self.mode.weights]
        self._known = {} if known is None else known
        if self.mode.shape == "one-stage" and self.mode.chunks > 1 and not request.is_cut:
            self.mode = replace(self.mode, chunks=len(self.groups))

    @property
    def cluster(self) -> Cluster:
        """The cluster as most of the mode's plans meet it: those of several stages, where it has any."""
        return self.request.cluster.for_stages(1 if self.mode.shape in ("one", "one-stage") else 2)

    def uncut(self) -> "Estimator":
        """Return the same without cuts that the recipe gives."""
        return Estimator(replace(self.request, is_cut=False), self.name, self._known)

    @cached_property
    def unit_size(self) -> int:
        """Samples per unit: the largest microbatch."""
        parts = self.request.microbatches if self.mode.cuts() else 1
        size = -(-self.request.minibatch_size // parts)
        if size not in self.request.profile.layers:
            raise PlanError(
                f"mode {self.name} sends {size} samples at a time, and the profile has no times for so many, only for "
                f"{', '.join(map(str, sorted(self.request.profile.layers)))}"
            )
        return size

    @cached_property
    def work(self) -> UnitWork:
        """The model at the size of a unit."""
        profile = self.request.profile
        rows = profile.layers[self.unit_size]
        by_antichains = self.request.model.antichains and not self.request.runnable
        key = self.unit_size, self.ties and any(kind == PARAMETER for kind, _ in shared(rows))
        if key not in self._known:
            self._known[key] = (antichains if by_antichains else prefixes)(rows, ties=key[1])
        states = self._known[key]
        if RECOMPUTE in self.memory_policies:
            states = states.recomputing(self.memory_policies)
        if self.request.memory is not None and states.is_chain:
            pcie = self.request.cluster.pcie_bytes_per_s
            states = replace(states, activations=Activations(rows, self.memory_policies, pcie))
        load_s = profile.load_s.get(self.unit_size, 0.0)
        update_s_per_byte = profile.update_s_per_byte * self.weights.update_cost
        # Of pipelines that flush 1: they have no steady state. Where depth is open and decides, too.
        rounds = self._units_per_flush if self.mode.shape == "one-stage" else 1
        if self.weights.accumulates:
            rounds = self._accumulate or self.mode.accumulate or self.request.depth or 1
        return UnitWork(states, update_s_per_byte, profile.update_floor_s, load_s, rounds)

    @property
    def ties(self) -> bool:
        """Whether stages may have a copy each of a weight that their layers share."""
        return self.mode.ties and self.request.ties

    @cached_property
    def groups(self) -> list[tuple[int, int]]:
        """The layer groups of a mode that is one stage, as pairs of states."""
        return layer_groups(self.work.states, self.mode.chunks)

    @cached_property
    def memory_policies(self) -> tuple[str, ...]:
        """Activation policy of every layer of the profile."""
        rows = self.request.profile.layers[self.unit_size]
        recomputes = self.mode.recompute and not (self.request.chooses and self.mode.chooses)
        return as_they_run(rows[:-1], self.request.memory or (RECOMPUTE if recomputes else KEEP,) * (len(rows) - 1))

    @cached_property
    def sizes(self) -> Profile:
        """The profile at the sizes in use; of variable lengths the representative one."""
        layers = self.request.profile.layers
        wanted = {self.unit_size, self.request.minibatch_size} & {*layers}
        return replace(self.request.profile, layers={size: layers[size] for size in sorted(wanted)}, lengths=())

    def memory(self, limit_bytes: float) -> MemoryRule:
        """Return the mode's memory rule for devices of `limit_bytes`, less the largest workspace of any layer."""
        rows, in_flight = self.request.profile.layers[self.unit_size], None
        if self.mode.order == ALL_FORWARDS:
            in_flight = self._units_per_flush
        elif self.mode.depth is not None:
            in_flight = self.mode.depth
        elif order_of(self.mode.order).splits:  # delayed weight parts: every stage has as many as the first
            in_flight = min(self._units_per_flush, self.request.depth or self._stages_at_most)
        return MemoryRule(
            limit_bytes - max(row.workspace_bytes for row in rows),
            versions=self.mode.weights_kept,
            state_bytes_per_byte=self.request.profile.state_bytes_per_byte,
            masters=self.request.profile.has_masters,
            shard=self.mode.shard,
            in_place=self.mode.shape == "one-stage",
            in_flight=in_flight,
            depth_at_most=self.request.depth,
            pushers=0 if SYNCS[self.mode.sync].waits else self.request.cluster.num_workers - 1,
        )

    def stage_memory(self, limit_bytes: float, replicas: Sequence[int], index: int, depth: int) -> MemoryRule:
        """Return the rule of one stage of a plan, which may keep as many versions as the input stage."""
        rule = self.memory(limit_bytes)
        as_input_stage = self.weights.as_input_stage
        return replace(rule, versions=-(-depth * replicas[0] // replicas[index])) if as_input_stage else rule

    def at_width(self, rule: MemoryRule, width: int | None) -> MemoryRule:
        """Return the rule for stages of `width` replicas, which a depth beyond NOAM makes keep more.

        None: widths are for the search to find; `_fits_beyond_noam` then checks whole plans.
        """
        if width is None or self.request.depth is None:
            return rule
        positions = min(self.request.cluster.num_workers // width, len(self.work.states) - 1)
        return replace(rule, beyond=max(0, self.request.depth - positions) * width)

    @property
    def _units_per_flush(self) -> int:
        """Units per replica of a straight pipeline between two updates."""
        if not self.mode.flush:
            return 1
        if not self.mode.cuts():
            return self.request.accumulate or 1
        parts = self.request.microbatches
        # More minibatches than possible stages do not shorten the bubble.
        return parts * (self.request.accumulate or (1 if parts > 1 else self._stages_at_most))

    @property
    def _stages_at_most(self) -> int:
        return min(self.request.cluster.num_workers, len(self.work.states) - 1)

    @property
    def memory_limit_bytes(self) -> float:
        """Memory of a device; infinite without a limit."""
        limit = self.request.cluster.memory_bytes
        return math.inf if limit is None else float(limit)

    def depth_of(self, widths: Sequence[int], depth: int | None = None) -> int:
        """Return the minibatches in flight per input-stage replica, given replicas per position in the pipeline.

        Where the mode leaves it open it is `depth`; None for the request's, or NOAM.
        """
        usual = noam(widths)
        if self.weights.accumulates:  # an update must cover all minibatches in flight
            usual = min(usual, self._accumulate or usual)
        return self.mode.depth or depth or self.request.depth or usual

    def in_flight(self, replicas: Sequence[int], index: int, depth: int) -> int:
        """Return the units in flight on one replica of a stage."""
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
        """Return the most microbatches in flight per stage where workers have several."""
        units = self._units_per_flush
        if self.mode.order != ALL_FORWARDS:
            units = min(units, 3 * positions)  # two groups of `positions` microbatches already reach the peak
        return in_flight_interleaved(self.mode.order, positions, self.mode.chunks, units)

    def accumulated(self, units: int, depth: int) -> int:
        """Return the minibatches of each replica per update; `units` are microbatches per minibatch."""
        if self.mode.flush:
            return self._units_per_flush // units
        return (self._accumulate or self.mode.accumulate or depth) if self.weights.accumulates else 1

    @property
    def _accumulate(self) -> int | None:
        """Requested minibatches per update; without a row of its own, the request is about another mode."""
        return self.request.accumulate if self.request.row is not None else None


class Estimator(ModeRequest):
    """Evaluates plans of one mode."""

    def estimate(
        self,
        found_by: str,
        stages: Sequence[SearchStage],
        devices: Sequence[Sequence[int]] | None = None,
        *,
        depth: int | None = None,
        bottleneck_s: float | None = None,
    ) -> PlanEstimate:
        """Return a plan's costs by the cost model, without simulating it.

        Args:
            found_by: the search's name.
            stages: the plan's.
            devices: of each stage's replicas; None: in order along the devices, position by position.
            depth: minibatches in flight per input-stage replica; None for the request's, or NOAM.
            bottleneck_s: seconds per minibatch of the slowest stage, if the search knows them better.
        """
        replicas = [stage.replicas for stage in stages]
        widths = replicas[: len(replicas) // self.mode.chunks]
        devices = places(self.mode.order, replicas, self.mode.chunks) if devices is None else devices
        units = self.request.microbatches if self.mode.cuts() else 1
        plan, order, rows = self._plan(stages, devices, self.depth_of(widths, depth))
        seconds, port_s = self._seconds(stages, devices, plan.depth, bottleneck_s)
        slowest_s = max(sum(seconds[index] for index in own) for own in plan.by_position)
        accumulate = self.accumulated(units, plan.depth)
        return PlanEstimate(
            plan=plan,
            order=order,
            found_by=found_by,
            stages=self._stage_estimates(stages, devices, plan.depth, seconds, units, bottleneck_s),
            microbatches=units,
            accumulate=accumulate,
            bottleneck_s=(bottleneck_s or max(slowest_s, port_s)) * units,
            port_s=port_s * units,
            minibatch_s=math.inf,
            num_bytes=payload(rows, plan, self.mode, units, accumulate, self.request.profile.slices),
        )

    def _plan(
        self, stages: Sequence[SearchStage], devices: Sequence[Sequence[int]], depth: int
    ) -> tuple[Plan, tuple[int, ...], Sequence[LayerProfile]]:
        """Return the plan, the order of its layers, and the layers in that order."""
        order, starts = arrange(self.work.states, stages)
        rows = arranged(self.sizes, order).layers[self.unit_size]
        plan = make_plan(
            Rows.of(rows),
            starts,
            [stage.replicas for stage in stages],
            mode=self.name,
            devices=devices,
            depth=depth,
            chunks=self.mode.chunks,
            memory=[self.memory_policies[layer] for layer in order],
            relay=self.request.relay,
            ties=self.ties,
        )
        return plan, order, rows

    def _cluster_of(self, stages: Sequence[SearchStage]) -> Cluster:
        """Return the cluster as the sums of a plan's stages meet it."""
        return self.request.cluster.for_stages(len(stages) // self.mode.chunks)

    def _seconds(
        self, stages: Sequence[SearchStage], devices: Sequence[Sequence[int]], depth: int, bottleneck_s: float | None
    ) -> tuple[list[float], float]:
        """Return every stage's seconds per unit, and those of the busiest port."""
        model, cluster = self.request.model, self._cluster_of(stages)
        in_loops = model.has_ports and not self.mode.flush
        seconds, port_s = placed_s(self.work, model, cluster, stages, devices, ways=not in_loops)
        if in_loops:
            sketch = Sketch(tuple(stages), tuple(map(tuple, devices)), depth)
            loops = loops_s(self.work, model, cluster, sketch, relay=self.request.relay)
            seconds = [max(pair) for pair in zip(seconds, loops, strict=True)]
        if bottleneck_s is not None:  # the recurrence sums gradients level by level, which is no slower
            seconds = [min(each, bottleneck_s) for each in seconds]
        return seconds, port_s

    def _stage_estimates(
        self,
        stages: Sequence[SearchStage],
        devices: Sequence[Sequence[int]],
        depth: int,
        seconds: Sequence[float],
        units: int,
        bottleneck_s: float | None,
    ) -> tuple[StageEstimate, ...]:
        """Return the stages' costs per minibatch of `units`, given their seconds per unit."""
        work, model, found = self.work, self.request.model, list[StageEstimate]()
        cluster = self._cluster_of(stages)
        held, again = (
            [float(sums[b] - sums[a]) for a, b, _ in stages]
            for sums in (work.states.parameter_bytes, work.states.recomputed_bytes)
        )
        # Of layer groups, whose backwards follow each other, one is whole while the next one is gathered.
        whole, recomputed = transient_bytes(held, 2), transient_bytes(again, 1)
        replicas = [stage.replicas for stage in stages]
        for index, stage in enumerate(stages):
            level = cluster.levels[spanned(cluster, devices[index])]
            compute_s, sync_s, transfer_s = map(float, model.parts(work, level, *stage))
            if not model.has_ports:
                transfer_s = float(max(model.cuts_s(work, *cut_levels(cluster, devices, index), *stage)))
            in_flight = self.in_flight(replicas, index, depth)
            rule = self.stage_memory(math.inf, replicas, index, depth)
            num_bytes, virtual = rule.num_bytes(work.states, *stage[:2], in_flight, stage.replicas), None
            num_bytes += rule.whole_at_once(stage.replicas) * whole[index]
            if self.mode.shape == "one-stage":
                num_bytes += recomputed[index] - again[index]
            if work.states.activations is not None:
                virtual = work.states.activations.virtual(*work.states.bounds[[stage.start, stage.stop]])
            sync_s, stage_s = min(sync_s, bottleneck_s or sync_s) * units, seconds[index] * units
            own_s = compute_s * units, sync_s, transfer_s * units, stage_s
            found.append(StageEstimate(*own_s, num_bytes, in_flight, virtual))
        return tuple(found)

    def stage_problem(self, rule: MemoryRule, stage: SearchStage, in_flight: int) -> StageProblem:
        """Return a stage of consecutive layers whose policies are to be chosen."""
        states, rows = self.work.states, self.request.profile.layers[self.unit_size]
        layers = states.layers(stage.start, stage.stop)
        constant_bytes, each_bytes = rule.beside_activations(states, *stage)
        return StageProblem(
            rows, layers[0], layers[-1] + 1, in_flight, rule.limit_bytes, constant_bytes, each_bytes,
            self.request.cluster.pcie_bytes_per_s, self.request.chooses, input_bytes_of(rows),
        )  # fmt: skip

    def with_prediction(self, found: PlanEstimate, hopeless_s: float = math.inf) -> PlanEstimate:
        """Return an estimate with the simulator's prediction, given up on as in `predict` if it is slower."""
        if found.is_simulated:
            return found
        if not self._can_simulate(found.plan):
            if self.mode.depth == 1:  # one stage after the other
                return replace(found, minibatch_s=sum(each.stage_s for each in found.stages))
            return replace(found, minibatch_s=found.bottleneck_s)
        workload, count = self.workload(found)
        return replace(found, minibatch_s=predict(workload, count, hopeless_s), is_simulated=True)

    def simulated_peaks(self, found: PlanEstimate) -> list[int] | None:
        """Return the simulated peak bytes per stage's replica; None if simulating takes long.

        Model inputs that a recomputed layer reads count as 0: a profile doesn't know their bytes.
        """
        if not self._can_simulate(found.plan):
            return None
        workload, count = self.workload(found)
        memories = stage_memories(arranged(self.sizes, found.order), found.plan, workload.pipeline)
        meter = MemoryMeter(workload.pipeline, memories, workload.costs)
        simulate_all(workload, count, Meter(workload.pipeline, meter))
        peaks = [peak.num_bytes for peak in meter.timeline().peaks]
        return [max(peaks[worker] for worker in own) for own in workload.pipeline.places]

    def estimate_rate(self, found: PlanEstimate, num_instructions: int) -> tuple[float, int]:
        """Estimate what `with_prediction` returns, and the number of instructions simulated for it."""
        workload, count = self.workload(found)
        return estimate_rate(workload, 2 * count, num_instructions)

    def workload(self, found: PlanEstimate) -> tuple[PlannedWorkload, int]:
        """Return the plan as the simulator runs it, and the number of minibatches to its steady state."""
        return planned_workload(found, self.mode, arranged(self.sizes, found.order), self.request)

    def _can_simulate(self, plan: Plan) -> bool:
        """Return whether simulating a plan takes moments.

        Groups of layers that sum in rings count once: they have no messages between all pairs of workers.
        """
        mode = with_sums(self.mode, self.request.cluster, plan)
        rings = mode.is_sharded and mode.sums == RING
        num_replicas = sum(stage.replicas for stage in (plan.positions if rings else plan.stages))
        return num_replicas <= MOST_SIMULATED and math.lcm(*plan.replicas) <= LONGEST_BLOCK
