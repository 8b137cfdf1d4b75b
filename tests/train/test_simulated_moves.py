"""Simulated recipes whose layers move: the moves of the same recipe in training, and their totals."""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipebench.engine.setup import Setup
from pipebench.extensions.moves.recipe import FILE_NAME, to_text
from pipebench.extensions.moves.simulated import forecast_of, simulate_moving
from pipebench.schedule.repartitions import RepartitionRecord
from pipebench.simulate.meter import MEMORY
from pipebench.simulate.steady import simulate_segment
from pipebench.train.engines import simulate
from pipebench.train.job import Job
from pipebench.train.memory_forecast import MemoryForecast
from pipebench.train.result import RunResult
from tests.train.test_moves import LIVE, WRITTEN, job, run


def made(moves: tuple[RepartitionRecord, ...]) -> list[RepartitionRecord]:
    """Return moves as far as they don't depend on what evaluations take, which a simulated run has none of."""
    return [replace(move, clock_s=0.0) for move in moves]


BALANCED: dict[str, Any] = {"moves": None, "every": 40, "epochs": 10, "balances": True, "starts": [1, 2]}
ASKED = [
    pytest.param({"moves": WRITTEN}, id="at drains"),
    pytest.param({"moves": LIVE, "every": 60, "epochs": 5, "live": True}, id="while it goes on"),
    pytest.param(
        {"moves": None, "every": 40, "epochs": 10, "live": True, "balances": True, "starts": [1, 2]}, id="live"
    ),
    pytest.param({"moves": None, "every": 40, "epochs": 10, "balances": True, "starts": [1, 2]}, id="drained"),
]


