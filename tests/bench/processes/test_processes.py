import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import distributed

from pipebench.cluster import Cluster, Level
from pipebench.profile.measure import mean_profile
from pipebench.profile.stored import read_profile, write_profile
from pipebench.zoo.mnist5k import mnist5k
from tests.bench.processes import figure15, jobs, machine, memory, traffic, workers
from tests.bench.processes.comparison import compare
from tests.bench.processes.figure15 import Point
from tests.bench.processes.machine import Machine
from tests.bench.processes.references import DDP, FSDP, GPIPE, ONE_F_ONE_B, distance_from_plain_loop
from tests.bench.processes.sides import OURS, Given, make_side
from tests.bench.processes.subject import Case, Subject, cut_at
from tests.patience import PATIENCE_S
from tests.support import unit_profile

NARROW = Subject(width=0.03125, minibatch_size=16)
SAME_WORK = (GPIPE, ONE_F_ONE_B, DDP, FSDP, *(OURS[side] for side in (GPIPE, ONE_F_ONE_B, DDP, FSDP)))
LINK = Level("machine", 2, 5e9, 50e-6)


@pytest.fixture(scope="module")
def given() -> Given:
    profile = unit_profile(NARROW.graph(), mnist5k(), machine.sizes(NARROW))
    return Given(NARROW, cut_at(profile, 16), profile, Cluster("loopback", "local", None, (LINK,)))


def check_sides(fields: dict[str, object]) -> dict[str, float]:
    """Return every reference's distance, one from another loop, and what a broadcast carried; a job for workers."""
    given = Given.from_json(fields)
    in_double = replace(given, subject=replace(given.subject, double=True)).to_json()
    found = {side: jobs.distance(in_double, side, 2) for side in SAME_WORK}
    made = make_side(given, GPIPE)
    made.train(2)
    found["cut into fewer parts"] = distance_from_plain_loop(made.weights(), NARROW, 2, parts=2)
    taken = workers.together(lambda: time.sleep(0.1 * distributed.get_rank()))
    found |= {"slowest": taken.slowest_s, "processor": taken.processor_s}
    found["carried"] = traffic.bytes_of(lambda: distributed.broadcast(torch.zeros(1_000_000), 0))
    return found


def fails_on_one_rank() -> None:
    """Fail on rank 1 while rank 0 waits for it; a job for workers."""
    if distributed.get_rank() == 1:
        raise ValueError("what rank 1 says")
    distributed.barrier()


@pytest.mark.slow
def test_both_sides_train_like_a_plain_loop(given: Given) -> None:
    found = workers.run(check_sides, 2, {"fields": given.to_json()}, limit_s=PATIENCE_S)
    for rank in found:
        assert max(rank[side] for side in SAME_WORK) < 1e-9
        assert rank["cut into fewer parts"] > 1e-2  # BatchNorm sees other minibatches: the measure can tell
        assert rank["slowest"] >= 0.1  # rank 1's
        assert rank["processor"] < rank["slowest"]
        assert rank["carried"] > 4_000_000


@pytest.mark.slow
def test_workers_that_fail_report_the_reason_and_end() -> None:
    with pytest.raises(RuntimeError, match="what rank 1 says"):
        workers.run(fails_on_one_rank, 2, {}, limit_s=PATIENCE_S)


@pytest.mark.parametrize("num_processes", [2, 3])
def test_every_case_of_figure_15_is_predicted(given: Given, num_processes: int) -> None:
    cases = figure15.cases(given.profile, NARROW, num_processes)
    assert len({str(case) for case in cases}) == len(cases) >= (24 if num_processes == 2 else 12)
    assert {case.num_workers for case in cases} == {num_processes}
    cluster = Cluster("loopback", "local", None, (Level("machine", num_processes, 5e9, 50e-6),))
    busy_s = 3.0 * len(given.profile.layers[16][:-1])  # of a minibatch, at unit costs
    for case in cases:
        took_s = figure15.predicted_s(NARROW, case, Machine(given.profile, {}, cluster), 24)
        # A microbatch costs as much as a minibatch in this profile, and no more than all workers can be busy.
        assert 24 * busy_s * case.microbatches / num_processes < took_s < 25 * busy_s * case.microbatches


