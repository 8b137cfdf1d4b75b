"""The warm-up and first uses of communicators neither hang a run nor change it; tensors may be sent apart from headers.

NCCL's communicators connect at their first use, and CUDA loads code at the first launch: `first_use.py` has stand-ins.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pipebench.distributed import warm_up
from pipebench.distributed.channel import _ROOM_FOR_TEXT
from pipebench.distributed.message import HEADER_BYTES
from pipebench.distributed.world import World
from pipebench.engine.worker import Worker
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import Pipeline, chain, noam
from pipebench.schedule.programs import programs
from tests.distributed import zoo_cases
from tests.distributed.cases import Case, compare, small_setup, virtually
from tests.distributed.test_equality import THREE, TWO
from tests.distributed.zoo_cases import ZooCase
from tests.processes import Processes
from tests.support import Blobs, Mlp, make_setup

NOT_BY_GLOO = {"zero1, parameters without a gradient"}  # its all-gather takes no pieces of different sizes
# In fewer processes than at their full depth (1-3-1 takes five), these hang in the same way.
WAITING = {3: Case("conv", (4,), (1, 2), {"depth": 1}), 4: Case("conv", (4, 7), (1, 2, 1), {"depth": 3})}


def parameters_of(worker: Worker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for each in worker.replicas.values() for name, tensor in each.tensors().items()}


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    for first in range(1, total + 1):
        for rest in compositions(total - first):
            yield (first, *rest)


def gets_stuck(pipeline: Pipeline, num_minibatches: int, *, connected: bool) -> bool:
    """Execute all lists, the first all-reduce of a stage waiting for all its replicas unless it is connected.

    Models only what blocks in the engine: receives, waits for an all-reduce, and that first one.
    """
    lists = [list(program) for program in programs(pipeline, num_minibatches)]
    done = [0] * len(lists)
    sent: set[tuple[Op, int, int, int]] = set()
    callers: dict[tuple[int, int], set[int]] = {}  # of a stage's round

    def can(worker: int) -> bool:
        op, stage, number, peer, reduce, *_ = lists[worker][done[worker]]
        if op in (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT):
            return (op, number, peer, stage) in sent
        if op is Op.WAIT_ALL_REDUCE or (op is Op.BACKWARD and reduce >= 0):
            index = number if op is Op.WAIT_ALL_REDUCE else reduce
            members = callers.setdefault((stage, index), set())
            members.add(worker)
            waits = op is Op.WAIT_ALL_REDUCE or (index == 0 and not connected)
            return not waits or len(members) == pipeline.replicas[stage]
        return True

    def go_on(worker: int) -> bool:
        before = done[worker]
        while done[worker] < len(lists[worker]) and can(worker):
            op, stage, number, peer, *_ = lists[worker][done[worker]]
            if op is Op.SEND_ACTIVATION:
                sent.add((Op.RECEIVE_ACTIVATION, number, stage, peer))
            if op is Op.SEND_GRADIENT:
                sent.add((Op.RECEIVE_GRADIENT, number, stage, peer))
            done[worker] += 1
        return done[worker] > before

    while sum(go_on(worker) for worker in range(len(lists))):
        pass
    return any(position < len(each) for position, each in zip(done, lists, strict=True))


def stuck(num_workers: int, *, connected: bool) -> list[tuple[int, ...]]:
    plans = [plan for plan in compositions(num_workers) if len(plan) < num_workers]
    found = []
    for plan in plans:
        pipeline = Pipeline(plan, chain(len(plan)), "1f1b", flushes=False, depth=noam(plan))
        if gets_stuck(pipeline, 40, connected=connected):
            found.append(plan)
    return found


def test_warm_up_messages_of_every_pair_of_stages_have_different_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    tags: list[int] = []
    monkeypatch.setattr(warm_up, "ChannelLink", lambda peer, lanes, tag, *others, pins: tags.append(tag))
    world: Any = SimpleNamespace(process=lambda rank: rank)
    neighbours = warm_up._Neighbours(make_setup(Mlp(), ([2, 4, 6], [1] * 4)), world, 0)
    for edge in itertools.combinations(range(4), 2):
        neighbours._link(edge, edge[1], 0)
    assert len({*tags}) == len(tags) == 6


@pytest.mark.parametrize(
    ("minibatch_size", "microbatches", "sizes"), [(8, 1, {8, 6}), (8, 3, {3, 2}), (20, 3, {7, 6, 2}), (23, 1, {23})]
)
def test_a_warm_up_runs_units_of_every_size(
    minibatch_size: int, microbatches: int, sizes: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """46 samples to train on and 10 held out: cuDNN would search for algorithms at the first short minibatch.

    It then frees memory, for which CUDA waits until all messages are sent: both ends could wait for each other.
    """
    setup = make_setup(
        Mlp(),
        ([], [1]),
        dataset=Blobs(num_train=46),
        minibatch_size=minibatch_size,
        microbatches=microbatches,
        weights="one",
    )
    ran: list[tuple[bool, int]] = []
    execute = Worker.execute

    def noted(worker: Worker, it: Instruction, *others: Any) -> Any:
        if it.op is Op.FORWARD:
            ran.append((worker.is_training, worker.feed.size(it.number)))
        return execute(worker, it, *others)

    monkeypatch.setattr(Worker, "execute", noted)
    own, world = Worker(setup, 0), SimpleNamespace(process=lambda rank: rank)
    before = parameters_of(own)
    warm_up.warm_up(setup, cast("World", world), own)
    assert {size for trains, size in ran if trains} == sizes
    held_out = setup.held_out
    assert {size for trains, size in ran if not trains} == {*map(held_out.size, range(held_out.minibatches_per_epoch))}
    assert len(ran) == len({*ran})
    assert all(torch.equal(value, before[name]) for name, value in parameters_of(own).items())


def test_a_first_all_reduce_that_waits_would_hang_plans() -> None:
    """So groups have to be connected before training, which the other tests here check."""
    assert stuck(5, connected=False) == [(1, 3, 1)]
    of_eight = stuck(8, connected=False)
    assert len(of_eight) == 21
    assert {(1, 6, 1), (2, 5, 1), (1, 3, 4), (3, 1, 3, 1)} <= set(of_eight)
    assert stuck(8, connected=True) == []


@pytest.mark.parametrize("num_workers", WAITING)
def test_the_waiting_cases_would_hang(num_workers: int) -> None:
    case = WAITING[num_workers]
    pipeline = Pipeline(case.replicas, chain(len(case.replicas)), "1f1b", flushes=False, depth=case.columns["depth"])
    assert gets_stuck(pipeline, 7, connected=False)
    assert not gets_stuck(pipeline, 7, connected=True)


@pytest.mark.parametrize("num_workers", WAITING)
def test_groups_that_connect_at_their_first_all_reduce_do_not_hang(
    request: pytest.FixtureRequest, num_workers: int
) -> None:
    """0.1.0: a stage's group was first used in a backward, before the gradient that the others waited for was sent."""
    processes: Processes = request.getfixturevalue({3: "three", 4: "four"}[num_workers])
    case = WAITING[num_workers]
    found = processes.run("tests.distributed.first_use:first_calls_wait", case, f"first-{num_workers}")
    compare(found, virtually(case), 0.0)


