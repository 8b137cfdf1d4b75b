"""Cost models: seconds per minibatch of a stage in steady state, and the fewest replicas for a given time.

- `sosp19`, PipeDream (SOSP'19) section 3.1 as printed: T(i..j, m) = 1/m max(compute, 2 (m-1) |w| / B), and 2 a / B per
  cut. Computing overlaps communication. (With 1/m before the maximum, summing gradients costs the same per minibatch
  for any number of replicas.)
- `artifact`, the published optimizer at activation compression 1: (compute + 4 (m-1) |w| / (m B)) / m, and for every
  stage but the first 2 a_in / (B m) and, unless it is the last, 2 a_out / (B m). A cut carries the outputs of its
  augmented antichain (`states`), so a value read in two branches counts even if no layer beyond the cut reads it. Model
  inputs are free. On several levels only the first stage's gradient sum is divided by the components of the level
  below.
- `overlap`, the default, approximates this package's simulator. A replica's round (one minibatch per replica) takes
  forward, backward, update and the minibatch's transfers to the stage and back: at NOAM there is no other minibatch to
  compute meanwhile. Gradients are summed in a ring during the backward, the last bucket after it. Instead, the port
  shared by activations, gradients and the ring may be the bottleneck, or loading. If an update covers several rounds,
  each is charged a share of its sum and its step. Includes latencies, host copies, efficiencies and limits of levels.
  Differs from the simulator: gradients from the middle of a stage are in time, and transfers do not queue. Plans found
  with these terms are then priced as a whole by `placement_costs.py`.

Every time is a maximum of terms (base + sync (m-1)/m) / m + tail (m-1)/m with m replicas. So the least m for a given
time has a closed form, and planning for 16,384 workers takes as long as for 16.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipebench.cluster import Cluster, Level
from pipebench.planner.activations import Floats, Unit
from pipebench.planner.states import ONCE, States
from pipebench.simulate.costs import BUCKET_BYTES, Costs, SimulatedBucket, StageCosts
from pipebench.simulate.sums import ring_latency_s

# On average half of the last bucket is complete only when the backward is over.
LAST_BUCKET_BYTES = BUCKET_BYTES / 2
# Replicas if no number of them meets the limit. Finite, because arithmetic with infinities gives nan.
_UNREACHABLE = 1e15


@dataclass(frozen=True)
class Term:
    """A lower bound on a stage's seconds per minibatch with m replicas: (base + sync (m-1)/m) / m + tail (m-1)/m."""

    base: Floats  # seconds of a round on every replica
    sync: Floats | float = 0.0  # seconds of a round's gradient sum as m grows
    tail: Floats | float = 0.0  # seconds per minibatch as m grows, not divided by the replicas

    def seconds(self, m: Floats | float) -> Floats:
        """Return the seconds per minibatch with m replicas."""
        others = (m - 1) / m
        return (self.base + self.sync * others) / m + self.tail * others

    @property
    def is_shared(self) -> bool:
        """Whether the term falls with every further replica: it has a base only."""
        return isinstance(self.sync, float) and isinstance(self.tail, float)

    def least(self, limit_s: float, at_least: Floats | float) -> Floats:
        """Return the fewest replicas, `at_least` or more, with which the term is at most `limit_s`; or _UNREACHABLE.

        Multiplied by m^2, the condition is slope m^2 - b m + sync >= 0 with slope = limit - tail and
        b = base + sync - tail. With a positive slope it holds from the larger root on, and up to the smaller; otherwise
        at most up to a root. Whether `at_least` suffices is evaluated with the term itself, because in b a base is lost
        to rounding beside a sum 1e9 times as long.
        """
        with np.errstate(all="ignore"):
            if self.is_shared:
                return np.fmax(np.ceil(self.base / limit_s), at_least)  # fmax ignores the nan of 0 / 0
            holds = self.seconds(at_least) <= limit_s
            slope = limit_s - self.tail
            b = self.base + self.sync - self.tail
            root = np.ceil((b + np.sqrt(b * b - 4 * slope * self.sync)) / (2 * slope))
            # Without a root (nan) the parabola has the same sign everywhere, which `holds` has tested.
            later = np.where((slope > 0) & (root < _UNREACHABLE), np.maximum(root, at_least), _UNREACHABLE)
        return np.where(holds, at_least, later)


