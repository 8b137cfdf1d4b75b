"""A process that connects to a worker without the run's secret is detected before anything is sent."""

import dataclasses
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined] # torch lists it nowhere

from pipebench.distributed import world as worlds
from pipebench.distributed.members import StrangerError, shared_secret
from pipebench.distributed.world import World
from tests.processes import Processes

HERE = "tests.distributed.test_members"


def sums_in_a_group(world: World, secret: str) -> Any:
    """Make a group whose members must prove that they know the secret; return a sum over it, or the error."""
    proving = dataclasses.replace(world, secret=secret.encode())
    try:
        group = proving.new_group("gloo")
    except StrangerError as error:
        return str(error)
    total = torch.ones(1) * (world.rank + 1)
    dist.all_reduce(total, group=group)
    return total.item()


def sums_secretly(world: World) -> Any:
    return sums_in_a_group(world, shared_secret(world.store, world.rank).decode())


def sums_with_a_stranger(world: World) -> Any:
    return sums_in_a_group(world, "guessed" if world.rank == world.size - 1 else "known")


def groups_by_a_file(world: World) -> Any:
    """Sum over a group that the store makes which NCCL's groups are made by."""
    place = dataclasses.replace(world.place, connection=0)
    store = worlds._group_store(dataclasses.replace(world, direct=True, place=place))
    group: Any = dist.ProcessGroupGloo(store, world.rank, world.size)
    total = torch.ones(1) * (world.rank + 1)
    group.allreduce([total]).wait()
    return total.item()


def test_members_that_share_the_secret_form_a_group(three: Processes) -> None:
    assert three.run(f"{HERE}:sums_secretly") == [6.0] * 3


def test_a_stranger_is_detected_by_all_members_it_connects_to(three: Processes) -> None:
    found = three.run(f"{HERE}:sums_with_a_stranger")
    assert all(
        said.startswith("a process that isn't of this run has connected in place of worker 2") for said in found[:2]
    )
    assert "in place of worker 0" in found[2]


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's files in memory, as NCCL needs Linux")
def test_groups_are_made_by_an_unnamed_file(two: Processes) -> None:
    assert two.run(f"{HERE}:groups_by_a_file") == [3.0] * 2


def test_every_attempt_has_a_new_secret() -> None:
    stores = HashStore(), HashStore()
    ours, theirs = (shared_secret(store, 0) for store in stores)
    assert ours != theirs
    assert [shared_secret(store, 1) for store in stores] == [ours, theirs]
