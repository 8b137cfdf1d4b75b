"""Workers that share a GPU are measured in turns and predicted as users of one queue; stand-ins take its place."""

import itertools
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pipebench.distributed import host
from pipebench.distributed.host import in_situ
from pipebench.distributed.world import World
from pipebench.engine.in_situ import profile_in_situ
from pipebench.engine.setup import Setup
from pipebench.errors import OutOfMemoryError
from pipebench.profile.model import Profile
from pipebench.run import measuring
from pipebench.run.measuring import Together
from pipebench.simulate.costs import HostCosts, SharedProcessors
from tests.distributed.test_cores import gpu
from tests.run.test_measuring import loaded
from tests.support import Blobs, Mlp, make_setup


class TwoRanks:
    """A world of two ranks of which the other answers as this one; it records when it waits."""

    size = 2
    device = torch.device("cuda", 0)

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpus: tuple[int, int], rank: int) -> None:
        self.rank = rank
        self.happened: list[str] = []
        self._shares = [gpu(number) for number in gpus]
        monkeypatch.setattr(host, "processor_shares", lambda device: "shares")
        monkeypatch.setattr(measuring, "processor_shares", lambda device: "shares")
        monkeypatch.setattr(measuring, "local_device_name", str)

        def measured(setup: Any, agree: Any) -> Any:
            self.happened.append("measures")
            return profile_in_situ(setup, agree, itertools.count().__next__)

        monkeypatch.setattr(measuring, "in_situ", partial(in_situ, measure=measured))

    def exchange(self, value: Any) -> list[Any]:
        return self._shares if value == "shares" else [value, value]

    def barrier(self) -> None:
        self.happened.append("waits")


@dataclass(frozen=True)
class Prepared:
    """The part of a job that is used."""

    setup: Setup
    recipe: Any

    @property
    def profile(self) -> Profile:
        return self.setup.profile


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    monkeypatch.setenv("PIPEBENCH_CACHE", str(tmp_path))
    return Prepared(make_setup(Mlp(), ([2], [1, 1]), dataset=Blobs()), SimpleNamespace(name="shared"))


def in_use(job: Prepared, world: TwoRanks) -> Setup:
    found: Any = Together(loaded(), cast("World", world)).in_use(cast("Any", job))
    return found.setup


@pytest.mark.parametrize(("rank", "expected"), [(0, "waits measures waits waits"), (1, "waits waits measures waits")])
def test_ranks_on_one_gpu_measure_one_after_the_other(
    rank: int, expected: str, job: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = TwoRanks(monkeypatch, (0, 0), rank)
    setup = in_use(job, world)
    assert world.happened == expected.split()
    assert setup.costs.host == HostCosts(shared=SharedProcessors(1.0, 1, (0, 0)))
    # Every forward, backward and update takes a second by this clock.
    assert [stage.forward_s[4] for stage in setup.costs.stages] == pytest.approx([1, 1])
    assert [stage.update_s for stage in setup.costs.stages] == pytest.approx([1, 1])


def test_ranks_with_separate_gpus_take_the_times_of_their_layers(
    job: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = TwoRanks(monkeypatch, (0, 1), 0)
    assert in_use(job, world) is job.setup
    assert not world.happened


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, OutOfMemoryError])
def test_a_stage_too_large_for_the_gpu_does_not_block_other_ranks(
    error: type[Exception], job: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too large while stages are cut, by torch's error, or when their instructions run, by a worker's."""
    world = TwoRanks(monkeypatch, (0, 0), 0)

    def fail(*args: Any) -> Any:
        raise error("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(measuring, "in_situ", partial(in_situ, measure=fail))
    setup = in_use(job, world)
    assert world.happened == ["waits"] * 3  # nobody waits for the rank that failed
    assert setup.profile is job.profile
    assert setup.costs.stages == job.setup.costs.stages
    assert setup.costs.host.shared == SharedProcessors(1.0, 1, (0, 0))
