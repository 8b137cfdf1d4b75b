"""Times by the host's clock and by a GPU's, the GPU made up."""

from typing import Any

import pytest
import torch

from pipebench.engine.watch import _READ_EVERY, DeviceWatch, HostWatch
from pipebench.schedule.instructions import Instruction, Op
from pipebench.simulate import Event


class Gpu:
    """A stream that takes 2 s for every piece of work, and a host that takes none."""

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
        return 1e3 * (other.at_s - self.at_s)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    GPU.__init__()  # type: ignore[misc]
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: setattr(GPU, "synchronised", GPU.synchronised + 1))
    return GPU


def work() -> float:
    GPU.end_s += 2
    return 0.5


def test_a_gpu_s_work_is_timed_by_its_own_events_and_reported_later(gpu: Gpu) -> None:
    found: list[Event] = []
    watch = DeviceWatch(3, lambda: 7.0, found.append)
    instructions = [Instruction(Op.FORWARD, unit) for unit in range(3)]
    for instruction in instructions:
        watch.timed(instruction, work)
    assert found == []
    watch.settle()
    assert gpu.synchronised == 1
    assert found == [Event(7 + 2 * i, 9 + 2 * i, 3, each, 0.5) for i, each in enumerate(instructions)]


def test_many_are_reported_on_the_way(gpu: Gpu) -> None:
    found: list[Event] = []
    watch = DeviceWatch(0, lambda: 0.0, found.append)
    for unit in range(_READ_EVERY + 5):
        watch.timed(Instruction(Op.FORWARD, unit), work)
    assert len(found) == _READ_EVERY
    watch.settle()
    assert [event.instruction.number for event in found] == list(range(_READ_EVERY + 5))


def test_the_host_s_clock() -> None:
    times: Any = iter([1.0, 4.0])
    found: list[Event] = []
    HostWatch(1, lambda: next(times), found.append).timed(Instruction(Op.UPDATE, 0), lambda: 0.25)
    assert found == [Event(1.0, 4.0, 1, Instruction(Op.UPDATE, 0), 0.25)]