@pytest.fixture(scope="module", params=ASKED)
def asked(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.param
    return found


@pytest.fixture(scope="module")
def trained(asked: dict[str, Any]) -> RunResult:
    found: RunResult = run(job(**asked))[0]
    return found


def test_a_simulated_run_makes_the_moves_of_training(asked: dict[str, Any], trained: RunResult) -> None:
    simulated = simulate(job(**asked))[0]
    assert made(simulated.moves) == made(trained.moves) != []
    assert {point.samples for point in trained.points} <= {point.samples for point in simulated.points}
    for name in ("repartitions", "comm_bytes_activation", "comm_bytes_gradient", "num_workers", "samples_per_update"):
        assert simulated.metrics[name] == trained.metrics[name]
    for name in ("epoch_time_s", "throughput_samples_per_s", "migration_stall_s", "bubble_fraction"):
        assert simulated.metrics[name] == pytest.approx(trained.metrics[name], rel=1e-9)
    assert [row["first_layer"] for row in simulated.stages] == [row["first_layer"] for row in trained.stages]


def test_recorded_decisions_are_repeated(tmp_path: Path) -> None:
    given = job(**BALANCED, live=True)
    found, _ = simulate(given)
    path = tmp_path / FILE_NAME
    path.write_text(to_text(found.moves))
    again, _ = simulate(job(str(path), every=40, epochs=10, live=True, starts=[1, 2]))
    assert [(move.minibatch, move.cuts) for move in again.moves] == [
        (move.minibatch, move.cuts) for move in found.moves
    ]
    assert again.metrics == pytest.approx(found.metrics)


def test_a_long_run_ends_with_the_throughput_of_the_last_cuts() -> None:
    """A hundred epochs take hardly longer to simulate than one, and an epoch of them what it takes alone."""
    given = job(None, every=12 * 10, epochs=100, live=True, balances=True, starts=[1, 2])
    result, _ = simulate(given)
    rates = [point.metrics["throughput_samples_per_s"] for point in result.points]
    settled = [point.samples % (46 * 10) == 0 for point in result.points].index(True)
    assert settled > 5, "often at first"
    assert max(rates[:3]) < rates[settled + 1]
    assert rates[settled + 1 :] == pytest.approx([rates[-1]] * 9)
    assert result.metrics["steady_throughput_samples_per_s"] < rates[-1], "that drains after every epoch"
    assert result.points[-1].clock_s == result.metrics["total_time_s"]


def test_the_timeline_of_a_trained_run_equals_the_simulated_one(asked: dict[str, Any], trained: RunResult) -> None:
    """Whoever has decided on its moves; a run whose layers stay has one part."""
    given = job(**asked)
    forecast = MemoryForecast(given)
    seen = forecast_of(given, trained.moves)
    simulate_moving(given, forecast)
    assert seen.moved is not None
    assert forecast.moved is not None
    assert seen.memory.peaks == forecast.memory.peaks
    assert seen.moved.between == forecast.moved.between
    assert seen.moved.last.peaks == forecast.moved.last.peaks
    assert forecast_of(given, ()).moved is None


@pytest.mark.parametrize("asked", ASKED)
def test_rates_over_time_are_those_of_the_whole_run(asked: Any) -> None:
    """What is through, sent and moved, added up from point to point; and clocks of moves are in between."""
    result, _ = simulate(job(**asked))
    clocks = [0.0, *(point.clock_s for point in result.points)]
    took = [b - a for a, b in itertools.pairwise(clocks)]
    assert min(took) > 0

    def total(metric: str) -> float:
        return sum(each * point.metrics[metric] for each, point in zip(took, result.points, strict=True))

    assert total("throughput_samples_per_s") == pytest.approx(result.points[-1].samples)
    assert total("comm_bytes_per_s") == pytest.approx(result.metrics["comm_bytes_total"])
    assert total("migration_bytes_per_s") == pytest.approx(result.metrics["migration_bytes"])
    for move in result.moves:
        later = next(point for point in result.points if point.samples >= move.samples)
        assert 0 < move.clock_s <= later.clock_s + move.stall_s * (1 + 1e-9)


def stays(setup: Setup) -> Setup:
    return replace(setup, repartitions=False, pipeline=replace(setup.pipeline, extensions={}))


def test_a_run_without_moves_equals_an_ordinary_epoch() -> None:
    given = job(None, every=12, epochs=1, live=True, balances=True, starts=[3, 5])
    result, _ = simulate(given)
    plain, _ = simulate(Job(given.recipe, given.cluster, stays(given.setup)))
    assert result.moves == ()
    assert {name: result.metrics[name] for name in plain.metrics} == plain.metrics
    assert result.metrics["repartitions"] == result.metrics["migration_bytes"] == 0
    assert result.stages == plain.stages
    assert simulate_segment(given.setup, 12).end_s == result.metrics["total_time_s"]


def test_peaks_cover_all_cuts_and_the_moves_between_them() -> None:
    given = job(LIVE, every=60, epochs=5, live=True)
    forecast = MemoryForecast(given)
    result, _ = simulate_moving(given, forecast)
    assert forecast.moved is not None
    parts = [forecast.memory.peaks, forecast.moved.between, forecast.moved.last.peaks]
    assert [max(of_stage) for of_stage in zip(*([peak.num_bytes for peak in part] for part in parts), strict=True)] == [
        row["peak_memory_bytes"] for row in result.stages
    ]
    stayed = replace(given, extensions={}, setup=stays(given.setup))
    first, _ = simulate(stayed, MemoryForecast(given))
    assert result.metrics["peak_memory_bytes_max"] > first.metrics["peak_memory_bytes_max"]

    def note(limit_bytes: float) -> str:
        small = replace(given.cluster, memory_bytes=int(limit_bytes))
        capped = replace(given, cluster=small, setup=replace(given.setup, cluster=small))
        return simulate_moving(capped, MemoryForecast(capped))[0].notes[MEMORY]

    moving = r"out of memory: stage \d holds .* while layers move, more than the .* of a "
    assert re.match(moving, note(result.metrics["peak_memory_bytes_max"] - 1))
    after = r"after minibatch 8: out of memory at .* needs .* of the .* of a "
    assert re.match(after, note(first.metrics["peak_memory_bytes_max"]))
