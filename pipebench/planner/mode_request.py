"""A request in one mode: what is sent and updated together, how much is in flight, and what that keeps in memory."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from pipebench.cluster import Cluster
from pipebench.errors import PlanError
from pipebench.model.plan import PARAMETER, as_they_run, shared
from pipebench.planner.activations import Activations
from pipebench.planner.cost_models import HIDDEN, CostModel, UnitWork
from pipebench.planner.memory import MemoryRule, in_flight_interleaved
from pipebench.planner.plans import Request
from pipebench.planner.state_graph import antichains, prefixes
from pipebench.planner.states import PlanningCache, States
from pipebench.profile.model import Profile
from pipebench.schedule.modes import KEEP, MODES, RECOMPUTE
from pipebench.schedule.orders import ALL_FORWARDS, order_of
from pipebench.schedule.pipeline import Pipeline, chain, noam
from pipebench.schedule.syncs import SYNCS
from pipebench.schedule.weights import WEIGHT_POLICIES, update_costs


class ModeRequest:
    """A request in one mode: the size of a unit, places to cut, and what is done with activations.

    Args:
        request: what to plan.
        mode: its name; `request.row`, if given, replaces the mode's row of the table.
        cache: results that the modes of one request share; new ones are added to it.
    """

    def __init__(self, request: Request, mode: str, cache: PlanningCache | None = None) -> None:
        self.request = request
        self.name = mode
        self.mode = request.row or MODES[mode]
        self.weights = WEIGHT_POLICIES[self.mode.weights]
        self.cache = PlanningCache() if cache is None else cache

    def under(self, **changes: Any) -> Self:
        """Return the same mode for a request that differs in the given fields, but not in the profile."""
        return type(self)(replace(self.request, **changes), self.name, cache=self.cache)

    def keeping(self, policies: tuple[str, ...]) -> Self:
        """Return the same mode for a plan's activation policies, which its stages may have chosen."""
        chosen = self.request.chooses and policies != self.memory_policies
        return self.under(memory=policies) if chosen else self

    @property
    def cluster(self) -> Cluster:
        """The cluster with the links that plans of several stages use, or of one stage if the mode has no others."""
        return self.request.cluster.for_stages(1 if self.mode.is_one_stage else 2)

    @cached_property
    def unit_size(self) -> int:
        """Samples per unit: the largest microbatch."""
        size = -(-self.request.minibatch_size // self.units)
        if size not in self.request.profile.layers:
            raise PlanError(
                f"mode {self.name} sends {size} samples at a time, and the profile has no times for so many, only for "
                f"{', '.join(map(str, sorted(self.request.profile.layers)))}"
            )
        return size

    @property
    def units(self) -> int:
        """Microbatches per minibatch."""
        return self.request.microbatches if self.mode.takes_microbatches() else 1

    @cached_property
    def states(self) -> States:
        """The places to cut the model, and what is between them at the size of a unit."""
        rows = self.request.profile.layers[self.unit_size]
        by_antichains = self.request.model.antichains and not self.request.runnable
        key = self.unit_size, self.ties and any(kind == PARAMETER for kind, _ in shared(rows))
        if key not in self.cache.states:
            self.cache.states[key] = (antichains if by_antichains else prefixes)(rows, ties=key[1])
        states = self.cache.states[key]
        if RECOMPUTE in self.memory_policies:
            states = states.recomputing(self.memory_policies)
        if self.request.memory is not None and states.is_chain:
            pcie = self.request.cluster.pcie_bytes_per_s
            states = replace(states, activations=Activations(rows, self.memory_policies, pcie))
        return states

    @property
    def ties(self) -> bool:
        """Whether stages may have a copy each of a weight that their layers share."""
        return self.mode.ties and self.request.ties

    @cached_property
    def memory_policies(self) -> tuple[str, ...]:
        """Activation policy of every layer of the profile."""
        rows = self.request.profile.layers[self.unit_size]
        recomputes = self.mode.recompute and not self.stages_choose
        return as_they_run(rows[:-1], self.request.memory or (RECOMPUTE if recomputes else KEEP,) * (len(rows) - 1))

    @property
    def stages_choose(self) -> bool:
        """Whether stages choose their layers' activation policies, as vPipe's do."""
        return bool(self.request.chooses) and self.mode.chooses_memory

    @cached_property
    def sizes(self) -> Profile:
        """The profile at the sizes in use; of variable lengths the representative one."""
        layers = self.request.profile.layers
        wanted = {self.unit_size, self.request.minibatch_size} & {*layers}
        return replace(self.request.profile, layers={size: layers[size] for size in sorted(wanted)}, lengths=())

    @property
    def cutting_models(self) -> Sequence[CostModel]:
        """The cost models by which stages of given widths are cut, for the simulator to choose among: the request's.

        Under `overlap` a pipeline that flushes is cut without round trips, too: more units are in flight than NOAM.
        """
        hides = self.mode.flush and self.mode.depth is None and self.request.model.has_ports
        return (self.request.model, HIDDEN) if hides else (self.request.model,)

    @property
    def memory_limit_bytes(self) -> float:
        """Memory of a device; infinite without a limit."""
        limit = self.request.cluster.memory_bytes
        return math.inf if limit is None else float(limit)

    def positions_at(self, width: int) -> int:
        """Return the most positions of `width` replicas each."""
        return min(self.request.cluster.num_workers // width, len(self.states) - 1)


class UnitsInFlight(ModeRequest):
    """A request in one mode, with the minibatches that an update covers and those in flight meanwhile."""

    def __init__(self, request: Request, mode: str, cache: PlanningCache | None = None) -> None:
        super().__init__(request, mode, cache)
        if self.mode.shape == "one-stage" and self.mode.chunks > 1 and not request.is_cut:
            self.mode = replace(self.mode, chunks=len(self.groups))

    @cached_property
    def groups(self) -> list[tuple[int, int]]:
        """The layer groups of a mode that is one stage, as pairs of states.

        Groups have copies of tied parameters if that lowers the peak memory of a replica.
        """
        found = layer_groups(self.states, self.mode.chunks)
        if not self.states.parts_ties:
            return found
        keeping, place = self.under(ties=False), {members: i for i, members in enumerate(self.states.members)}
        own = [place[members] for members in keeping.states.members]
        whole = [(own[start], own[stop]) for start, stop in keeping.groups]
        return min(whole, found, key=self._peak_bytes)

    def _peak_bytes(self, groups: Sequence[tuple[int, int]]) -> float:
        """Return the bytes of parameters, gradients and optimizer state on a replica with these layer groups."""
        rule, replicas = self.memory(math.inf), self.request.cluster.num_workers
        shards = (rule.num_bytes(self.states, *group, 0, replicas) for group in groups)
        weights = [self.states.weights(*group) for group in groups]
        return sum(shards) + sum(rule.whole_bytes(weights, replicas))

    @cached_property
    def work(self) -> UnitWork:
        """The model at the size of a unit, with costs for searches over plans of any depth.

        If a mode predicts weights, updates are priced as if all stages did. In pipelines that flush, every unit is
        charged a gradient sum and an optimizer step: nothing hides the sum and step of a flush, so the higher price
        makes searches balance parameters over the stages.
        """
        profile = self.request.profile
        load_s = profile.load_s.get(self.unit_size, 0.0)
        update_s_per_byte = profile.update_s_per_byte * self.weights.update_cost
        rounds = 1 if self.mode.flush else self.units * self.accumulated(self.request.depth or 1)
        return UnitWork(self.states, update_s_per_byte, profile.update_floor_s, load_s, rounds)

    def searched_at(self, widths: Sequence[int]) -> UnitWork:
        """Return the model with costs for searches over plans with these replicas per position."""
        return self.work if self.mode.flush else self.work_at(self.depth_of(widths))

    def work_at(self, depth: int) -> UnitWork:
        """Return the model with costs for plans with `depth` minibatches in flight per input-stage replica."""
        return replace(self.work, rounds=self.units * self.accumulated(depth))

    def work_of(self, replicas: Sequence[int], depth: int) -> UnitWork:
        """Return the model with a plan's costs; if any stage predicts weights, updates cost as if all did."""
        steps = max(update_costs(self.shape(replicas, depth)))
        return replace(self.work_at(depth), update_s_per_byte=steps * self.request.profile.update_s_per_byte)

    def accumulated(self, depth: int) -> int:
        """Return the minibatches of each replica per update."""
        if self.mode.flush:
            return self._units_per_flush // self.units
        return (self._accumulate or self.mode.accumulate or depth) if self.weights.accumulates else 1

    @property
    def _units_per_flush(self) -> int:
        """Units between two updates on each replica of a straight pipeline."""
        if not self.mode.flush:
            return 1
        if not self.mode.takes_microbatches():
            return self.request.accumulate or 1
        parts = self.request.microbatches
        # More minibatches than possible stages do not shorten the bubble.
        return parts * (self.request.accumulate or (1 if parts > 1 else self.positions_at(1)))

    @property
    def _accumulate(self) -> int | None:
        """Requested minibatches per update; 1 in a request for another mode may be that mode's default."""
        asked = self.request.accumulate
        return None if self.request.row is None and asked == 1 else asked

    def depth_of(self, widths: Sequence[int], depth: int | None = None) -> int:
        """Return the minibatches in flight per input-stage replica.

        Args:
            widths: replicas per position in the pipeline.
            depth: the depth, unless the mode fixes another; None for the request's, or NOAM.
        """
        usual = noam(widths)
        if self.weights.accumulates:  # an update must cover all minibatches in flight
            usual = min(usual, self._accumulate or usual)
        return self.mode.depth or depth or self.request.depth or usual

    def memory(self, limit_bytes: float) -> MemoryRule:
        """Return the mode's memory rule for devices of `limit_bytes`, less the largest workspace of any layer."""
        rows, in_flight = self.request.profile.layers[self.unit_size], None
        if self.mode.order == ALL_FORWARDS:
            in_flight = self._units_per_flush
        elif self.mode.depth is not None:
            in_flight = self.mode.depth
        elif order_of(self.mode.order).splits:  # weight parts are delayed until every stage holds as many as the first
            in_flight = min(self._units_per_flush, self.request.depth or self.positions_at(1))
        return MemoryRule(
            limit_bytes - max(row.workspace_bytes for row in rows),
            versions=self.mode.weight_sets,
            state_bytes_per_byte=self.request.profile.state_bytes_per_byte,
            masters=self.request.profile.has_masters,
            shard=self.mode.shard,
            in_place=self.mode.shape == "one-stage",
            in_flight=in_flight,
            depth_at_most=self.request.depth,
            reshards=self.mode.reshard_after_forward,
            accumulates=self.accumulated(1) > 1,
            pushers=0 if SYNCS[self.mode.sync].waits else self.request.cluster.num_workers - 1,
        )

    def shape(self, replicas: Sequence[int], depth: int) -> Pipeline:
        """Return the shape of a plan's pipeline, as a chain."""
        return Pipeline(
            tuple(replicas), chain(len(replicas)), self.mode.order, self.mode.flush, depth, self.units,
            self.accumulated(depth), weights=self.mode.weights, chunks=self.mode.chunks,
        )  # fmt: skip

    def stage_rules(self, limit_bytes: float, replicas: Sequence[int], depth: int) -> list[MemoryRule]:
        """Return the memory rule of every stage of a plan, with the sets of weights that it keeps."""
        rule, shape = self.memory(limit_bytes), self.shape(replicas, depth)
        return [replace(rule, versions=self.weights.num_sets(shape, index)) for index in range(len(replicas))]

    def at_width(self, rule: MemoryRule, width: int | None) -> MemoryRule:
        """Return the rule for stages of `width` replicas, with the units in flight of a depth beyond NOAM.

        None: widths differ, and whole plans are checked by `Planner._fits_beyond_noam` after the search.
        """
        if width is None or self.request.depth is None:
            return rule
        return replace(rule, beyond=max(0, self.request.depth - self.positions_at(width)) * width)

    def in_flight(self, replicas: Sequence[int], index: int, depth: int) -> int:
        """Return the units in flight on one replica of a stage, at most those between two flushes."""
        if self.mode.chunks > 1:
            return self.interleaved_in_flight(len(replicas) // self.mode.chunks)[index]
        own = math.lcm(*replicas) // replicas[index] * self._units_per_flush
        if self.mode.order == ALL_FORWARDS:
            return own
        if order_of(self.mode.order).splits:  # weight parts are delayed: see `memory`
            return min(own, max(depth, self.shape(replicas, depth).warmups[index]))
        rule = replace(self.memory(math.inf), depth_at_most=depth if set(replicas) == {1} else None)
        if rule.in_flight is None and depth > noam(replicas):
            found = self.shape(replicas, depth).warmups[index]
        else:
            found = rule.depth(replicas[index], sum(replicas[index + 1 :]))
        return min(found, own) if self.mode.flush else found

    def interleaved_in_flight(self, positions: int) -> list[int]:
        """Return the most microbatches in flight per stage if workers have several stages."""
        units = self._units_per_flush
        if self.mode.order != ALL_FORWARDS:
            units = min(units, 3 * positions)  # two groups of `positions` microbatches already reach the peak
        return in_flight_interleaved(self.mode.order, positions, self.mode.chunks, units)


def layer_groups(states: States, most: int) -> list[tuple[int, int]]:
    """Return the layer groups of sharded data parallelism as pairs of states, at most `most`, each with parameters.

    A group is gathered, used and freed as one, and two are in memory at once. So borders are where the cumulative bytes
    of parameters are nearest to equal shares; of equally near places the last, so that layers without parameters stay
    with those before them.
    """
    held, last = states.used_bytes, len(states) - 1
    bounds = [0]
    for group in range(1, most):
        distances = np.abs(held - held[last] * group / most)
        border = int(np.flatnonzero(distances == distances.min())[-1])
        if border < last and held[border] > held[bounds[-1]] and states.inside[bounds[-1], border]:
            bounds.append(border)
    if len(bounds) > 1 and held[last] == held[bounds[-1]]:
        bounds.pop()
    return [*zip(bounds, [*bounds[1:], last], strict=True)]
