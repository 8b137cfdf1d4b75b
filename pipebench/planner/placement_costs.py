"""Costs of a plan on a cluster of several levels, with its workers on given devices.

Flat plans placed in order along the devices include some that the paper's recurrence can't express: 15-1 on 4 servers
of 4 (PipeDream, SOSP'19, Table 1). A stage sums its gradients at the slowest level its replicas span; under a cost
model with ports, every component's port carries what its workers send.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipebench.cluster import Cluster, Level
from pipebench.planner.cost_models import CostModel, StageGrid, StageTerms, UnitWork
from pipebench.planner.flat import SearchStage

LONGEST_CYCLE = 1 << 12  # minibatches enumerated to pair senders and receivers


class Sketch(NamedTuple):
    """Stages between states, their replicas' devices, and the depth; without devices it stands for all placements."""

    stages: tuple[SearchStage, ...]
    devices: tuple[tuple[int, ...], ...]
    depth: int

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas per stage."""
        return tuple(stage.replicas for stage in self.stages)


def along(replicas: Sequence[int]) -> list[range]:
    """Return the devices of every stage's replicas, in order."""
    return [range(a, b) for a, b in itertools.pairwise([0, *itertools.accumulate(replicas)])]


def spanned(cluster: Cluster, devices: Sequence[int]) -> int:
    """Return the index of the innermost level with one component that holds all these devices; 0 for one device."""
    return cluster.level_between(min(devices), max(devices))


def stage_level(cluster: Cluster, model: CostModel, devices: Sequence[Sequence[int]], index: int) -> Level:
    """Return the level that prices a stage: its replicas' if the model has ports, else one that spans neighbours."""
    around = devices[index : index + 1] if model.has_ports else devices[max(0, index - 1) : index + 2]
    return cluster.levels[spanned(cluster, [device for group in around for device in group])]


def cut_levels(cluster: Cluster, devices: Sequence[Sequence[int]], index: int) -> tuple[Level, Level]:
    """Return the levels to the stage before and to the stage after."""
    pairs = (devices[max(0, index - 1) : index + 1], devices[index : index + 2])
    before, after = (cluster.levels[spanned(cluster, [d for group in pair for d in group])] for pair in pairs)
    return before, after


def cycle_pairs(own: Sequence[int], others: Sequence[int]) -> list[tuple[int, int]]:
    """Return the devices of two stages that each minibatch of a cycle passes; LONGEST_CYCLE minibatches at most."""
    cycle = min(math.lcm(len(own), len(others)), LONGEST_CYCLE)
    return [(own[k % len(own)], others[k % len(others)]) for k in range(cycle)]


def placed_s(
    work: UnitWork,
    model: CostModel,
    cluster: Cluster,
    stages: Sequence[SearchStage],
    devices: Sequence[Sequence[int]],
    *,
    ways: bool = True,
) -> tuple[list[float], float]:
    """Return the seconds per minibatch of every stage, and of the busiest port between components.

    `ways` includes rounds and transfers to the stage before; False where `loops_s` counts them.
    """
    seconds = []
    for index, stage in enumerate(stages):
        # Gradients are summed among the replicas; values may cross outer levels.
        level = cluster.levels[spanned(cluster, devices[index])]
        grid = StageGrid(work, np.array([stage.start]), stage.stop)
        terms = model.terms(grid, level, first=stage.start == 0) if ways else StageTerms(model.paces(grid, level))
        own_s = float(terms.seconds(float(stage.replicas)).flat[0])
        seconds.append(max(own_s, *model.cuts_s(work, *cut_levels(cluster, devices, index), *stage)))
    ports = [0.0]
    if model.has_ports:
        size = 1
        for below, level in zip(cluster.levels, cluster.levels[1:], strict=False):
            size *= below.count
            carried = _port_bytes(work, stages, devices, (size, size * level.count))
            ports.append(max(carried.values(), default=0.0) / level.goodput_bytes_per_s)
    return seconds, max(ports)


def _port_bytes(
    work: UnitWork, stages: Sequence[SearchStage], devices: Sequence[Sequence[int]], sizes: tuple[int, int]
) -> dict[tuple[int, bool], float]:
    """Return the payload per minibatch by (component, whether it leaves) of a level.

    `sizes` are the devices of a component of the level below and of one of the level, inside which it joins them: what
    leaves the latter crosses an outer level only.
    """
    states = work.states
    load: dict[tuple[int, bool], float] = {}
    size, around_size = sizes

    def add(sender: int, receiver: int, num_bytes: float) -> None:
        if sender // size != receiver // size and sender // around_size == receiver // around_size:
            for key in ((sender // size, True), (receiver // size, False)):
                load[key] = load.get(key, 0.0) + num_bytes

    for stage, own in zip(stages, devices, strict=True):
        members = sorted({device // size: device for device in own}.values())  # of every component, one
        weights = states.weights(stage.start, stage.stop)
        around = 2 * (stage.replicas - 1) / stage.replicas * weights / (stage.replicas * work.rounds)
        for sender, receiver in zip(members, [*members[1:], members[0]], strict=True):
            add(sender, receiver, around)
    for stage, own, others in zip(stages, devices, devices[1:], strict=False):
        pairs = cycle_pairs(own, others)
        for one, other in pairs:
            add(one, other, states.sent_bytes[stage.stop] / len(pairs))
            add(other, one, states.returned_bytes[stage.stop] / len(pairs))
    return load
