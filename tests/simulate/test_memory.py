"""Memory over time: against an oracle's replay of printed schedules, and against the virtual engine's live tensors."""

import copy
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipebench.cluster import Cluster, Level
from pipebench.engine.replica import Replica
from pipebench.engine.setup import Setup
from pipebench.extensions.asynchronous.memory import FirstReplicaMemory, ServerMemory
from pipebench.model.precision import lower
from pipebench.model.sampling import Size
from pipebench.planner.memory import MemoryRule
from pipebench.planner.state_graph import prefixes
from pipebench.profile.model import Profile
from pipebench.profile.walk import walk
from pipebench.schedule.instructions import BACKWARDS, Instruction
from pipebench.schedule.modes import MODES, RECOMPUTE
from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import SPLIT
from pipebench.schedule.programs import most_in_flight, programs
from pipebench.simulate import memory_meter
from pipebench.simulate.costs import stage_costs
from pipebench.simulate.kinds import (
    ACTIVATIONS,
    AGAIN,
    GATHERED,
    GRADIENTS,
    HELD,
    KINDS,
    MASTERS,
    MOVED,
    RECEIVED,
    SENT,
    STATE,
    VERSIONS,
    WEIGHTS,
    WORKSPACES,
)
from pipebench.simulate.memory import StageMemoryCosts, stage_memories
from pipebench.simulate.memory_meter import MemoryMeter, MemoryTimeline
from pipebench.simulate.meter import Meter
from pipebench.simulate.replica_memory import Change, ReplicaMemory
from pipebench.simulate.simulation import TimelineEvent
from pipebench.simulate.steady import simulate_all, simulate_segment
from tests.engine.test_modes import images
from tests.instruction_text import render
from tests.models import ConvNet
from tests.oracles.memory import Sizes, replay
from tests.support import Blobs, FineTuned, Mlp, make_engine, make_setup

