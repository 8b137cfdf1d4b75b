"""Costs of a plan in one mode: memory, seconds by the cost model, bytes sent, and the simulator's prediction."""

import math
from collections.abc import Sequence
from dataclasses import replace

from pipebench.cluster import Cluster
from pipebench.model.plan import Plan, make_plan
from pipebench.planner.flat import SearchStage
from pipebench.planner.memory import MemoryRule, transient_bytes
from pipebench.planner.mode_request import UnitsInFlight
from pipebench.planner.placement_costs import Sketch, cut_levels, loops_s, placed_s, spanned
from pipebench.planner.plans import PlanEstimate, StageEstimate
from pipebench.planner.predict import PlannedWorkload, arrange, arranged, payload, planned_workload, predict, with_sums
from pipebench.planner.stage_problem import StageProblem, input_bytes_of
from pipebench.profile.model import LayerProfile, Rows
from pipebench.schedule.operations import ACTIVATION, GRADIENT
from pipebench.schedule.placement import places
from pipebench.schedule.syncs import RING
from pipebench.simulate.memory import stage_memories
from pipebench.simulate.memory_meter import MemoryMeter
from pipebench.simulate.meter import Meter
from pipebench.simulate.steady import estimate_rate, simulate_all

MOST_SIMULATED = 256  # workers; beyond, the prediction is the cost model's bottleneck
LONGEST_BLOCK = 512  # minibatches per round of all stages, as above