ZOO = [ZooCase("vgg16", "dp", 2), ZooCase("awd_lm", "pipedream-flush", 2), ZooCase("gnmt8", "pipedream", 2)]


@pytest.mark.parametrize(
    "cases",
    [
        # 0.2.0: the memory that processes share was to be freed meanwhile: with engine.compile, zero1 didn't begin.
        pytest.param([TWO["zero1"]], id="zero1"),
        pytest.param([*TWO.values(), *ZOO], id="all", marks=pytest.mark.slow),
    ],
)
def test_a_warm_up_changes_no_bit_of_two_processes(two: Processes, cases: list[Case | ZooCase]) -> None:
    """Weights, statistics, losses, scores, bytes and versions are those of the virtual engine, which has none."""
    found = two.run("tests.distributed.first_use:warmed_up", cases)
    for case, outcomes in zip(cases, zip(*found, strict=True), strict=True):
        expected = zoo_cases.virtually(case) if isinstance(case, ZooCase) else virtually(case)
        compare(outcomes, expected, 0.0)


# Replicated stages on either side, skip connections, a stage without parameters; every way of adding and of cutting.
WARMED_UP = [
    *("2-1", "1-2", "three stages", "vertical sync, a stage without parameters", "tied", "two chunks", "zero bubble"),
    *("2-1, parameter servers", "2-1, gpipe", "fp16, 2-1"),
]


