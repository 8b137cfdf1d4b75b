"""Compares random recipes in persistent processes with the virtual engine: whole runs, and runs that resume.

Both engines are pipebench's, so recipes can have features that the plain loop lacks: sharding, ordered sums, 16 bits,
layers that move or that vPipe chooses a policy for, loader processes, compiled stages, tensor slices.
"""

import multiprocessing
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pipebench.checkpoint.store import Checkpoints
from pipebench.distributed.engine import DistributedEngine
from pipebench.distributed.slices import ProcessSlices
from pipebench.distributed.world import World
from pipebench.engine.engine import OnLoss, OnUnit, TrainingEngine
from pipebench.model.device import torch_settings
from pipebench.run.deciding import decision_of
from pipebench.schedule.modes import MODES
from pipebench.show.progress import Silent
from pipebench.train.checkpointing import CheckpointPolicy, resume_point
from pipebench.train.engines import on_virtual_clock
from pipebench.train.interfaces import MakeEngine
from pipebench.train.job import Job
from pipebench.train.loop import TrainingLoop
from pipebench.train.result import DIVERGED
from tests.distributed.cases import whole
from tests.processes import Processes
from tests.random_recipes.compare import IN_PROCESSES, RefusedError, prepared, written
from tests.random_recipes.drawing import draw_recipe
from tests.random_recipes.nets import first_layers
from tests.random_recipes.push_orders import num_workers
from tests.random_recipes.tally import Tally
from tests.unwatched import unwatched

_SHARDED = ("optimizer", "optimizer", "gradients", "parameters")  # values of `parallelism.shard`, as often as drawn
_OVERFLOWING = {"initial": 2.0**24, "growth": 4.0, "backoff": 0.25, "growth_interval": 2}  # updates are skipped often
# Tolerances: a ring adds more than two summands in another order, and scores of processes are sums in another order.
_OF_SUMS = {"float64": 1e-7, "float32": 1e-2}
_OF_SCORES = {"float64": 1e-9, "float32": 1e-5}


@dataclass(frozen=True)
class Whole:
    """The result of a run, of the workers of one process."""

    tensors: dict[int, list[dict[str, torch.Tensor]]]  # of every replica, by worker
    points: list[tuple[int, dict[str, float]]]  # samples seen and metrics of every evaluation
    outcome: str  # of the run
    num_bytes: dict[tuple[str, str], int]  # sent by the workers, by kind and level
    versions: dict[int, int]  # most weight versions at once, by worker
    cuts: dict[str, int]  # of one slice of a worker: in which dimension its tensors are parts of whole ones


def draw_more(seed: int, number: int) -> dict[str, Any]:
    """Return the random recipe of `draw_recipe` with more features."""
    recipe, draw = draw_recipe(seed, number), random.Random(f"more {number} of {seed}")
    made, train = recipe["parallelism"], recipe["train"]
    if draw.random() < 0.35:
        made["shard"] = draw.choice(_SHARDED)
    if draw.random() < 0.5 and ("shard" in made or made["mode"] in ("zero1", "zero2", "fsdp")):
        made["chunks"] = draw.randint(1, 3)
    if draw.random() < 0.3 and "parameters" in (made.get("shard"), "parameters" if made["mode"] == "fsdp" else ""):
        made["reshard_after_forward"] = draw.random() < 0.5
    if draw.random() < 0.4:
        made["sums"] = draw.choice(("ordered", "ordered", "ring"))
    if draw.random() < 0.25:
        recipe["model"]["dtype"], train["precision"] = "float32", draw.choice(("bf16", "fp16"))
    if train.get("precision") == "fp16" and draw.random() < 0.7:
        train["loss_scale"] = dict(_OVERFLOWING)
    if draw.random() < 0.06:
        recipe["dataset"]["loader_processes"] = draw.choice((1, 2, 3))
    if draw.random() < 0.04:
        recipe["engine"] = {"compile": True}
    if draw.random() < 0.1:
        recipe.setdefault("engine", {})["channels_last"] = True
    names, count = [*first_layers(recipe["model"]["steps"]), "head"], made.get("plan", "").count("-")
    if count and not MODES[made["mode"]].chunks > 1 and draw.random() < 0.2:
        for key in ("recompute", "recompute_layers", "swap_layers", "backward"):
            made.pop(key, None)
        recipe["cluster"]["memory"] = draw.choice(("4 kB", "6 kB", "8 kB", "12 kB", "16 kB", "24 kB", "1 MB"))
        # Without repartition, which depends on measured times.
        made["vpipe"] = {"swap": draw.random() < 0.6, "recompute": draw.random() < 0.6, "repartition": False}
    elif 0 < count < len(names) and draw.random() < 0.25:
        at, moves = 0, []
        for _ in range(draw.randint(1, 3)):
            at += draw.randint(1, 7)
            cuts = [names[index] for index in sorted(draw.sample(range(1, len(names)), count))]
            moves.append({"at": {"minibatches": at}, "cuts": cuts})
        made["vpipe"] = {"swap": False, "recompute": False, "live": draw.random() < 0.6, "moves": moves}
    elif draw.random() < 0.25:
        made["tensor"] = draw.choice((2, 2, 3))
        recipe["model"]["steps"] += ["linear", draw.choice(("relu", "dropout 0.3")), "linear"]  # to be divided
        recipe["cluster"] = {"name": "cluster-b", "servers": num_workers(recipe), "count": made["tensor"]}
    return recipe