def test_a_comparison_alternates_and_divides_their_time_by_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    seconds = iter([2.0, 1.0, 3.0, 2.0, 2.0, 5.0])

    def fake(work: Callable[[], object]) -> workers.Taken:
        work()
        taken = next(seconds)
        return workers.Taken(taken, taken + 2)

    monkeypatch.setattr("tests.bench.processes.comparison.together", fake)
    found = compare("both", lambda: calls.append("ours"), lambda: calls.append("theirs"), 1.0, 3)
    assert calls == ["ours", "theirs", "ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert found.speeds == found.ratio.values == (0.5, 1.5, 2.5)
    assert (found.ours_s, found.theirs_s, found.ratio.verdict) == (2.0, 3.0, "met")
    assert found.work == 1.25  # of 3/4, 5/4, 7/4


PEAK = """
from tests.bench.processes import memory

many = 50_000_000

def make():
    assert len(b"x" * 3 * many)  # for a moment only
    kept = b"x" * many
    return lambda: len(kept + b"x")

print(memory.peak_bytes(make) / many)
"""


@pytest.mark.slow
@pytest.mark.skipif(not memory.can_measure(), reason="needs Linux's /proc/self/clear_refs")
def test_peak_memory_is_the_work_s() -> None:
    """In a new process, as the bench measures: this one may reuse memory that it has freed."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert 1.9 < float(done.stdout) < 2.5


def point(predicted: float, measured: float, mode: str = "pipedream") -> Point:
    return Point(Case(mode, (1,), (1, 1)), (predicted,), (measured,))


def test_agreement() -> None:
    points = [point(100, 100), point(220, 200), point(150, 160), point(98, 101)]
    fit = figure15.agreement(points)
    predicted, measured = [100, 220, 150, 98], [100, 200, 160, 101]
    assert fit.correlation == pytest.approx(statistics.correlation(predicted, measured))
    assert fit.largest_error == pytest.approx(0.1)
    assert fit.mean_error == pytest.approx((0 + 0.1 + 10 / 160 + 3 / 101) / 4)
    assert (fit.pairs, fit.wrong_pairs) == (5, 0)  # 100 and 101 are too close to have an order
    assert figure15.agreement([*points, point(90, 300)]).wrong_pairs == 4


def test_a_case_s_error_is_its_median_round_s() -> None:
    """The machine is twice as slow in the second round, as is its prediction, so there is no error."""
    found = Point(Case("dp", (), (2,)), (110.0, 50.0, 104.0), (100.0, 50.0, 100.0))
    assert found.errors == pytest.approx((0.1, 0, 0.04))
    assert (found.error, found.predicted_samples_per_s, found.measured_samples_per_s) == pytest.approx((0.04, 104, 100))
    assert figure15.by_mode([found, point(1, 2)]) == {"dp": [found.error], "pipedream": [-0.5]}


def test_the_picture_is_written(tmp_path: Path) -> None:
    points = [point(100.0 + k, 105.0, mode) for k, mode in enumerate(("gpipe", "dp", "other"))]
    points.append(Point(Case("dp", (), (2,)), (50.0,), (60.0,)))
    figure15.draw(points, "three cases", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_profiles_of_processes_are_averaged(given: Given) -> None:
    profile = given.profile
    text = write_profile(profile).replace('"forward_s": 1.0', '"forward_s": 2.0')
    mean = mean_profile([profile, read_profile(text)])
    assert {row.forward_s for row in mean.layers[16][:-1]} == {1.5}
    assert [row.backward_s for row in mean.layers[16]] == [row.backward_s for row in profile.layers[16]]
    assert cut_at(mean, 16, 0.25) == pytest.approx(len(profile.layers[16]) / 4, abs=1)
