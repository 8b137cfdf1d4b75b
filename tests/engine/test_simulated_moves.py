"""Simulated runs whose layers move have the decisions, seconds and bytes of runs that train on the virtual clock."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pipebench.cluster import Cluster, Level
from pipebench.engine.setup import Setup
from pipebench.extensions.moves.balancing import RepartitionController, StageReport
from pipebench.extensions.moves.engine import moves_of, moving
from pipebench.extensions.moves.repartition_plan import Repartition
from pipebench.extensions.moves.settings import settings_of
from pipebench.extensions.moves.simulated_engine import SimulatedEngine
from pipebench.model.plan import recut
from pipebench.schedule.modes import RECOMPUTE
from pipebench.simulate.steady import SegmentTotals
from tests.engine.moved_segment import simulate_moves
from tests.engine.test_balancing import balancing, with_momentum
from tests.engine.test_modes import images
from tests.models import ConvNet, SkipNet
from tests.support import Blobs, Mlp, make_engine, make_setup

CASES = [
    pytest.param([1, 2], {}, id="all at the end"),
    pytest.param([5, 6], {}, id="all at the start"),
    pytest.param([1], {}, id="two stages"),
    pytest.param([1, 2], {"weights": "one", "microbatches": 2}, id="a flush"),
    pytest.param([1, 2], {"weights": "one", "accumulate": 4}, id="several minibatches to a flush"),
    pytest.param([6, 7], {"model": SkipNet}, id="values that skip a stage"),
    pytest.param([3], {}, id="balanced"),
]


def played(engine: Any, drains: list[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Run segments up to these drains; return the decisions, with minibatches counted from the start."""
    done, made = 0, []
    for drain in drains:
        while done < drain:
            first = done
            done += engine.train(first, drain - first)
            for move in moves_of(engine).take_decisions():
                made.append((first + move.at, tuple(move.starts)))
                if not settings_of(engine.setup.pipeline).live:
                    engine.replan(recut(engine.setup.graph, engine.setup.plan, move.starts))
    return made


def counted(num_bytes: Counter[tuple[str, str]]) -> dict[tuple[str, str], int]:
    return {key: count for key, count in num_bytes.items() if count and key[0] != "control"}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("drains", [[160], [7 * each for each in range(1, 15)]], ids=["one drain", "many"])
@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize(("starts", "columns"), CASES)
def test_simulated_decisions_equal_those_in_training(
    starts: list[int], columns: Any, live: bool, drains: list[int]
) -> None:
    """To the byte, and at the same clock, but for the rounding of a drain's sums in another order."""
    setup = with_momentum(balancing(starts, live=live, **columns))
    if setup.pipeline.flushes and drains[0] % setup.pipeline.period:
        drains = [each * setup.pipeline.period for each in drains[:5]]
    trained, simulated = make_engine(setup), SimulatedEngine(setup)
    made = played(trained, drains)
    assert played(simulated, drains) == made
    assert bool(made) == (starts != [3])
    assert simulated.setup.plan == trained.setup.plan
    assert simulated.clock_s == pytest.approx(trained.clock_s, rel=1e-12)
    assert simulated.totals.end_s == pytest.approx(simulated.clock_s)
    assert counted(simulated.totals.num_bytes) == counted(trained.num_bytes)


