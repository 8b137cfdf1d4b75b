"""What runs in the processes of the tests of tensor slices."""

from typing import Any

import torch

from pipebench.distributed.engine import DistributedEngine
from pipebench.distributed.slices import ProcessSlices
from pipebench.distributed.world import World
from pipebench.recipe.load import load_mapping
from pipebench.train.job import Job
from pipebench.train.prepare import prepare


def job_of(given: dict[str, Any], world: World | None = None) -> Job:
    (loaded,) = load_mapping(given)
    size = given["parallelism"]["tensor"]
    group = None if world is None or size == 1 else ProcessSlices(size, world.rank % size)
    return prepare(loaded.recipe, loaded.cluster, group=group)


def trained(world: World, given: dict[str, Any], segments: tuple[int, ...] = (3, 2)) -> dict[str, Any]:
    engine = DistributedEngine(job_of(given, world).setup, world)
    engine.start_clock()
    done, scores = 0, []
    for count in segments:
        done += engine.train(done, count)
    parts = [(name, state.to_plain()) for name, state in engine.parts()]
    facts = engine.facts()
    engine.close()
    return {"scores": scores, "facts": facts, "parts": parts}