# Every mode on plans that it takes: where later stages begin, replicas; and the columns of the table.
Plan = tuple[list[int], list[int]]
STRAIGHT, FOUR, REPLICATED = ([3, 5], [1, 1, 1]), ([2, 4, 6], [1, 1, 1, 1]), ([3, 5], [2, 1, 1])
FOUR_TWICE = ([2, 4, 6], [2, 2, 2, 2])
FEWER_FIRST, EQUAL = ([3, 5], [1, 3, 2]), ([4], [2, 2])
ONE: Plan = ([], [1])
CASES: Mapping[str, tuple[tuple[Plan, ...], Mapping[str, Any]]] = {
    "single": ((ONE,), {"weights": "one", "depth": 1}),
    "dp": ((([], [3]),), {"weights": "one", "depth": 1, "accumulate": 2}),
    "dp-asp": ((([], [3]), ONE), {"weights": "newest-pulled", "sync": "asynchronous", "depth": 1}),
    "model": ((STRAIGHT, FOUR), {"weights": "one", "depth": 1}),
    "hybrid": ((REPLICATED, EQUAL), {"weights": "one", "depth": 1}),
    "gpipe": (
        (STRAIGHT, REPLICATED),
        {"weights": "one", "order": "all-forwards", "microbatches": 2, "recompute": True},
    ),
    "pipedream-flush": ((STRAIGHT, FOUR, FEWER_FIRST), {"weights": "one", "microbatches": 2, "accumulate": 2}),
    "interleaved": ((FOUR,), {"weights": "one", "order": "interleaved", "chunks": 2, "microbatches": 2}),
    "dualpipe": (
        (FOUR_TWICE,),
        {"weights": "one", "order": "dualpipe", "backward": "split", "chunks": 2, "microbatches": 4},
    ),
    "dualpipev": (
        (FOUR, FOUR_TWICE),
        {"weights": "one", "order": "dualpipev", "backward": "split", "chunks": 2, "microbatches": 4},
    ),
    "zbv": (
        (FOUR, FOUR_TWICE),
        {"weights": "one", "order": "zbv", "backward": "split", "chunks": 2, "microbatches": 4},
    ),
    "zero-bubble": (
        (STRAIGHT, FOUR, EQUAL),
        {"weights": "one", "order": "zero-bubble", "backward": "split", "microbatches": 2},
    ),
    "pipedream": ((STRAIGHT, FOUR, REPLICATED, FEWER_FIRST), {"weights": "stash"}),
    "pipedream-2bw": ((STRAIGHT, EQUAL), {"weights": "double-buffer", "accumulate": 3}),
    "spectrain": ((STRAIGHT, REPLICATED), {"weights": "predict"}),
    "xpipe": ((STRAIGHT, EQUAL), {"weights": "predict", "microbatches": 2}),
    "pipemare": ((STRAIGHT, REPLICATED), {"weights": "correct"}),
}
OTHERS: Mapping[str, tuple[tuple[Plan, ...], Mapping[str, Any]]] = {
    "vertical sync": ((REPLICATED, FOUR), {"weights": "stash-vertical-sync"}),
    "naive": ((STRAIGHT,), {"weights": "none"}),
    "gpipe that keeps": ((STRAIGHT, REPLICATED), {"weights": "one", "order": "all-forwards", "microbatches": 2}),
    "beyond NOAM": ((STRAIGHT,), {"weights": "stash", "depth": 5}),
    "pipedream that recomputes": ((STRAIGHT,), {"weights": "stash", "recompute": True}),
    "split and recomputed": (
        (STRAIGHT,),
        {"weights": "one", "order": "zero-bubble", "backward": "split", "microbatches": 2, "recompute": True},
    ),
    "some layers recomputed": ((STRAIGHT,), {"weights": "stash", "recompute": [3, 4]}),
    "bfloat16": ((STRAIGHT, REPLICATED), {"weights": "stash", "precision": "bf16"}),
    "bfloat16, one version": ((([], [2]),), {"weights": "one", "depth": 1, "precision": "bf16"}),
}
PLANS = [
    pytest.param(plan, columns, id=f"{name} {'-'.join(map(str, plan[1]))}")
    for name, (plans, columns) in {**CASES, **OTHERS}.items()
    for plan in plans
]


def momentum(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, 0.9)


def setup_of(model: nn.Module, plan: Plan, columns: Mapping[str, Any]) -> Setup:
    """Return a setup of 11 minibatches of 4 samples and one of 2."""
    dataset = images() if isinstance(model, ConvNet) else Blobs(num_train=46)
    return make_setup(model, plan, dataset=dataset, make_optimizer=momentum, **columns)


def profile_of(setup: Setup) -> Profile:
    """Return a profile whose bytes are those of real tensors."""
    graph, dataset, layers = setup.graph, setup.dataset, {}
    root = copy.deepcopy(graph.root).train()
    lower([root], graph.rounding)
    for size in range(1, 5):
        samples = dataset.fetch("train", range(size), [*dataset.inputs, *dataset.targets])
        layers[size] = walk(graph, root, dataset, samples, lambda work: (work(), lambda: 1.0))
    return Profile("test", "cpu", "file", "", layers, 0.0, 0.0, dict.fromkeys(layers, 0.0), {}, state_bytes_per_byte=1)


def memories_of(setup: Setup) -> tuple[StageMemoryCosts, ...]:
    inputs: dict[Size, dict[str, int]] = {size: {"x": setup.dataset.example(size)["x"].nbytes} for size in range(1, 5)}
    return stage_memories(profile_of(setup), setup.plan, setup.pipeline, inputs)


def untrained_bytes(replica: Replica) -> int:
    """Return the bytes of a replica's parameters that aren't trained and of its buffers, one copy of each."""
    own = {parameter for parameter in replica.module.parameters() if not parameter.requires_grad}
    return sum(tensor.nbytes for tensor in own | {*replica.module.buffers()})