@pytest.mark.parametrize(
    "names", [pytest.param(WARMED_UP, id="some"), pytest.param([*THREE], id="all", marks=pytest.mark.slow)]
)
def test_a_warm_up_changes_no_bit_of_three_processes(three: Processes, names: list[str]) -> None:
    cases = [THREE[name] for name in names]
    found = three.run("tests.distributed.first_use:warmed_up", cases)
    for case, outcomes in zip(cases, zip(*found, strict=True), strict=True):
        compare(outcomes, virtually(case), 0.0)


@pytest.mark.parametrize("name", ["2-1", "1-2"])
def test_a_warm_up_changes_no_state_before_the_clock_starts(three: Processes, name: str) -> None:
    for without, with_one in three.run("tests.distributed.first_use:facts_after_a_warm_up", THREE[name]):
        *plain, tensors = without
        *others, theirs = with_one
        assert plain == others
        assert plain[0]["num_bytes"] == []
        assert plain[1:3] == [0.0, 0.0]
        assert plain[3][2:] == ({}, {})
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in tensors.items())


@pytest.mark.sampled(32)
@pytest.mark.parametrize("name", [name for name in TWO if name not in NOT_BY_GLOO])
def test_tensors_may_be_sent_apart_from_their_headers(two: Processes, name: str) -> None:
    """0.1.0: their messages had room for them all the same: 822 MB of pinned memory for VGG-16 at 64 samples."""
    check_directly(TWO[name], two)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", THREE)
def test_tensors_of_three_processes_may_be_sent_apart_from_their_headers(three: Processes, name: str) -> None:
    check_directly(THREE[name], three)


def check_directly(case: Case, processes: Processes) -> None:
    found = processes.run("tests.distributed.first_use:directly", case)
    compare([outcome for outcome, _ in found], virtually(case), 0.0)
    largest_bytes, pipeline = max(size for _, size in found), small_setup(case).pipeline
    assert (largest_bytes > 0) is any(not pipeline.is_local(edge.source, edge.target) for edge in pipeline.edges)
    assert largest_bytes <= HEADER_BYTES + _ROOM_FOR_TEXT


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("conv", (4,), (1, 1), {"compiled": True, "channels_last": True}, segments=(7, 5)),
        Case("mlp", (), (2,), {"compiled": True, "weights": "one", "shard": "parameters"}, segments=(6,)),
        Case("conv", (4,), (2, 1), {"compiled": True}, segments=(6,)),
    ],
    ids=["pipedream", "parameters shared out", "replicas of a stage"],
)
def test_stages_are_compiled_before_the_clock_starts_and_keep_their_state(case: Case, tmp_path: Path) -> None:
    """The last minibatch of an epoch is a short one, which would compile once more."""
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with Processes(sum(case.replicas), environment=environment) as processes:
        plain = replace(case, columns={**case.columns, "compiled": False})
        found = processes.run("tests.distributed.first_use:compiled", case)
        expected = processes.run("tests.distributed.first_use:compiled", plain)
    for (counts, tensors, started), (_, others, others_started) in zip(found, expected, strict=True):
        assert counts[0] == counts[1] >= 1
        assert started[0] == others_started[0]
        assert tensors.keys() == others.keys()
        for ours, theirs in ((tensors, others), (started[1], others_started[1])):
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4)