class Estimator(UnitsInFlight):
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
            devices: of every stage's replicas; None: in order along the devices, position by position.
            depth: minibatches in flight per input-stage replica; None for the request's, or NOAM.
            bottleneck_s: seconds per minibatch of the slowest stage by the search's own recurrence, if that is less.
        """
        replicas = [stage.replicas for stage in stages]
        widths = replicas[: len(replicas) // self.mode.chunks]
        devices = places(self.mode.order, replicas, self.mode.chunks) if devices is None else devices
        plan, order, rows = self._plan(stages, devices, self.depth_of(widths, depth))
        seconds, port_s = self._seconds(stages, devices, plan.depth, bottleneck_s)
        slowest_s = max(sum(seconds[index] for index in own) for own in plan.by_position)
        accumulate = self.accumulated(plan.depth)
        return PlanEstimate(
            plan=plan,
            order=order,
            found_by=found_by,
            stages=self._stage_estimates(stages, devices, plan.depth, seconds, bottleneck_s),
            microbatches=self.units,
            accumulate=accumulate,
            bottleneck_s=(bottleneck_s or max(slowest_s, port_s)) * self.units,
            port_s=port_s * self.units,
            minibatch_s=math.inf,
            num_bytes=payload(rows, plan, self.mode, self.units, accumulate, self.request.profile.slices),
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
        """Return the cluster with the links that the gradient sums of a plan's stages use."""
        return self.request.cluster.for_stages(len(stages) // self.mode.chunks)

    def _seconds(
        self, stages: Sequence[SearchStage], devices: Sequence[Sequence[int]], depth: int, bottleneck_s: float | None
    ) -> tuple[list[float], float]:
        """Return the seconds per unit of every stage, and of the busiest port."""
        model, cluster = self.request.model, self._cluster_of(stages)
        work = self.work_of([stage.replicas for stage in stages], depth)
        in_loops = model.has_ports and not self.mode.flush
        seconds, port_s = placed_s(work, model, cluster, stages, devices, ways=not in_loops)
        if in_loops:
            sketch = Sketch(tuple(stages), tuple(map(tuple, devices)), depth)
            loops = loops_s(work, model, cluster, sketch, relay=self.request.relay)
            seconds = [max(pair) for pair in zip(seconds, loops, strict=True)]
        if bottleneck_s is not None:  # the recurrence sums gradients level by level, which is at least as fast
            seconds = [min(each, bottleneck_s) for each in seconds]
        return seconds, port_s

    def _stage_estimates(
        self,
        stages: Sequence[SearchStage],
        devices: Sequence[Sequence[int]],
        depth: int,
        seconds: Sequence[float],
        bottleneck_s: float | None,
    ) -> tuple[StageEstimate, ...]:
        """Return the stages' costs per minibatch, given their seconds per unit."""
        units, replicas = self.units, [stage.replicas for stage in stages]
        work, model, found = self.work_of(replicas, depth), self.request.model, list[StageEstimate]()
        cluster = self._cluster_of(stages)
        again = [float(work.states.recomputed_bytes[b] - work.states.recomputed_bytes[a]) for a, b, _ in stages]
        recomputed = transient_bytes(again, 1)
        rules = self.stage_rules(math.inf, replicas, depth)
        whole = rules[0].whole_bytes([work.states.weights(a, b) for a, b, _ in stages], replicas[0])
        for index, (stage, rule) in enumerate(zip(stages, rules, strict=True)):
            level = cluster.levels[spanned(cluster, devices[index])]
            compute_s, sync_s, transfer_s = map(float, model.parts(work, level, *stage))
            if not model.has_ports:
                transfer_s = float(max(model.cuts_s(work, *cut_levels(cluster, devices, index), *stage)))
            in_flight = self.in_flight(replicas, index, depth)
            num_bytes, virtual = rule.num_bytes(work.states, *stage[:2], in_flight, stage.replicas), None
            num_bytes += whole[index]
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
        """Return an estimate with the simulator's prediction, infinite as in `predict` if it exceeds `hopeless_s`."""
        if found.is_simulated:
            return found
        if not self.simulates(found):
            if self.mode.depth == 1:  # stages take turns
                return replace(found, minibatch_s=sum(each.stage_s for each in found.stages))
            return replace(found, minibatch_s=self.filled_s(found))
        workload, count = self.workload(found)
        return replace(found, minibatch_s=predict(workload, count, hopeless_s), is_simulated=True)

    def filled_s(self, found: PlanEstimate) -> float:
        """Return a plan's seconds per minibatch by the cost model, with fill, drain and gradient sums of a flush.

        The first of u units between two flushes passes all stages, the others follow at the slowest worker's pace, and
        the gradient sums come after them. With v stages per worker, fill and drain take 1/v of the time (Megatron-LM,
        SC'21, section 2.2).
        """
        if not self.mode.flush:
            return found.bottleneck_s
        share = 1 / (self._units_per_flush * self.mode.chunks)
        pace_s = max(sum(max(each.compute_s, each.transfer_s) for each in own) for own in found.by_position)
        sum_s = max(sum(each.sync_s for each in own) for own in found.by_position)
        fill_s = sum(each.compute_s + each.transfer_s for each in found.stages)
        return max(pace_s * (1 - share) + fill_s * share + sum_s, found.bottleneck_s)

    def simulated_peaks(self, found: PlanEstimate) -> list[int] | None:
        """Return the simulated peak bytes of a replica of every stage; None if simulating takes long.

        Model inputs that a recomputed layer reads count as 0 bytes, because a profile doesn't have their sizes.
        """
        if not self.simulates(found):
            return None
        workload, count = self.workload(found)
        memories = stage_memories(arranged(self.sizes, found.order), found.plan, workload.pipeline)
        meter = MemoryMeter(workload.pipeline, memories, workload.costs)
        simulate_all(workload, count, Meter(workload.pipeline, meter))
        peaks = [peak.num_bytes for peak in meter.timeline().peaks]
        return [max(peaks[worker] for worker in own) for own in workload.pipeline.places]

    def peaks_over_memory(self, found: PlanEstimate) -> dict[int, int]:
        """Return the simulated peak bytes of a replica, by stage, where they exceed a device's memory.

        The closed form has room for two transfers each way, and more can wait at a narrow stage behind wide ones.
        Nothing is simulated if all that is in flight could wait at one worker.
        """
        plan, limit = found.plan, self.memory_limit_bytes
        in_flight = max(plan.depth * plan.replicas[0], found.accumulate * math.lcm(*plan.replicas))
        waiting = in_flight * sum(found.num_bytes.get(kind, 0.0) for kind in (ACTIVATION, GRADIENT))
        if not waiting or found.memory_bytes + waiting <= limit:
            return {}
        return {stage: peak for stage, peak in enumerate(self.simulated_peaks(found) or ()) if peak > limit}

    def estimate_rate(self, found: PlanEstimate, num_instructions: int) -> tuple[float, int]:
        """Estimate a plan's prediction; also return the number of instructions simulated for the estimate."""
        workload, count = self.workload(found)
        return estimate_rate(workload, 2 * count, num_instructions)

    def workload(self, found: PlanEstimate) -> tuple[PlannedWorkload, int]:
        """Return the plan as the simulator runs it, and the number of minibatches to its steady state."""
        return planned_workload(found, self.mode, arranged(self.sizes, found.order), self.request)

    def simulates(self, found: PlanEstimate) -> bool:
        """Return whether simulating a plan is fast.

        Groups of layers that sum in rings count as one stage, since they don't send messages between all pairs of
        workers.
        """
        plan, mode = found.plan, with_sums(self.mode, self.request.cluster, found.plan)
        rings = mode.is_sharded and mode.sums == RING
        num_replicas = sum(stage.replicas for stage in (plan.positions if rings else plan.stages))
        return num_replicas <= MOST_SIMULATED and math.lcm(*plan.replicas) <= LONGEST_BLOCK