LIMITED: list[Any] = [
    pytest.param([1, 2], {"live": True}, 0.85, (), id="all at the end"),
    pytest.param([1, 2], {"live": False}, 0.7, (), id="at drains, little memory"),
    pytest.param([5, 6], {"live": True}, 0.95, (RECOMPUTE,), id="all at the start, computed again"),
    pytest.param([1, 5], {"live": False}, 0.9, (RECOMPUTE,), id="at drains, computed again"),
    pytest.param([1], {"live": True, "weights": "one", "microbatches": 2}, 1.1, (RECOMPUTE,), id="a flush"),
    pytest.param([1, 2], {"live": False, "weights": "correct"}, 1.05, (), id="moved weights"),
    pytest.param([1, 2], {"live": False, "weights": "double-buffer", "accumulate": 3}, 1.0, (), id="two versions"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("starts", "columns", "share", "chooses"), LIMITED)
def test_simulated_decisions_equal_those_in_training_with_limited_memory(
    starts: list[int], columns: Any, share: float, chooses: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated stages report their memory, too, to the byte, in every report."""
    reported: list[list[tuple[int, ...]]] = []
    decide = RepartitionController.decide

    def noted(balancing: RepartitionController, minibatch: int, reports: Sequence[StageReport]) -> Repartition | None:
        reported[-1] += [(minibatch, each.stage, each.moves, each.units, int(each.peak_bytes)) for each in reports]
        return decide(balancing, minibatch, reports)

    free = with_momentum(balancing(starts, **columns))
    engine = make_engine(free)
    played(engine, [60])
    cluster = replace(free.cluster, memory_bytes=int(share * max(engine.peak_bytes)))
    setup = moving(replace(free, cluster=cluster), chooses=chooses)
    monkeypatch.setattr(RepartitionController, "decide", noted)
    trained, simulated = make_engine(setup), SimulatedEngine(setup)
    made = []
    for each in (trained, simulated):
        reported.append([])
        made.append(played(each, [120]))
    assert made[0] == made[1]
    assert simulated.setup.plan == trained.setup.plan
    measured, predicted = reported
    assert len(predicted) > 20
    assert predicted == measured[: len(predicted)]  # no more is played than anything may change in
    assert any(peak_bytes for *_, peak_bytes in predicted)


def test_recomputation_counts_if_layers_move_at_drains_only() -> None:
    """Under a weight policy with which layers can't move in training, so there is no `MovingSegment`."""
    setup = with_momentum(balancing([1, 2], live=False, weights="correct", recompute=True))
    trained, simulated = make_engine(setup), SimulatedEngine(setup)
    assert played(simulated, [60]) == played(trained, [60])
    assert simulated.totals.again_s == pytest.approx(trained.facts()["again_s"])
    assert simulated.totals.again_s > 0


def test_replicas_average_statistics_also_at_drains_of_moves() -> None:
    """BatchNorm's statistics on slow links, so that the average takes time: at a regular drain, and at a move's."""
    cluster = Cluster("slow", "unit", None, (Level("server", 4, 40.0, 1e-3),))
    setup = moving(make_setup(ConvNet(), ([4], [3, 1]), dataset=images(), cluster=cluster, sizes=(2, 4)), live=False)
    trained, simulated = make_engine(setup), SimulatedEngine(setup)
    for engine in (trained, simulated):
        engine.train(0, 5)
        engine.replan(recut(setup.graph, setup.plan, [6]))
        engine.train(5, 7)
    assert simulated.clock_s == pytest.approx(trained.clock_s, rel=1e-12)
    assert counted(simulated.totals.num_bytes) == counted(trained.num_bytes)
    assert trained.num_bytes["buffers", "server"] > 0


def numbers(totals: SegmentTotals) -> list[float]:
    return [totals.end_s, totals.busy_s, totals.stall_s, totals.again_s, totals.swap_stall_s]


def uneven(starts: list[int], **columns: Any) -> Setup:
    """Return a setup of epochs of 100 minibatches, the last of which has one sample instead of four."""
    setup = make_setup(Mlp(), (starts, [1] * (len(starts) + 1)), dataset=Blobs(num_train=397), **columns)
    return with_momentum(moving(setup))


SHAPES = [
    pytest.param({}, id="pipedream"),
    pytest.param({"weights": "one", "accumulate": 4}, id="a flush"),
    pytest.param({"recompute": {0, 1, 2}}, id="computed again"),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("columns", SHAPES)
@pytest.mark.parametrize("segments", [[400], [100, 100, 100], [350, 500], [40, 700]], ids=str)
def test_extrapolated_segments_equal_fully_simulated_ones(
    segments: list[int], columns: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For segments that end with an epoch, within one, or that have several."""

    def run() -> tuple[SimulatedEngine, int]:
        counter, done = Counted(), 0
        engine = SimulatedEngine(uneven([1, 2], **columns), counter)
        moves_of(engine).announce(Repartition(32, (1, 3)))
        for count in segments:
            done += engine.train(done, count)
        assert done == sum(segments)
        return engine, counter.num_events

    (short, few) = run()

    def steady(engine: SimulatedEngine, first: int, count: int) -> SegmentTotals:
        return simulate_moves(engine.setup, [], first, count, engine._meter)

    monkeypatch.setattr(SimulatedEngine, "_enough", lambda self: 0)
    monkeypatch.setattr(SimulatedEngine, "_steady", steady)
    (whole, many) = run()
    assert few < many / 2
    # Which part of an update a short minibatch is may shift what a link waits for.
    assert numbers(short.totals) == pytest.approx(numbers(whole.totals), rel=1e-6 if "accumulate" in columns else 1e-9)
    assert counted(short.totals.num_bytes) == counted(whole.totals.num_bytes)
    assert short.setup.plan == whole.setup.plan


class Counted:
    """Counts the calls of a listener."""

    def __init__(self) -> None:
        self.num_events = 0

    def begin(self, size_of: Any) -> None:
        """Nothing to do."""

    def event(self, event: Any) -> None:
        self.num_events += 1

    def transfer(self, transfer: Any) -> None:
        """Nothing to count."""


def test_balanced_stages_do_not_move() -> None:
    """And the totals are those of a simulation without measurements."""
    setup = with_momentum(balancing([3], live=True))
    engine, other = SimulatedEngine(setup), SimulatedEngine(moving(setup, balances=False))
    for each in (engine, other):
        assert each.train(0, 500) == 500
    assert engine.totals == other.totals