@dataclass(frozen=True)
class StageTerms:
    """All terms of some stages."""

    terms: tuple[Term, ...]  # of arrays [start, stop], or broadcastable to it
    fixed_s: Floats | float = 0.0  # seconds per minibatch that replicas do not share

    def seconds(self, m: Floats | float) -> Floats:
        """Return the seconds per minibatch with m replicas."""
        worst = np.asarray(self.fixed_s, dtype=float)
        for term in self.terms:
            worst = np.maximum(worst, term.seconds(m))
        return worst

    def least(self, limit_s: float, at_least: Floats | float = 1.0) -> Floats:
        """Return the fewest replicas with which all terms are at most `limit_s`, or infinity."""
        m: Floats | float = at_least
        for term in self.terms:
            m = term.least(limit_s, m)
        others = [term for term in self.terms if not term.is_shared]
        for _ in others[1:]:  # one term may raise m to between another term's roots, so all are evaluated again
            for term in others:
                m = term.least(limit_s, m)
        return np.where((self.fixed_s <= limit_s) & (m < _UNREACHABLE), m, np.inf)


@dataclass(frozen=True)
class UnitWork:
    """A model to plan, at the size of a unit: a minibatch, or a microbatch in modes that cut them."""

    states: States
    update_s_per_byte: float = 0.0  # optimizer seconds per byte of parameters
    update_floor_s: float = 0.0  # least seconds of an update
    load_s: float = 0.0  # seconds to load one unit's inputs
    rounds: int = 1  # units of every replica per update, in which gradients are summed once


@dataclass(frozen=True)
class Inner:
    """Stages on components of the level below."""

    seconds: Floats  # per minibatch on one component, [start, stop]
    count: int  # subcomponents of each


@dataclass(frozen=True)
class StageGrid:
    """The stages from given states to all states from `stop_from` on; arrays are [start, stop]."""

    work: UnitWork
    starts: NDArray[np.intp]  # indices of the states before the stages
    stop_from: int = 0  # index of the first state after them

    def sums(self, values: Floats) -> Floats:
        """Return the stages' sums, given cumulative sums over states; meaningless where stop < start."""
        if values.ndim == 2:  # groups of states: see `States.grouped`
            return np.maximum(values[:1, self.stop_from :] - values[1, self.starts, None], 0.0)
        return values[None, self.stop_from :] - values[self.starts, None]

    def cuts(self, values: Floats) -> tuple[Floats, Floats]:
        """Return the values of cuts before stages [start, 1] and after [1, stop]; 0 at the model's ends."""
        before = values[self.starts, None] * (self.starts[:, None] > 0)
        after = values[None, self.stop_from :].copy()
        after[0, -1] = 0.0
        return before, after

    @property
    def copies(self) -> Sequence[Floats | float]:
        """Bytes of copies of tied parameters, which `sums` leaves out, by the fields of `ParameterBytes`."""
        tied = self.work.states.tied
        return (0.0, 0.0, 0.0) if tied is None else [*tied.copies(self.starts, self.stop_from)]

    @property
    def weights(self) -> Floats:
        """Bytes of the stages' trained parameters."""
        return self.sums(self.work.states.parameter_bytes) + self.copies[0]

    @property
    def held(self) -> list[Floats]:
        """Bytes of the stages' parameters and buffers, by the fields of `ParameterBytes`."""
        return [self.sums(getattr(self.work.states, n)) + copies for n, copies in zip(ONCE, self.copies, strict=True)]

    @property
    def unit(self) -> Unit | None:
        """The stages' activations per unit, if layers have different policies; else None."""
        states = self.work.states
        if states.activations is None:
            return None
        return states.activations.of(states.bounds[self.starts], states.bounds[self.stop_from :])

    @property
    def compute_s(self) -> Floats:
        """Seconds of a forward and a backward, and of waiting for swapped activations."""
        states, unit = self.work.states, self.unit
        own_s = self.sums(states.forward_s + states.backward_s)
        return own_s if unit is None else own_s + unit.late_s