def live(replica: Replica) -> dict[str, int]:
    """Return the bytes of a replica's live tensors, by kind."""
    weights = replica.weights
    older = (weights.num_alive - 1) * weights.version_bytes
    return {
        WEIGHTS: weights.live_bytes - older + untrained_bytes(replica),
        GATHERED: weights.gathered_bytes,
        VERSIONS: older,
        MOVED: 0 if replica.moved is None else replica.moved.num_bytes,
        MASTERS: weights.master_bytes,
        STATE: weights.state_bytes,
        GRADIENTS: sum(gradient.nbytes for gradient in replica.gradients if gradient is not None),
        ACTIVATIONS: sum(item.num_bytes for item in replica._in_flight.values()),
    }


class Levels:
    """The bytes of replicas, as sums of instructions' changes; never negative."""

    def __init__(self, setup: Setup) -> None:
        pipeline = self.pipeline = setup.pipeline
        memories = memories_of(setup)
        pushed = ServerMemory(pipeline, memories) if pipeline.sync == "asynchronous" else None
        self.holdings = {
            (worker, stage): pushed.replica(worker, stage) if pushed else ReplicaMemory(memories[stage])
            for worker in range(pipeline.num_workers)
            for stage in pipeline.stages_of(worker)
        }
        self.now: dict[tuple[int, int], Counter[str]] = {place: Counter() for place in self.holdings}
        for place, holding in self.holdings.items():
            self.add(place, holding.before())

    def add(self, place: tuple[int, int], changes: Iterable[Change]) -> None:
        for kind, num_bytes, _ in changes:
            if kind not in (SENT, RECEIVED):  # the meter's to count
                self.now[place][kind] += num_bytes
                assert self.now[place][kind] >= 0, (place, kind)

    def drain(self) -> None:
        for place, holding in self.holdings.items():
            self.add(place, holding.drained())

    def execute(self, worker: int, it: Instruction, size: int) -> None:
        if it.op is not Op.WAIT_NORM:
            self.add((worker, it.stage), self.holdings[worker, it.stage].changes(it, size))
        if it.op is Op.PUSH:
            host = self.pipeline.places[it.stage][0], it.stage
            server = self.holdings[host]
            assert isinstance(server, FirstReplicaMemory)
            self.add(host, server.applied(own=host[0] == worker))

    def held(self, worker: int, stage: int) -> dict[str, int]:
        return {kind: self.now[worker, stage][kind] for kind in HELD}


def test_every_mode_is_a_case() -> None:
    """Shards end at rows of numbers, not at bytes: `tests/engine/test_sharding.py` compares those, to 2%."""
    assert {*CASES} == {name for name, row in MODES.items() if not row.is_sharded}


@pytest.mark.sampled(18)
@pytest.mark.parametrize(("plan", "columns"), PLANS)
@pytest.mark.parametrize("model", [Mlp, ConvNet, FineTuned])
def test_memory_after_every_instruction_equals_live_tensors(
    model: type[nn.Module], plan: Plan, columns: Mapping[str, Any]
) -> None:
    """By kind, on every worker, over two segments between drains, with a short last minibatch; to the byte."""
    assert compared_until_it_ends(setup_of(model(), plan, columns)) > 90


def compared_until_it_ends(setup: Setup) -> int:
    """Compare after every instruction of two segments; return how often."""
    levels = Levels(setup)
    compared = 0

    def observe(event: TimelineEvent) -> None:
        nonlocal compared
        it, worker = event.instruction, event.worker
        size = engine.workers[worker].feed.size(it.number) if it.op in (Op.FORWARD, *BACKWARDS) else 0
        levels.execute(worker, it, size)
        for each in {worker, setup.pipeline.places[it.stage][0]}:
            replica = engine.workers[each].replicas[it.stage]
            assert levels.held(each, it.stage) == live(replica), (str(it), each)
            assert replica.live_bytes() == sum(live(replica).values()), (str(it), each)
            compared += 1

    engine = make_engine(setup, observe)
    for first in (0, 12):
        levels.drain()
        engine.train(first, 12)
    assert all(now[ACTIVATIONS] == now[GRADIENTS] == now[VERSIONS] == now[AGAIN] == 0 for now in levels.now.values())
    return compared


