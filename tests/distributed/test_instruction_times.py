"""Times by the host's clock and by that of an emulated GPU."""

import itertools
from typing import Any

import pytest
import torch

from pipebench.distributed.instruction_times import _READ_EVERY, DeviceTimer, HostTimer
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import Op
from pipebench.simulate.simulation import TimelineEvent


class Gpu:
    """A stream that takes 2 s per operation, and a host that takes none."""

    def __init__(self) -> None:
        self.end_s = 100.0
        self.synchronised = 0


GPU = Gpu()


class Mark:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_s = GPU.end_s

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "Mark") -> float:
        return float(torch.tensor(1e3 * (other.at_s - self.at_s), dtype=torch.float32))  # as CUDA has it


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    GPU.__init__()  # type: ignore[misc]
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: setattr(GPU, "synchronised", GPU.synchronised + 1))
    return GPU


def work() -> None:
    GPU.end_s += 2


def test_a_gpu_s_work_is_timed_by_its_own_events_and_reported_later(gpu: Gpu) -> None:
    found: list[TimelineEvent] = []
    timer = DeviceTimer(3, lambda: 7.0, found.append)
    instructions = [Instruction(Op.FORWARD, 0, unit) for unit in range(3)]
    for instruction in instructions:
        timer.timed(instruction, work)
    assert found == []
    timer.sync_clock()
    assert gpu.synchronised == 1
    assert found == [TimelineEvent(7 + 2 * i, 9 + 2 * i, 3, each) for i, each in enumerate(instructions)]


def test_many_times_are_reported_before_the_drain(gpu: Gpu) -> None:
    found: list[TimelineEvent] = []
    timer = DeviceTimer(0, lambda: 0.0, found.append)
    for unit in range(_READ_EVERY):
        timer.timed(Instruction(Op.FORWARD, 0, unit), work)
    assert _READ_EVERY // 2 < len(found) < _READ_EVERY
    timer.sync_clock()
    assert [event.instruction.number for event in found] == list(range(_READ_EVERY))


def test_the_host_s_clock() -> None:
    times: Any = iter([1.0, 4.0])
    found: list[TimelineEvent] = []
    HostTimer(1, lambda: next(times), found.append).timed(Instruction(Op.UPDATE, 0, 0), lambda: None)
    assert found == [TimelineEvent(1.0, 4.0, 1, Instruction(Op.UPDATE, 0, 0))]


def test_short_work_keeps_its_time_hours_after_the_last_drain(gpu: Gpu) -> None:
    """0.1.0: both ends were compared with the drain, and float32 doesn't resolve 30 us after 10 minutes."""
    found: list[TimelineEvent] = []
    timer = DeviceTimer(0, lambda: 5.0, found.append)

    def wait() -> None:
        gpu.end_s += 10_000

    def short() -> None:
        gpu.end_s += 20e-6

    for unit in range(3):
        timer.timed(Instruction(Op.RECEIVE_ACTIVATION, 0, unit), wait)
        timer.timed(Instruction(Op.FORWARD, 0, unit), short)
    timer.sync_clock()
    seconds = [event.end_s - event.start_s for event in found]
    assert seconds[1::2] == pytest.approx([20e-6] * 3, rel=1e-3)
    assert found[-1].end_s == pytest.approx(30_005, rel=1e-6)
    assert all(one.end_s <= other.start_s for one, other in itertools.pairwise(found))