class CostModel(ABC):
    """A named cost model."""

    name: str  # as on the command line
    summary: str  # one line for people
    antichains: bool  # whether plans for a profile file may cut at any antichain of the graph, as the artifact does
    has_ports: bool = False  # whether the workers of a component share its port

    @abstractmethod
    def terms(self, grid: StageGrid, level: Level, *, first: bool, inner: Inner | None = None) -> StageTerms:
        """Return the terms of a grid's stages.

        Args:
            grid: the stages.
            level: links between a stage's replicas, and between stages.
            first: whether the stages are the first of their pipeline, as those from state 0 always are.
            inner: the stages on components of the level below; None at the innermost level.
        """

    @abstractmethod
    def parts(self, work: UnitWork, level: Level, start: int, stop: int, m: int) -> tuple[float, float, float]:
        """Return a stage's (compute, gradient sum, transfer) seconds per minibatch, each on its own."""

    def cuts_s(self, work: UnitWork, before: Level, after: Level, start: int, stop: int, m: int) -> tuple[float, float]:
        """Return the cost of the cuts before and after a stage by themselves, each over its own level."""
        return 0.0, 0.0

    def round(self, grid: StageGrid, level: Level) -> Term:
        """Return the term of a replica's round: forward, backward, and what the next forward waits for."""
        return Term(grid.compute_s)

    def paces(self, grid: StageGrid, level: Level) -> tuple[Term, ...]:
        """Return the terms, besides rounds, that hold for any number of minibatches in flight."""
        return ()

    def simulated(self, costs: Costs, replicas: Sequence[int]) -> Costs:
        """Return the costs with which a plan is simulated under this model."""
        return costs

    def links(self, cluster: Cluster) -> Cluster:
        """Return the cluster that this model assumes: by default, full bandwidth without latencies and host copies."""
        return replace(cluster, levels=tuple(map(_plain, cluster.levels)))


def ring_s(hops: Sequence[Level], num_bytes: int) -> float:
    """Return the seconds of a ring all-reduce without other traffic, given the level of every hop around the ring."""
    size, rate = len(hops), min(level.sum_bytes_per_s for level in hops)
    return 2 * (size - 1) * num_bytes / size / rate + ring_latency_s([level.latency_s for level in hops])


def _plain(level: Level) -> Level:
    """Return a level with its full bandwidth and without latency and host copies, as in the published formulas."""
    return replace(level, latency_s=0.0, efficiency=1.0, host_copy_bytes_per_s=None)


def _summed(stage: StageCosts, factor: float, ready: float) -> StageCosts:
    """Return a stage with one gradient bucket, ready at a fraction of the backward, and else computing only.

    The bucket's bytes are those of the gradients times `factor`.
    """
    names = tuple(name for bucket in stage.buckets for name in bucket.parameters)
    num_bytes = round(factor * sum(bucket.num_bytes for bucket in stage.buckets))
    buckets = (SimulatedBucket(num_bytes, ready, names),) if num_bytes else ()
    return replace(stage, buckets=buckets, update_s=0.0, load_s=dict.fromkeys(stage.load_s, 0.0), buffer_bytes=0)


def _cuts_s(
    work: UnitWork, carried: Floats, cuts: tuple[tuple[int, Level], tuple[int, Level]], factor: float
) -> tuple[float, float]:
    """Return the seconds of the cuts (state, level) before and after a stage; 0 at the model's ends."""
    inside = range(1, len(work.states) - 1)
    rates = (_plain(level).message_bytes_per_s for _, level in cuts)
    before_s, after_s = (
        factor * float(carried[cut]) / rate if cut in inside else 0.0
        for (cut, _), rate in zip(cuts, rates, strict=True)
    )
    return before_s, after_s


class _Sosp19(CostModel):
    name = "sosp19"
    summary = "PipeDream (SOSP'19) section 3.1 as printed: 1/m max(compute, 2 (m-1) |w| / B), 2 a / B per cut"
    antichains = True

    def terms(self, grid: StageGrid, level: Level, *, first: bool, inner: Inner | None = None) -> StageTerms:
        states, level = grid.work.states, _plain(level)
        rate = level.sum_bytes_per_s
        compute_s = inner.seconds if inner else grid.compute_s
        sync = grid.sums(states.parameter_bytes * (2 / rate)) + grid.copies[0] * (2 / rate)
        before = 0.0 if first else grid.cuts(states.sent_bytes * (2 / level.message_bytes_per_s))[0]
        return StageTerms((Term(compute_s), Term(np.zeros((1, 1)), tail=sync)), before)

    def parts(self, work: UnitWork, level: Level, start: int, stop: int, m: int) -> tuple[float, float, float]:
        states, rate = work.states, _plain(level).sum_bytes_per_s
        compute = states.forward_s + states.backward_s
        sync = 2 * (m - 1) / m * states.weights(start, stop) / rate
        return (compute[stop] - compute[start]) / m, sync, max(self.cuts_s(work, level, level, start, stop, m))

    def cuts_s(self, work: UnitWork, before: Level, after: Level, start: int, stop: int, m: int) -> tuple[float, float]:
        return _cuts_s(work, work.states.sent_bytes, ((start, before), (stop, after)), 2.0)

    def simulated(self, costs: Costs, replicas: Sequence[int]) -> Costs:
        # A round's sum costs 2 (m-1) |w| / B, m times what a ring needs, and may start with the backward.
        stages = (_summed(stage, m, 0.0) for stage, m in zip(costs.stages, replicas, strict=True))
        return replace(costs, stages=tuple(stages))