class Even(nn.Module):
    """Two of its three matrices are sharded in halves; the third isn't trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(6, 512, bias=False), nn.Linear(512, 4, bias=False)).double()
        self.frozen = nn.Linear(6, 6).double().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, 6] to [samples, 4]."""
        return self.body(self.frozen(x))


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "parameters"])
def test_sharded_replicas_hold_all_untrained_tensors(shard: str) -> None:
    """To the byte, too, where shards are equal."""
    setup = setup_of(Even(), ([], [2]), {"weights": "one", "depth": 1, "sums": "ordered", "shard": shard})
    compared_until_it_ends(setup)
    (memory,) = memories_of(setup)
    assert (memory.untrained, memory.state) == (8 * (6 * 6 + 6), 8 * (6 * 512 + 512 * 4) // 2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("plan", "columns"), PLANS)
def test_memory_equals_a_replay_of_the_printed_schedule(plan: Plan, columns: Mapping[str, Any]) -> None:
    setup = setup_of(FineTuned(), plan, columns)
    pipeline, memories = setup.pipeline, memories_of(setup)
    if pipeline.sync == "asynchronous":
        pytest.skip("which version a server has is the clock's to say, and not printed")
    levels = Levels(setup)
    levels.drain()
    for worker, program in enumerate(programs(pipeline, 12)):
        own = {stage: sizes_of(memories[stage]) for stage in pipeline.stages_of(worker)}
        listed = list(program)
        for it, expected in zip(listed, replay(render(listed), own), strict=True):
            levels.execute(worker, it, 4)
            for stage, kinds in expected.items():
                found = levels.held(worker, stage)
                assert {kind: found[kind] for kind in kinds} == kinds, (worker, str(it))


def sizes_of(memory: StageMemoryCosts) -> Sizes:
    return Sizes(
        memory.weights, lambda unit: memory.unit[4], lambda unit: memory.rest[4], memory.state, memory.early_gradients,
        stashes=not memory.in_place, copies=memory.copies, untrained=memory.untrained, shares=memory.shares_moved,
    )  # fmt: skip


def slow_links(num_workers: int) -> Cluster:
    return Cluster("slow", "unit", 10_000, (Level("server", num_workers, 2000.0, 1e-2),))


def metered(setup: Setup, limit_bytes: int | None = None, *, whole: bool = False, count: int = 12) -> MemoryTimeline:
    costs = stage_costs(profile_of(setup), setup.plan)
    memory = MemoryMeter(setup.pipeline, memories_of(setup), costs, limit_bytes)
    (simulate_all if whole else simulate_segment)(setup, count, Meter(setup.pipeline, memory))
    return memory.timeline()


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("plan", "columns"), PLANS)
def test_messages_count_while_they_are_in_flight_and_none_remains(plan: Plan, columns: Mapping[str, Any]) -> None:
    """Weights and the optimizer's state are all that a drain leaves; in between no kind is ever less than nothing."""
    setup = setup_of(Mlp(), plan, {**columns, "cluster": slow_links(sum(plan[1]))})
    found = metered(setup, whole=True)
    left = {number for number, kind in enumerate(KINDS) if kind in (WEIGHTS, MOVED, MASTERS, STATE)}
    for curve in found.curves:
        assert (np.diff(curve.times_s) >= 0).all()
        assert (curve.num_bytes >= 0).all()
        assert {*np.flatnonzero(curve.num_bytes[:, -1])} <= left
    if len(plan[1]) > 1:
        for kind in (SENT, RECEIVED):
            assert max(curve.num_bytes[KINDS.index(kind)].max() for curve in found.curves) > 0
    for peak, curve in zip(found.peaks, found.curves, strict=True):
        assert peak.num_bytes == curve.num_bytes.sum(axis=0).max()


