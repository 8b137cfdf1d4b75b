"""A host stays two instructions ahead of its GPU, which is emulated."""

from typing import Any

import pytest
import torch

from pipebench.distributed.instruction_times import Pace


class Gpu:
    """Records the events that a host puts on its stream, and those it waits for."""

    def __init__(self) -> None:
        self.marks: list[int] = []
        self.waits: list[int] = []

    def event(self, blocking: bool) -> "Mark":
        assert blocking  # a host that spins takes the core of another
        return Mark(self)


class Mark:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def record(self, stream: Any) -> None:
        self._number = len(self._gpu.marks)
        self._gpu.marks.append(self._number)

    def synchronize(self) -> None:
        self._gpu.waits.append(self._number)


def test_the_host_waits_for_the_instruction_two_before(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    pace = Pace(torch.device("cuda", 0))
    ahead = []
    for _ in range(6):
        pace.step()
        ahead.append(len(gpu.marks) - len(gpu.waits))
    assert gpu.waits == [0, 1, 2, 3]
    assert ahead == [1, 2, 2, 2, 2, 2]


def test_a_cpu_has_nothing_to_wait_for() -> None:
    pace = Pace(torch.device("cpu"))
    for _ in range(3):
        pace.step()
    assert not pace._ends
