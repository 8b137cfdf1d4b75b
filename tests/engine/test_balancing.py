"""Algorithm 1 on the virtual clock: stages that were cut badly are balanced while they train."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipebench.engine.setup import Setup
from pipebench.extensions.moves.balancing import FeasibilityCheck, RepartitionController, StageReport
from pipebench.extensions.moves.engine import moves_of, moving
from pipebench.extensions.moves.monitor import StageMonitor
from pipebench.extensions.moves.rebalancing import Proposal, RepartitionSearch, problems_of
from pipebench.extensions.moves.repartition_plan import Repartition, layout_of
from pipebench.extensions.moves.settings import settings_of
from pipebench.extensions.moves.simulated_engine import SimulatedEngine
from pipebench.extensions.moves.worker import moving_worker
from pipebench.model.plan import recut
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP
from pipebench.schedule.operations import Op
from pipebench.schedule.programs import most_in_flight
from pipebench.simulate.memory import stage_memories
from pipebench.simulate.memory_meter import MemoryMeter
from pipebench.simulate.meter import Meter
from pipebench.simulate.steady import simulate_segment
from tests.checkpoint.support import captured
from tests.checkpoint.test_round_trips import OPTIMIZERS, bits
from tests.models import SkipNet
from tests.simulate.test_memory import profile_of
from tests.support import Blobs, Mlp, make_engine, make_setup

SGD = OPTIMIZERS["fused-momentum"]


def balancing(starts: list[int], *, live: bool, model: Any = Mlp, **columns: Any) -> Setup:
    data = Blobs(num_train=4 * 200)
    setup = make_setup(model(), (starts, [1] * (len(starts) + 1)), make_optimizer=SGD, dataset=data, **columns)
    return moving(setup, balances=True, live=live)


def with_momentum(setup: Setup) -> Setup:
    """Return a setup whose profile has the optimizer's state and the activations that the layers save."""
    saved = profile_of(setup).layers
    rows = {
        size: tuple(
            replace(
                own, saved_bytes=row.saved_bytes, saved_with=row.saved_with, saved_storages=row.saved_storages,
                output_storages=row.output_storages, input_storages=row.input_storages,
            )
            for own, row in zip(layers, saved[size], strict=True)
        )
        for size, layers in setup.profile.layers.items()
    }  # fmt: skip
    return replace(setup, profile=replace(setup.profile, layers=rows, state_bytes_per_byte=1)).under(setup.plan)


def slowest_s(setup: Setup) -> float:
    size = setup.costs.most_samples
    return max(stage.forward_s[size] + stage.backward_s[size] for stage in setup.costs.stages)


def played(setup: Setup, total: int) -> tuple[Any, list[tuple[int, tuple[int, ...]]]]:
    """Train so many minibatches; return the engine and the decisions, with minibatches counted from the start."""
    engine, done, made = make_engine(setup), 0, []
    while done < total:
        first = done
        done += engine.train(done, total - done)
        for move in moves_of(engine).take_decisions():
            made.append((first + move.at, tuple(move.starts)))
            if not settings_of(setup.pipeline).live:
                engine.replan(recut(setup.graph, engine.setup.plan, move.starts))
    return engine, made