class _Artifact(CostModel):
    name = "artifact"
    summary = "the published optimizer: (compute + 4 (m-1) |w| / (m B)) / m, 2 a_in / (B m), 2 a_out / (B m)"
    antichains = True

    def terms(self, grid: StageGrid, level: Level, *, first: bool, inner: Inner | None = None) -> StageTerms:
        states, level = grid.work.states, _plain(level)
        rate = level.sum_bytes_per_s
        compute_s = inner.seconds if inner else grid.compute_s
        sync = grid.sums(states.parameter_bytes * (4 / rate)) + grid.copies[0] * (4 / rate)
        if first:
            return StageTerms((Term(compute_s, sync / inner.count if inner else sync),))
        carried = np.maximum(*grid.cuts(states.antichain_bytes * (2 / level.message_bytes_per_s)))
        return StageTerms((Term(carried), Term(compute_s, sync)))

    def parts(self, work: UnitWork, level: Level, start: int, stop: int, m: int) -> tuple[float, float, float]:
        states, rate = work.states, _plain(level).sum_bytes_per_s
        compute = states.forward_s + states.backward_s
        sync = 4 * (m - 1) / m * states.weights(start, stop) / rate
        return (compute[stop] - compute[start]) / m, sync / m, max(self.cuts_s(work, level, level, start, stop, m))

    def cuts_s(self, work: UnitWork, before: Level, after: Level, start: int, stop: int, m: int) -> tuple[float, float]:
        if start == 0:
            return 0.0, 0.0
        return _cuts_s(work, work.states.antichain_bytes, ((start, before), (stop, after)), 2.0 / m)

    def simulated(self, costs: Costs, replicas: Sequence[int]) -> Costs:
        # A round's sum costs 4 (m-1)/m |w| / B, twice what a ring needs, after the backward.
        return replace(costs, stages=tuple(_summed(stage, 2.0, 1.0) for stage in costs.stages))