def disagreements(processes: Processes, path: Path, draw: random.Random) -> Iterator[str]:
    """Run a recipe in processes and on the virtual clock, then both from a checkpoint on; yield what differs.

    Not for asynchronous pushes, whose order differs from run to run.

    Args:
        processes: as many as the recipe has workers.
        path: the recipe's file, in a folder of its own.
        draw: decides whether processes share memory, and which checkpoint is resumed.

    Raises:
        RefusedError: there is nothing to compare.
    """
    folders = [str(path.parent / name) for name in ("virtual", "processes")]
    job, expected = virtually(path, folders[0])
    size = job.setup.pipeline.num_workers * job.recipe.parallelism.tensor
    if size != len(processes):
        raise RefusedError(f"the plan is for {size} processes")
    if expected.outcome == DIVERGED:
        raise RefusedError("diverges")
    asked = "tests.random_recipes.worlds:in_process"
    yield from compared(processes.run(asked, str(path), folders[1], None, draw.random() < 0.7), expected, job)
    steps = Checkpoints(Path(folders[1])).steps()
    if len(steps) > 1:
        step = draw.choice(sorted(steps)[:-1])
        again = processes.run(asked, str(path), folders[1], step, True)
        for each in compared(again, expected, job, counts=False):
            yield f"gone on from {step} in processes: {each}"
        if step in Checkpoints(Path(folders[0])).steps():
            for each in compared([virtually(path, folders[0], step)[1]], expected, job, counts=False):
                yield f"gone on from {step} on the virtual clock: {each}"


def virtually(path: Path, folder: str, step: int | None = None) -> tuple[Job, Whole]:
    """Run a recipe on the virtual clock: with checkpoints in a folder or, given a `step`, from the one of that step."""
    _, job = prepared(path, IN_PROCESSES)
    job = replace(job, recipe=replace(job.recipe, engine=replace(job.recipe.engine, kind="virtual")))
    return job, _run(job, on_virtual_clock(job), folder, step)