def test_a_message_is_kept_at_both_ends() -> None:
    """Two stages, 4 s of forward in the first; then 4 x 8 numbers for 2 s, and half a second for the last of them."""
    link = Cluster("link", "unit", None, (Level("server", 2, 128.0, 0.5),))
    setup = make_setup(Mlp(), ([4], [1, 1]), weights="one", depth=1, cluster=link)
    found, num_bytes = metered(setup, count=1), 4 * 8 * 8
    forth, there = curve_of(found, 0, SENT), curve_of(found, 1, RECEIVED)
    assert [at(forth, time_s) for time_s in (3.9, 4.1, 6.4, 6.6)] == [0, num_bytes, num_bytes, 0]
    # The forward there has begun when all of it has come, and what it saves of it is an activation.
    assert [at(there, time_s) for time_s in (3.9, 4.1, 6.4, 6.6)] == [0, num_bytes, num_bytes, 0]
    # 3 forwards and 3 backwards, 1 s and 2 s each, end at 15.5 s.
    back, here = curve_of(found, 1, SENT), curve_of(found, 0, RECEIVED)
    assert [at(back, time_s) for time_s in (15.4, 15.6, 17.9, 18.1)] == [0, num_bytes, num_bytes, 0]
    # The gradient is there as long as the backward it is for: 8 s.
    assert [at(here, time_s) for time_s in (15.4, 15.6, 18.1, 25.9, 26.1)] == [0, num_bytes, num_bytes, num_bytes, 0]


def curve_of(found: MemoryTimeline, worker: int, kind: str) -> list[tuple[float, int]]:
    curve = found.curves[worker]
    return [*zip(curve.times_s.tolist(), curve.num_bytes[KINDS.index(kind)].tolist(), strict=True)]


def at(curve: list[tuple[float, int]], time_s: float) -> int:
    return next(value for moment_s, value in reversed(curve) if moment_s <= time_s)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("plan", "columns"), PLANS)
def test_a_segment_of_a_few_periods_has_the_peak_of_the_whole(plan: Plan, columns: Mapping[str, Any]) -> None:
    setup = setup_of(Mlp(), plan, {**columns, "cluster": slow_links(sum(plan[1]))})
    count = 4 * math.lcm(setup.pipeline.period, 12) + 1
    found = [metered(setup, whole=whole, count=count) for whole in (False, True)]
    for short, whole in zip(*(each.peaks for each in found), strict=True):
        assert short.num_bytes == whole.num_bytes


def test_a_long_run_keeps_its_first_part_and_all_of_its_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = setup_of(Mlp(), REPLICATED, {"weights": "stash", "cluster": slow_links(4)})
    whole = metered(setup, 500, whole=True, count=60)
    monkeypatch.setattr(memory_meter, "RECORDED_CHANGES", 100)
    folded = metered(setup, 500, whole=True, count=60)
    assert folded.peaks == whole.peaks
    assert folded.overflow == whole.overflow
    for short, long in zip(folded.curves, whole.curves, strict=True):
        count = len(short.times_s)
        assert 0 < count < len(long.times_s)
        assert (short.num_bytes == long.num_bytes[:, :count]).all()