class _Overlap(CostModel):
    name = "overlap"
    summary = "compute and communication side by side: ring all-reduce during the backward, ports, latencies"
    antichains = False
    has_ports = True

    def terms(self, grid: StageGrid, level: Level, *, first: bool, inner: Inner | None = None) -> StageTerms:
        if inner is not None:  # this level's sum and transfers overlap with rounds inside the components
            return StageTerms((Term(inner.seconds), *self._ports(grid, level, 0.0)))
        states, own = grid.work.states, self.round(grid, level)
        before, after = grid.cuts(states.sent_bytes + states.returned_bytes)
        # A worker copies at its end of every transfer; the round trip to the stage before also waits for the other end.
        copies_s = level.copy_s(1) * (2 * before + after)
        own = replace(own, base=own.base + self._round_trip_s(before, level) + copies_s)
        return StageTerms((*self._load(grid), own, *self._ports(grid, level, self._without_sum_s(grid))))

    def _round_trip_s(self, before: Floats, level: Level) -> Floats:
        """Return the seconds of the transfers between a stage and the one before it, `before` bytes in all."""
        return before / level.message_bytes_per_s + np.where(before > 0, 2 * level.latency_s, 0.0)

    def paces(self, grid: StageGrid, level: Level) -> tuple[Term, ...]:
        return (*self._load(grid), *self._ports(grid, level, self._without_sum_s(grid)))

    def _load(self, grid: StageGrid) -> tuple[Term, ...]:
        load_s = np.where(grid.sums(grid.work.states.num_loading) > 0, grid.work.load_s, 0.0)
        return (Term(load_s),) if load_s.any() else ()

    def _without_sum_s(self, grid: StageGrid) -> Floats:
        """Return the seconds per round in which no gradients are summed: forward, update, rounds before the last."""
        first_s = grid.sums(grid.work.states.forward_s)
        if grid.work.rounds == 1:
            return first_s + self._update_s(grid)
        return (first_s + (grid.work.rounds - 1) * grid.compute_s) / grid.work.rounds + self._update_s(grid)

    def _ports(self, grid: StageGrid, level: Level, meanwhile_s: Floats | float) -> tuple[Term, ...]:
        """Return the terms of the port, which all traffic shares, and of the ring, which may have a lower rate.

        A single term if the ring may use the whole port. No gradients are summed for `meanwhile_s` per round.
        """
        weights = grid.weights / grid.work.rounds
        carried = np.maximum(*self._port_bytes(grid)) / level.goodput_bytes_per_s
        latency_s = np.where(weights > 0, 2 * level.latency_s / grid.work.rounds, 0.0)
        meanwhile = np.asarray(meanwhile_s, dtype=float)
        if level.sum_bytes_per_s == level.goodput_bytes_per_s:
            return (Term(np.maximum(meanwhile, carried), weights * (2 / level.goodput_bytes_per_s), latency_s),)
        shared = Term(carried, weights * (2 / level.goodput_bytes_per_s), latency_s)
        return shared, Term(meanwhile, weights * (2 / level.sum_bytes_per_s), latency_s)

    def round(self, grid: StageGrid, level: Level) -> Term:
        states, rate = grid.work.states, level.sum_bytes_per_s
        weights = grid.weights
        late = np.minimum(weights, np.maximum(states.next_bytes[grid.starts, None], LAST_BUCKET_BYTES))
        compute_s, latency_s = grid.compute_s + self._update_s(grid), 2 * level.latency_s / grid.work.rounds
        return Term(compute_s, late * (2 / rate / grid.work.rounds), np.where(weights > 0, latency_s, 0.0))

    def _update_s(self, grid: StageGrid) -> Floats:
        if not (grid.work.update_s_per_byte or grid.work.update_floor_s):
            return np.zeros((1, 1))
        weights = grid.weights
        return (grid.work.update_floor_s * (weights > 0) + grid.work.update_s_per_byte * weights) / grid.work.rounds

    def parts(self, work: UnitWork, level: Level, start: int, stop: int, m: int) -> tuple[float, float, float]:
        states = work.states
        weights, copied = states.weights(start, stop), states.copies(start, stop)
        per_byte_s, floor_s = work.update_s_per_byte / work.rounds, work.update_floor_s / work.rounds
        compute = states.forward_s + states.backward_s + per_byte_s * states.parameter_bytes
        update_s = floor_s * (weights > 0) + per_byte_s * copied
        compute_s = compute[stop] - compute[start] + update_s
        sum_s = 2 * (m - 1) / m * weights / level.sum_bytes_per_s + 2 * (m - 1) * level.latency_s * (weights > 0)
        sync_s = sum_s / work.rounds
        sent, received = self._port_bytes(StageGrid(work, np.array([start]), stop))
        return compute_s / m, sync_s / m, max(sent[0, 0], received[0, 0]) / level.goodput_bytes_per_s / m

    def links(self, cluster: Cluster) -> Cluster:
        return cluster

    def _port_bytes(self, grid: StageGrid) -> tuple[Floats, Floats]:
        """Return the bytes that a stage sends and receives per minibatch."""
        sent_before, sent_after = grid.cuts(grid.work.states.sent_bytes)
        returned_before, returned_after = grid.cuts(grid.work.states.returned_bytes)
        return sent_after + returned_before, sent_before + returned_after


class _Alone(_Overlap):
    """Lower bounds of a stage's time under `overlap` in any plan: rounds and gradient sums without transfers."""

    name = "alone"
    summary = "a round without its gradient sum, or the sum without the backward"

    def terms(self, grid: StageGrid, level: Level, *, first: bool, inner: Inner | None = None) -> StageTerms:
        around = grid.weights * (2 / level.sum_bytes_per_s / grid.work.rounds)
        rounds = (Term(grid.compute_s + self._update_s(grid)), Term(self._without_sum_s(grid), around))
        return StageTerms((*self._load(grid), *rounds))


class _Hidden(_Overlap):
    """`overlap` without round trips: a pipeline that flushes computes other units then, except in fill and drain."""

    name = "hidden"
    summary = "overlap without round trips"

    def _round_trip_s(self, before: Floats, level: Level) -> Floats:
        return np.zeros_like(before)


ALONE, HIDDEN = _Alone(), _Hidden()
DEFAULT = "overlap"
COST_MODELS: dict[str, CostModel] = {model.name: model for model in (_Overlap(), _Sosp19(), _Artifact())}
