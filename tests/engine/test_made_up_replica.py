"""A kind of replica defined by this test, which has the mean of all versions of its weights (Polyak averaging).

It needs a class in place of `Replica`, one in place of `ReplicaMemory`, and an entry in the table of hooks. No file of
the core is changed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipebench.engine.replica import LiveBytes, Replica
from pipebench.engine.setup import Setup
from pipebench.hooks import EXTENSIONS
from pipebench.schedule.pipeline import Pipeline
from pipebench.simulate.kinds import MOVED
from pipebench.simulate.memory import StageMemoryCosts, stage_memories
from pipebench.simulate.memory_meter import MemoryExtension, MemoryMeter
from pipebench.simulate.meter import Meter
from pipebench.simulate.replica_memory import Change, ReplicaMemory
from pipebench.simulate.steady import simulate_segment
from tests.checkpoint.support import captured
from tests.checkpoint.test_round_trips import bits
from tests.support import Mlp, make_engine, make_setup


class MeanReplica(Replica):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mean = [each.detach().clone() for each in self.weights.newest.parameters]

    def update(self, gradients: Sequence[torch.Tensor | None], lr: float, *, keep_from: int) -> None:
        super().update(gradients, lr, keep_from=keep_from)
        newest = self.weights.newest
        for mean, parameter in zip(self.mean, newest.parameters, strict=True):
            mean.lerp_(parameter.detach(), 1 / (newest.number + 1))

    def live_by_kind(self) -> LiveBytes:
        live = super().live_by_kind()
        return live._replace(moved=live.moved + sum(each.nbytes for each in self.mean))


class MeanReplicaMemory(ReplicaMemory):
    def before(self) -> Iterator[Change]:
        yield from super().before()
        yield Change(MOVED, self._memory.weights, False)


class MeanMemory(MemoryExtension):
    def __init__(self, pipeline: Pipeline, memories: Sequence[StageMemoryCosts]) -> None:
        self.memories = memories

    def replica(self, worker: int, stage: int) -> ReplicaMemory:
        return MeanReplicaMemory(self.memories[stage])


@pytest.fixture(autouse=True)
def _made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = {"replica": f"{__name__}:MeanReplica", "memory": f"{__name__}:MeanMemory"}
    monkeypatch.setitem(EXTENSIONS, "mean", hooks)


def with_means(setup: Setup) -> Setup:
    return replace(setup, pipeline=replace(setup.pipeline, extensions={"mean": None}))


def predicted_peaks(setup: Setup) -> list[int]:
    meter = MemoryMeter(setup.pipeline, stage_memories(setup.profile, setup.plan, setup.pipeline), setup.costs)
    simulate_segment(setup, 12, Meter(setup.pipeline, meter))
    return [peak.num_bytes for peak in meter.timeline().peaks]


def test_a_run_has_means_and_trains_as_without() -> None:
    setup = make_setup(Mlp(), ([2, 4], [1, 2, 1]))
    engine, plain = make_engine(with_means(setup)), make_engine(setup)
    seen = [[each.detach().clone() for each in plain.workers[0].replicas[0].weights.newest.parameters]]
    for first in range(12):
        engine.train(first, 1)
        plain.train(first, 1)
        seen.append([each.detach().clone() for each in plain.workers[0].replicas[0].weights.newest.parameters])
    assert bits(captured(engine)) == bits(captured(plain))
    replica = engine.workers[0].replicas[0]
    assert isinstance(replica, MeanReplica)
    for mean, *versions in zip(replica.mean, *seen, strict=True):
        torch.testing.assert_close(mean, torch.stack(versions).mean(0))


def test_means_count_in_measured_and_predicted_memory() -> None:
    setup = make_setup(Mlp(), ([2, 4], [1, 1, 1]))
    peaks = []
    for each in (setup, with_means(setup)):
        engine = make_engine(each)
        engine.train(0, 12)
        peaks.append((engine.peak_bytes, predicted_peaks(each)))
    (ran, predicted), (more, predicted_more) = peaks
    kept = [memory.weights for memory in stage_memories(setup.profile, setup.plan, setup.pipeline)]
    assert [b - a for a, b in zip(ran, more, strict=True)] == kept
    assert [b - a for a, b in zip(predicted, predicted_more, strict=True)] == kept