@pytest.mark.parametrize("plan", [FOUR, ([], [4])], ids=["one by one", "all at once"])
@pytest.mark.parametrize("share", [0.999, 0.5])
def test_the_first_time_beyond_the_limit_is_found(share: float, plan: Plan) -> None:
    setup = setup_of(Mlp(), plan, {"weights": "stash", "cluster": slow_links(4)})
    free = metered(setup)
    assert free.overflow is None
    limit = int(share * free.fullest.num_bytes)
    found = metered(setup, limit).overflow
    assert found is not None
    assert found.num_bytes > limit
    crossing = [
        (float(curve.times_s[i]), worker)
        for worker, curve in enumerate(free.curves)
        for i in np.flatnonzero(curve.num_bytes.sum(axis=0) > limit)[:1]
    ]
    assert (found.time_s, found.worker) == min(crossing)
    assert metered(setup, free.fullest.num_bytes).overflow is None


EXACT = ("one", "stash", "none", "double-buffer")  # else not every stage needs the copies that the formula counts
# Bounds of docs/memory.md: a small layer's gradient and input can be more than what it saves, in split backwards.
LEAST, MOST, MOST_IF_SPLIT = 0.57, 1.0, 1.121


# Without what small layers keep besides, see docs/memory.md: inputs of recomputed and of split backwards
FORMULA = [
    pytest.param(model, *each.values, id=f"{model.__name__} {each.id}")
    for model in (Mlp, FineTuned)
    for each in PLANS
    if model is Mlp or not {"recompute", "backward"} & {*each.values[1]}  # type: ignore[misc]
]


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("model", "plan", "columns"), FORMULA)
def test_no_worker_exceeds_the_planner_s_formula(
    model: type[nn.Module], plan: Plan, columns: Mapping[str, Any]
) -> None:
    """Buffers for messages apart: the formula has room for two each way, and more may wait where a stage is slow."""
    setup = setup_of(model(), plan, columns)
    pipeline = setup.pipeline
    rows = profile_of(setup).layers[4 // pipeline.microbatches]
    states = prefixes(rows)
    policies = [policy for stage in setup.plan.stages for policy in stage.memory]
    if RECOMPUTE in policies:
        states = states.recomputing(policies)
    row = next((MODES[name] for name, (plans, own) in CASES.items() if own is columns), None)
    versions = row.weight_sets if row is not None else 1 if pipeline.weights in ("one", "none") else None
    synced = pipeline.weights == "stash-vertical-sync"
    memories = memories_of(setup)
    found, in_flight = metered(setup, whole=True, count=24), most_in_flight(pipeline)
    inputs = dict.fromkeys(pipeline.loads, 4 * 6 * 8 // pipeline.microbatches)
    for worker in range(pipeline.num_workers):
        room = 0.0
        for stage in pipeline.stages_of(worker):
            own, size = setup.plan.stages[stage], 4 // pipeline.microbatches
            if synced:  # as many as the input stage has in flight
                versions = -(-pipeline.depth * pipeline.replicas[0] // pipeline.replicas[stage])
            rule = MemoryRule(0, versions, 1.0, masters="precision" in columns)
            room += rule.num_bytes(states, own.start, own.stop, in_flight[stage])
            if RECOMPUTE in own.memory:  # what a profile doesn't know: how large the model's inputs are
                room += (in_flight[stage] - 1) * inputs.get(stage, 0)  # one unit's are part of what it computes again
            room -= 2 * (memories[stage].received[size] + states.sent_bytes[own.stop] * (own.stop < len(rows) - 1))
        curve = found.curves[worker]
        most = curve.num_bytes[: len(KINDS) - 2].sum(axis=0).max()
        if columns["weights"] in EXACT and pipeline.order in ("1f1b", "all-forwards"):
            assert most == pytest.approx(room), worker
        else:
            assert LEAST * room <= most <= (MOST_IF_SPLIT if pipeline.backward == SPLIT else MOST) * room, worker


def test_kinds_of_memory_are_distinct_and_complete() -> None:
    assert len({*KINDS}) == len(KINDS)
    assert {*HELD} | {AGAIN, WORKSPACES, SENT, RECEIVED} == {*KINDS}
    assert all(a != b for a, b in itertools.pairwise(KINDS))