def in_process(world: World, path: str, folder: str, step: int | None, shares_memory: bool) -> Whole:
    """Do this process's part of a run; see `virtually`."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # it may have loaders
    world = replace(world, shares_memory=shares_memory)
    _, job = prepared(Path(path), IN_PROCESSES)
    if (slices := int(job.recipe.parallelism.tensor)) > 1:
        group = ProcessSlices(slices, world.rank % slices)
        _, job = prepared(Path(path), IN_PROCESSES, decision=decision_of(job), group=group)
    job = replace(job, setup=replace(job.setup, device=world.device))

    def make(on_loss: OnLoss, on_unit: OnUnit) -> DistributedEngine:
        return DistributedEngine(job.setup, world, unwatched(job.setup), on_loss=on_loss, on_unit=on_unit)

    return _run(job, make, folder, step)


def _run(job: Job, make: MakeEngine, folder: str, step: int | None) -> Whole:
    made: list[TrainingEngine] = []

    def making(on_loss: OnLoss, on_unit: OnUnit) -> TrainingEngine:
        made.append(make(on_loss, on_unit))
        return made[0]

    store = Checkpoints(Path(folder))
    policy = CheckpointPolicy(store) if step is None else CheckpointPolicy(None, resume_point(store.at(step), job))
    with torch_settings(job.recipe.engine):
        result, _ = TrainingLoop(job, making, Silent(), lambda point: None, policy).run()
        engine: Any = made[0]
        sent, cuts = {(kind, level): count for kind, level, count in engine.facts()["num_bytes"]}, dict[str, int]()
        whole(engine)
        tensors = {
            worker.index: [
                {name: tensor.detach().clone() for name, tensor in replica.tensors().items()}
                for replica in worker.replicas.values()
            ]
            for worker in engine.workers
        }
        versions = {worker.index: worker.versions_max for worker in engine.workers}
        points = [(point.samples, dict(point.metrics)) for point in result.points]
        if isinstance(engine, DistributedEngine):
            if (slices := job.setup.graph.slices) is not None:
                cuts = {name: cut.dimension for name, cut in slices.cuts.items()}
                sent = sent if engine.world.slice_index == 0 else {}  # the first process has counted for all
            engine.close()
        return Whole(tensors, points, result.outcome, sent, versions, cuts)


def compared(found: Sequence[Whole], expected: Whole, job: Job, *, counts: bool = True) -> Iterator[str]:
    """Yield what differs between processes and the virtual engine; with `counts`, also in bytes and versions."""
    dtype, row, pipeline = job.recipe.model["dtype"], job.recipe.parallelism.row, job.setup.pipeline
    most = max(len(pipeline.members(group)) for group in range(pipeline.num_stages + len(pipeline.ties)))
    compiles = job.recipe.engine.compile  # its kernels depend on the sizes that a process has seen before
    inexact = compiles or job.recipe.parallelism.tensor > 1  # kernels round a slice's numbers differently
    of_buffers = 0.0 if not inexact and (most <= 2 or row.sums == "ordered") else _OF_SUMS[dtype]
    of_weights = 0.0 if not inexact and row.sync.startswith("parameter-server") else of_buffers
    for worker, theirs in expected.tensors.items():
        holders = [each for each in found if worker in each.tensors]
        for replica, others in enumerate(theirs):
            parts = [each.tensors[worker][replica] for each in holders]
            cuts = holders[0].cuts
            mine = {
                name: torch.cat([part[name] for part in parts], cuts[name]) if name in cuts else tensor
                for name, tensor in parts[0].items()
            }
            if mine.keys() != others.keys():
                yield f"worker {worker}: holds {mine.keys() ^ others.keys()} or doesn't"
            for name in mine.keys() & others.keys():
                tolerance = of_buffers if "running_" in name else of_weights
                if not torch.allclose(mine[name], others[name], rtol=tolerance, atol=tolerance, equal_nan=True):
                    yield f"worker {worker}: {name} differs by {float((mine[name] - others[name]).abs().max()):.3g}"
    for each in found:
        if (each.outcome, len(each.points)) != (expected.outcome, len(expected.points)):
            yield f"{each.outcome} after {len(each.points)} evaluations, not {expected.outcome}"
        for (samples, scores), (at, wanted) in zip(each.points, expected.points, strict=False):
            limit = max(of_buffers, _OF_SCORES[dtype])
            if samples != at or not all(_is_near(scores[name], wanted[name], limit) for name in wanted):
                yield f"after {samples} samples {scores}, expected after {at} {wanted}"
    if counts:
        # The simulator cuts a sum into 4-byte elements, so with others its links may differ by an element.
        by_link = dtype == "float32" and job.recipe.train.precision == "fp32"
        sent = _counted([each.num_bytes for each in found], by_link=by_link)
        due = _counted([expected.num_bytes], by_link=by_link)
        versions = {worker: count for each in found for worker, count in each.versions.items()}
        if sent != due:
            yield f"bytes {dict(sent)}, expected {dict(due)}"
        if versions != expected.versions:
            yield f"versions {versions}, expected {expected.versions}"


def _counted(counts: Iterable[Mapping[tuple[str, str], int]], *, by_link: bool) -> Counter[tuple[str, ...]]:
    """Return the bytes of all processes by kind and, with `by_link`, by level."""
    found = Counter[tuple[str, ...]]()
    for counted in counts:
        for (kind, level), num_bytes in counted.items():
            found[(kind, level) if by_link else (kind,)] += num_bytes
    return found


def _is_near(found: float, wanted: float, limit: float) -> bool:
    return abs(found - wanted) <= limit * max(1.0, abs(wanted)) or (found != found and wanted != wanted)


class Worlds(Tally):
    """Compares random recipes in two to four processes, which are started when needed and again after a failure."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._worlds: dict[int, tuple[ExitStack, Processes]] = {}  # by number of processes

    def run(self, count: int, sizes: Sequence[int] = (2, 3, 4), first: int = 0) -> None:
        """Compare recipes until there are `count`, or far too many were refused.

        Args:
            count: number of recipes to compare.
            sizes: numbers of workers that recipes may have.
            first: number of the first recipe that is drawn.
        """
        number = first
        while self.num_compared < count and number < first + 40 * count + 20:
            recipe, number, before = draw_more(self.seed, number), number + 1, self.num_compared
            if num_workers(recipe) in sizes and recipe["parallelism"]["mode"] != "dp-asp":
                self.compare(recipe, number)
            if self.num_compared > before and self.num_compared % 10 == 0:
                print(f"{self.num_compared} of {count} compared, the last drawn is number {number - 1}", flush=True)

    def compare(self, recipe: dict[str, Any], number: int) -> None:
        """Compare a recipe; `number` seeds the choices of `disagreements`."""
        folder = Path(tempfile.mkdtemp(prefix="pipebench-worlds-"))
        try:
            path, size = written(recipe, folder), num_workers(recipe)
            found = list(disagreements(self._processes(size), path, random.Random(number)))
        except RefusedError as error:
            self.refuse(error)
            return
        except Exception as error:  # a finding like others, after which other recipes can still be compared
            found = [f"{type(error).__name__}: {error}"]
            self._end(size)
        finally:
            shutil.rmtree(folder)
        if found:
            self.fail("\n".join([f"{recipe['name']}:", *found[:6], repr(recipe)]))
        else:
            self.agreed[recipe["parallelism"]["mode"]] += 1

    def _processes(self, size: int) -> Processes:
        if size not in self._worlds:
            stack = ExitStack()
            self._worlds[size] = stack, stack.enter_context(Processes(size))
        return self._worlds[size][1]

    def _end(self, size: int) -> None:
        """Kill processes of which one has failed."""
        if size in self._worlds:
            self._worlds.pop(size)[1].kill()

    def close(self) -> None:
        for stack, _ in self._worlds.values():
            stack.close()