@pytest.mark.sampled(4)
@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize(
    ("starts", "columns"),
    [([1, 2], {}), ([5, 6], {}), ([1], {}), ([1, 2], {"weights": "one", "microbatches": 2})],
    ids=["all at the end", "all at the start", "two stages", "a flush"],
)
def test_bad_cuts_are_balanced(starts: list[int], columns: Any, live: bool) -> None:
    setup = balancing(starts, live=live, **columns)
    engine, made = played(setup, 80)
    best_s = 3.0 * -(-7 // (len(starts) + 1))  # seven layers of a forward of 1 s and a backward of 2 s
    assert slowest_s(engine.setup) == best_s < slowest_s(setup)
    assert 1 <= len(made) <= 9
    assert all(at >= 2 * setup.pipeline.depth for at, _ in made)


@pytest.mark.parametrize("live", [True, False])
def test_given_moves_repeat_a_balanced_run(live: bool) -> None:
    setup = balancing([6, 7], live=live, model=SkipNet)
    engine, made = played(setup, 80)
    again = make_engine(moving(setup, balances=False))
    done = 0
    if live:
        for at, starts in made:
            moves_of(again).announce(Repartition(at, starts))
    for at, starts in [] if live else made:
        again.train(done, at - done)
        again.replan(recut(setup.graph, again.setup.plan, starts))
        done = at
    again.train(done, 80 - done)
    assert made
    assert bits(captured(engine)) == bits(captured(again))
    assert engine.clock_s == again.clock_s, "reports and decisions travel along"


def test_stages_without_gradients_are_not_balanced() -> None:
    """The second stage selects features of the data. It gets no gradients, and so no decisions."""
    setup = balancing([1, 2], live=True, model=SkipNet)
    assert not any(edge.has_gradient for edge in setup.pipeline.edges if edge.source == 1)
    assert played(setup, 60)[1] == []


def test_balanced_stages_stay_and_training_is_unchanged() -> None:
    setup = balancing([3], live=True)
    engine, made = played(setup, 40)
    other = make_engine(replace(setup, repartitions=False, pipeline=replace(setup.pipeline, extensions={})))
    other.train(0, 40)
    assert not made or slowest_s(engine.setup) < slowest_s(setup)
    if not made:
        assert bits(captured(engine)) == bits(captured(other))


def test_throughput_grows_during_training() -> None:
    balanced, _ = played(balancing([1, 2], live=True), 80)
    drained, _ = played(balancing([1, 2], live=False), 80)
    bad = make_engine(moving(balancing([1, 2], live=True), balances=False))
    bad.train(0, 80)
    assert balanced.clock_s < drained.clock_s < bad.clock_s


@pytest.mark.parametrize(("starts", "live"), [((1, 2), False), ((5, 6), True)])
def test_stages_are_balanced_within_the_memory_of_their_devices(starts: tuple[int, ...], live: bool) -> None:
    free, limit = with_momentum(balancing([*starts], live=live)), 4000
    capped = replace(free, cluster=replace(free.cluster, memory_bytes=limit))
    (engine, _), (other, _) = played(free, 80), played(capped, 80)
    needed = [
        memory.most_bytes(setup.costs.most_samples, depth, depth)
        for setup in (engine.setup, other.setup)
        for memory, depth in zip(
            stage_memories(setup.profile, setup.plan, setup.pipeline), most_in_flight(setup.pipeline), strict=True
        )
    ]
    assert max(needed[:3]) > limit >= max(needed[3:])
    assert slowest_s(other.setup) < slowest_s(free)


def choosing(starts: list[int], limit: int, *, live: bool = True, **columns: Any) -> Setup:
    """Return a setup whose layers choose policies; its profile has what layers save, and no optimizer state."""
    free = balancing(starts, live=live, **columns)
    rows = {
        size: tuple(replace(row, saved_bytes=row.output_bytes) for row in layers)
        for size, layers in free.profile.layers.items()
    }
    cluster = replace(free.cluster, memory_bytes=limit, pcie_bytes_per_s=1e6)
    chosen = replace(
        free, profile=replace(free.profile, layers=rows), cluster=cluster,
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
    )  # fmt: skip
    return moving(chosen.under(chosen.plan), chooses=(SWAP, RECOMPUTE))


@pytest.mark.parametrize("live", [True, False])
def test_layers_that_move_get_policies_that_fit_their_new_stages(live: bool) -> None:
    """The weights are those of the same moves if all layers keep their activations."""
    setup = choosing([4, 5, 6], 3400, live=live)
    engine, done, moves = make_engine(setup), 0, []
    while done < 80:
        first = done
        done += engine.train(done, 80 - done)
        for move in moves_of(engine).take_decisions():
            assert move.memory is not None
            moves.append((first + move.at, Repartition(move.at, move.starts, move.memory)))
            if not live:
                engine.replan(recut(setup.graph, engine.setup.plan, move.starts, move.memory))
    assert moves
    assert layout_of(engine.setup.plan) == moves[-1][1].after(layout_of(setup.plan))
    assert {*layout_of(engine.setup.plan).memory} > {KEEP}
    assert slowest_s(engine.setup) < slowest_s(setup)
    kept = make_engine(moving(setup, balances=False))
    done = 0
    for at, move in moves:
        if live:
            moves_of(kept).announce(Repartition(at, move.starts))
        else:
            kept.train(done, at - done)
            kept.replan(recut(setup.graph, kept.setup.plan, move.starts))
            done = at
    kept.train(done, 80 - done)
    assert bits(captured(engine)) == bits(captured(kept))


def simulated_peaks(setup: Setup) -> list[int]:
    meter = MemoryMeter(setup.pipeline, stage_memories(setup.profile, setup.plan, setup.pipeline), setup.costs)
    simulate_segment(setup, 100, Meter(setup.pipeline, meter))
    return [peak.num_bytes for peak in meter.timeline().peaks]


@pytest.mark.parametrize(("starts", "limit"), [([1, 2, 3], 2800), ([4, 5, 6], 3400)])
def test_decided_cuts_fit_with_waiting_messages(starts: list[int], limit: int) -> None:
    """By the closed form, which ignores messages, other cuts would fit."""
    setup = choosing(starts, limit)
    engine, made = played(setup, 80)
    assert made
    assert max(simulated_peaks(engine.setup)) <= limit < max(simulated_peaks(setup))


@pytest.mark.parametrize(
    ("starts", "limit", "made"),
    [
        ([2, 3, 4], 4000, [(2, 3, 4), (1, 3, 5)]),  # policies alone, by which there is room for layers to come
        ([1, 2, 3], 4400, [(1, 2, 5)]),  # stages in the middle keep all, and can't have less for the last block
    ],
)
def test_stages_have_room_while_layers_move(
    starts: list[int], limit: int, made: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, found = played(choosing(starts, limit), 100)
    assert [where for _, where in found] == made
    assert max(worker.peaks.device_bytes for worker in engine.workers) <= limit
    monkeypatch.setattr(FeasibilityCheck, "excess_while_moving", lambda *_: [0.0] * 4)
    careless, _ = played(choosing(starts, limit), 100)
    assert max(worker.peaks.device_bytes for worker in careless.workers) > limit


def test_layers_stay_if_a_move_does_not_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage would hold two versions of some layers that it gives away."""
    setup, limit = balancing([1, 2], live=True), 4600
    setup = replace(setup, profile=replace(profile_of(setup), state_bytes_per_byte=1)).under(setup.plan)
    setup = replace(setup, cluster=replace(setup.cluster, memory_bytes=limit))
    assert not played(setup, 80)[1]
    monkeypatch.setattr(FeasibilityCheck, "excess_while_moving", lambda *_: [0.0] * 3)
    _, ((at, starts), *_) = played(setup, 80)
    peaks = []
    for cuts in (starts, (1, 3)):
        simulated = SimulatedEngine(moving(setup, balances=False))
        moves_of(simulated).announce(Repartition(at, cuts))
        simulated.train(0, 60)
        peaks.append(max(peak.num_bytes for peak in simulated.peaks))
    assert max(simulated_peaks(setup)) <= limit < min(peaks)


def test_layers_stay_if_a_move_at_a_drain_does_not_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves are at drains. With the optimizer's state, the last stage alone fills its device."""
    setup, limit = balancing([1, 2], live=False), 26_000
    setup = replace(setup, profile=replace(profile_of(setup), state_bytes_per_byte=20)).under(setup.plan)
    setup = replace(setup, cluster=replace(setup.cluster, memory_bytes=limit))
    weights = [8 * (inputs + 1) * outputs for inputs, outputs in ((6, 7), (7, 8), (8, 5), (5, 4))]
    held = [21 * (2 * weights[0]), 21 * weights[1], 21 * (weights[1] + 2 * sum(weights[2:]))]  # tanhs have none
    now = layout_of(setup.plan)
    excess = FeasibilityCheck(setup).excess_while_moving([now, now._replace(starts=(2, 3))])
    assert excess == [max(0, each - limit) for each in held]
    assert sum(weights[1:]) * 24 < limit < max(held)
    assert not played(setup, 60)[1]
    monkeypatch.setattr(FeasibilityCheck, "excess_while_moving", lambda *_: [0.0] * 3)
    assert played(setup, 60)[1]


def test_a_search_without_a_better_result_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages are unbalanced, and no cuts on the way to better ones fit."""
    looked, best = [], RepartitionSearch.best

    def counted(stages: RepartitionSearch) -> Proposal | None:
        looked.append(stages)
        return best(stages)

    monkeypatch.setattr(RepartitionSearch, "best", counted)
    _, made = played(choosing([1, 2, 3], 3200), 80)
    assert not made
    assert len(looked) == 1


def test_stages_report_their_memory_with_their_times() -> None:
    """Memory counts from the first measured backward on; until then a stage reports none."""
    setup = balancing([2, 4], live=True)
    engine = make_engine(replace(setup, cluster=replace(setup.cluster, memory_bytes=10**9)))
    engine.train(0, 20)
    monitors = [moving_worker(worker).monitor for worker in engine.workers]
    reports = [monitor.reports[-1] for monitor in monitors if monitor is not None]
    assert [report.stage for report in reports] == [0, 1, 2]
    assert [report.peak_bytes for report in reports] == [worker.peaks.device_bytes for worker in engine.workers]
    monitor = StageMonitor(setup, 0, None, lambda move: None)
    monitor.note_memory(100)
    assert monitor.reports[-1].peak_bytes == 0
    monitor.note(Instruction(Op.BACKWARD, 0, 0), 1.0)
    monitor.note_memory(70)
    monitor.note_memory(60)
    assert monitor.reports[-1].peak_bytes == 70
    monitor.accept(3, Repartition(8, (3, 4)))
    assert monitor.reports[-1].peak_bytes == 0


def test_a_unit_whose_gradients_go_to_two_stages_carries_one_decision() -> None:
    """The last stage decides once per unit, and sends the same decision to both."""
    decided = []

    def decide(minibatch: int, reports: Sequence[StageReport]) -> Repartition:
        decided.append(minibatch)
        return Repartition(minibatch + 8, (2, 4))

    setup = balancing([2, 4], live=True)
    monitor = StageMonitor(setup, 2, decide, lambda move: None)
    first, again = monitor.decision(4), monitor.decision(4)
    assert decided == [setup.pipeline.minibatch(4)[0]]
    assert first is again
    other = StageMonitor(setup, 0, None, lambda move: None)
    assert other.decision(4) is None


def test_a_stage_beyond_its_memory_gives_layers_away_though_all_are_balanced() -> None:
    """It holds too much by measurement; by prediction it would fit."""
    setup = choosing([2, 4], 10**9)
    problem_of = problems_of(setup.profile, setup.pipeline, 4, math.inf, None, ())
    ends = itertools.pairwise(layout_of(setup.plan).ends)
    problems = [problem_of(stage, *layers) for stage, layers in enumerate(ends)]
    predicted = [problem.outcome((KEEP,) * problem.num_layers).num_bytes for problem in problems]
    fullest = max(range(3), key=predicted.__getitem__)
    capped = replace(setup, cluster=replace(setup.cluster, memory_bytes=int(1.1 * predicted[fullest])))

    def decided(more: float) -> Repartition | None:
        held = [size * (more if stage == fullest else 1.0) for stage, size in enumerate(predicted)]
        return RepartitionController(capped).decide(
            7, [StageReport(stage, 0, 8, 2.0, 4.0, held[stage]) for stage in range(3)]
        )

    assert decided(1.09) is None
    move = decided(1.15)
    assert move is not None
    assert move.at >= 7 + 3 * setup.pipeline.depth
    assert move.after(layout_of(setup.plan)) != layout_of(setup.plan)
