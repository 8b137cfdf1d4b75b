"""Runs a recipe with an engine and with the plain loop of `tests.oracles.per_minibatch`, and compares the results."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from pipebench.checkpoint.share import own_names
from pipebench.checkpoint.state import ModelState
from pipebench.engine.engine import OnLoss, OnUnit, TrainingEngine
from pipebench.engine.setup import Setup
from pipebench.errors import UserError
from pipebench.extensions.asynchronous.pushes import FILE_NAME
from pipebench.model.device import torch_settings
from pipebench.planner.planner import Planner
from pipebench.recipe.load import LoadedRecipe, load_file
from pipebench.recipe.schema import Recipe
from pipebench.run.deciding import prepare_job
from pipebench.run.folder import find
from pipebench.show.progress import Silent
from pipebench.simulate.network import Network
from pipebench.simulate.statistics import average_statistics
from pipebench.simulate.steady import simulate_all, simulate_segment
from pipebench.train.engines import on_virtual_clock
from pipebench.train.job import Job
from pipebench.train.loop import TrainingLoop
from pipebench.train.metrics import byte_metrics
from pipebench.train.periods import Periods
from pipebench.train.request import plan_request
from pipebench.train.result import DIVERGED
from tests.oracles.draws import mixed, of_name
from tests.oracles.per_minibatch import Loop, Outcome
from tests.random_recipes.meaning import meaning_of
from tests.random_recipes.nets import Rows, net
from tests.random_recipes.push_orders import push_order

# Largest difference, relative to the largest number of a tensor. Engine and loop add in different orders: in float64,
# after tens of updates, that makes about 1e-12, and a wrong formula 1e-5 and more. float32 has 24 bits instead of 53.
TOLERANCES = {"float64": 1e-9, "float32": 2e-3}
IN_PROCESSES = ("engine.kind=distributed", "engine.threads=1")
_SHARING = ("tied", "twice")  # steps that use the weight of another step
LARGEST = 1e4  # of weights: if training diverges beyond, so do rounding errors


class RefusedError(Exception):
    """There is nothing to compare: pipebench refuses the recipe, or training diverges."""


class Ran(NamedTuple):
    """The result of a run by an engine."""

    points: list[tuple[int, Mapping[str, float]]]  # samples seen and metrics of every evaluation
    pushes: list[list[int]]  # of asynchronous runs, the order of pushes of every segment
    tensors: dict[str, torch.Tensor]  # parameters and buffers at the end
    fetched: dict[int, list[int]] | None  # samples by the draw of their minibatch; None in processes
    metrics: Mapping[str, float] | None = None  # of a run on the virtual clock; None on the wall clock


def written(recipe: Mapping[str, Any], folder: Path) -> Path:
    """Write a recipe into a folder, with the order of pushes that it names, and return the recipe's file."""
    folder.mkdir(parents=True, exist_ok=True)
    if "push_order" in recipe["parallelism"]:
        (folder / FILE_NAME).write_text(json.dumps(push_order(recipe)))
    path = folder / "recipe.yaml"
    path.write_text(text_of(recipe))
    return path


def text_of(recipe: Mapping[str, Any]) -> str:
    return "# a random recipe\n" + yaml.safe_dump(dict(recipe), sort_keys=False, default_flow_style=None, width=110)


def disagreements(path: Path, *, in_processes: bool = False) -> list[str]:
    """Run a recipe by an engine and by the plain loop; return the differences, those of samples first.

    Args:
        path: the recipe's file.
        in_processes: use the distributed engine instead of the virtual one.

    Raises:
        RefusedError: there is nothing to compare.
    """
    loaded, job = prepared(path, IN_PROCESSES if in_processes else ())
    ran = run_in_processes(path) if in_processes else run_virtual(loaded, job)
    if not all(float(tensor.abs().max()) < LARGEST for tensor in ran.tensors.values()):
        raise RefusedError("weights grow beyond all bounds")
    order = job.setup.pipeline.extensions.get("asynchronous")
    if order and [*order.values()] != ran.pushes:
        return [f"pushes: {ran.pushes}, asked for were {[*order.values()]}"]
    expected = expected_of(job, ran.pushes)
    found = [*differences(ran, expected, job)]
    if found and not has_same_bits(job.recipe, job.setup.plan.replicas):
        # Rounding errors may be amplified: allow as much as the loop amplifies those of its initial weights.
        found = [*differences(ran, expected, job, beside=expected_of(job, ran.pushes, moved=True))]
    return found if ran.metrics is None else [*found, *of_clock(ran.metrics, job), *of_plan(job)]


def of_clock(metrics: Mapping[str, float], job: Job) -> Iterator[str]:
    """Yield how seconds and bytes of a run on the virtual clock differ from those of its simulated segments."""
    setup, periods = job.setup, Periods.of(job.recipe.train, job.setup.sampler.minibatches_per_epoch)
    sent = Counter[tuple[str, str]]()
    simulated_s, done, average_s = 0.0, 0, _average_s(setup)
    while done < periods.total:
        drain = periods.next_drain(done)
        totals = simulate_all(setup, drain - done, first=done)
        simulated_s, sent, done = simulated_s + totals.end_s + average_s, sent + totals.num_bytes, drain
    for name, num_bytes in byte_metrics(sent).items():
        # The simulator cuts a ring's chunks at multiples of 4 bytes, so that levels may differ by a few bytes.
        allowed = 0.02 * num_bytes if "_level_" in name else 0
        if abs(metrics[name] - num_bytes) > allowed and not (name.startswith("swap") and _keeps_otherwise(job)):
            yield f"{name}: {metrics[name]:g}, simulated {num_bytes:g}"
    if "asynchronous" in setup.pipeline.extensions:  # with a given order of pushes, the simulated segment has another
        return
    if abs(metrics["training_time_s"] - simulated_s) > 1e-6 * simulated_s:
        yield f"training_time_s: {metrics['training_time_s']!r}, simulated {simulated_s!r}"


def of_plan(job: Job) -> Iterator[str]:
    """Yield how the planner's seconds and bytes of the recipe's own plan differ from simulated minibatches.

    Seconds are compared only if updates flush the pipeline: otherwise the planner's are of a steady state that these
    few minibatches don't reach.
    """
    setup, mode = job.setup, job.recipe.parallelism.mode
    found = Planner(plan_request(job.recipe, job.cluster, job.profile, setup.dataset), mode).estimate_of(setup.plan)
    count = 2 * setup.pipeline.period
    more, less = (simulate_segment(setup, each * count, ends_epoch=False) for each in (2, 1))
    seconds, sent = (more.end_s - less.end_s) / count, Counter[str]()
    for (kind, _), num_bytes in (more.num_bytes - less.num_bytes).items():
        sent[kind] += num_bytes
    if setup.pipeline.flushes and abs(found.minibatch_s - seconds) > 1e-6 * seconds:
        yield f"seconds of a minibatch: {seconds!r}, planned {found.minibatch_s!r}"
    for kind, planned in found.num_bytes.items():
        if abs(planned - sent[kind] / count) > 1e-6 * planned:
            yield f"bytes of {kind} of a minibatch: {sent[kind] / count:g}, planned {planned:g}"


def _average_s(setup: Setup) -> float:
    """Return the seconds in which replicas average running statistics at a drain."""
    ends_s, network = [0.0], Network(setup.cluster, setup.devices)
    average_statistics(setup.pipeline, setup.costs, network, 0.0, ends_s.append)
    network.deliver(())
    return max(ends_s)


def _keeps_otherwise(job: Job) -> bool:
    """Return whether the net has layers that save other tensors on a CPU than on a GPU, which the profile is of."""
    return any(step.split()[0] in ("dropout", "lstm") for step in job.recipe.model["steps"])


def prepared(path: Path, overrides: Sequence[str] = (), **how: Any) -> tuple[LoadedRecipe, Job]:
    """Load and prepare a recipe; `how` are options of `prepare`.

    Raises:
        RefusedError: pipebench refuses it.
    """
    try:
        loaded = load_file(path, overrides)
        job = prepare_job(loaded, silent=True, **how)
    except UserError as error:
        raise RefusedError(str(error)) from error
    asked, plan, layers = job.recipe.parallelism, job.setup.plan, job.setup.graph.layers
    if asked.cuts is not None:
        assert [layers[stage.start].name for stage in plan.stages[1:]] == asked.cuts
    return loaded, job


def run_virtual(loaded: LoadedRecipe, job: Job) -> Ran:
    """Train with the virtual engine.

    Raises:
        RefusedError: training diverges.
    """
    made: list[TrainingEngine] = []

    def make(on_loss: OnLoss, on_unit: OnUnit) -> TrainingEngine:
        made.append(on_virtual_clock(job)(on_loss, on_unit))
        return made[0]

    Rows.fetched.clear()
    with torch_settings(loaded.recipe.engine):
        result, _ = TrainingLoop(job, make, Silent(), lambda point: None).run()
    if result.outcome == DIVERGED:
        raise RefusedError(result.sentence)
    state = ModelState.merge(part for _, part in made[0].parts())
    points = [(point.samples, point.metrics) for point in result.points]
    return Ran(
        points,
        [pushes.minibatches for pushes in result.pushes],
        _tensors(state),
        {draw: [*each] for draw, each in Rows.fetched.items()},
        result.metrics,
    )


def run_in_processes(path: Path) -> Ran:
    """Train with the distributed engine, from the command line; the last checkpoint has the weights.

    Raises:
        RefusedError: training diverges.
    """
    command = [sys.executable, "-m", "pipebench", "run", path.name, *IN_PROCESSES]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True, check=False)
    if DIVERGED in ended.stdout:
        raise RefusedError("weights diverge")
    said = ended.stdout[-2000:] + ended.stderr[-2000:]
    assert ended.returncode == 0, said
    assert "; restart " not in said, said  # it would hide what failed
    newest = max((path.parent / "pipebench-runs").iterdir(), key=lambda folder: folder.stat().st_mtime)
    result = json.loads((newest / "record" / "result.json").read_text())
    checkpoints = find(str(newest)).checkpoints
    state = checkpoints.at(max(checkpoints.steps())).load()
    points = [(point["samples"], point["metrics"]) for point in result["points"]]
    order = newest / "record" / FILE_NAME
    segments = json.loads(order.read_text())["segments"] if order.exists() else []
    return Ran(points, [pushes["minibatches"] for pushes in segments], _tensors(state), None)


def _tensors(state: ModelState) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in {**state.buffers, **state.parameters}.items()}


def expected_of(job: Job, pushes: Sequence[Sequence[int]], *, moved: bool = False) -> Outcome:
    """Run the plain loop on a prepared recipe.

    Args:
        job: the recipe, with its plan.
        pushes: of asynchronous runs, the order of pushes of every segment.
        moved: change the initial weights by some rounding errors.
    """
    recipe, plan, graph = job.recipe, job.setup.plan, job.setup.graph
    of_model, of_data = ({k: v for k, v in part.items() if k != "target"} for part in (recipe.model, recipe.dataset))
    torch.default_generator.manual_seed(mixed(recipe.train.seed, of_name("initial weights")))
    model, dataset = net(**of_model), Rows(**of_data)
    if moved:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 50 * torch.finfo(parameter.dtype).eps * torch.randn_like(parameter))
    own, stage_of = own_names(graph), dict[str, int]()
    for index, stage in enumerate(plan.stages):
        for layer in graph.layers[stage.start : stage.stop]:
            stage_of |= {own[name]: index for name in (*layer.parameters, *layer.buffers)}
    tied = frozenset(own[name] for bucket in job.setup.costs.ties for name in bucket.parameters)
    meaning = replace(meaning_of(recipe, dataset, plan.replicas, stage_of, pushes), tied=tied)
    return Loop(model, dataset, meaning).run()


def differences(ran: Ran, expected: Outcome, job: Job, *, beside: Outcome | None = None) -> Iterator[str]:
    """Yield what differs between engine and plain loop by more than rounding.

    `beside` is the loop's outcome from initial weights that differ by some rounding errors; twice its distance is
    allowed. For example, BatchNorm of two samples with similar values amplifies rounding errors a million times.
    """
    if ran.fetched is not None:
        yield from _of_samples(ran.fetched, expected.samples)
    recipe, beside = job.recipe, beside or expected
    tolerance = TOLERANCES[recipe.model["dtype"]]
    counts, wanted_counts = ([count for count, _ in points] for points in (ran.points, expected.points))
    if counts != wanted_counts:
        yield f"evaluations: after {counts} samples, the plain loop has {wanted_counts}"
        return
    for (samples, metrics), (_, wanted), (_, moved) in zip(ran.points, expected.points, beside.points, strict=True):
        for name, value in wanted.items():
            if not abs(metrics[name] - value) <= max(tolerance * max(1.0, abs(value)), 2 * abs(moved[name] - value)):
                yield f"{name} after {samples} samples: {metrics[name]!r}, the plain loop has {value!r}"
    if has_same_bits(recipe, job.setup.plan.replicas):
        tolerance = 0.0
    for name, tensor in expected.tensors.items():
        error, growth = (_distance(other[name], tensor) for other in (ran.tensors, beside.tensors))
        allowed = max(tolerance * max(1.0, float(tensor.double().abs().max())), 2 * growth)
        if not error <= allowed:
            yield f"{name}: differs by {error:.3g} where {allowed:.3g} is allowed"


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def _of_samples(found: Mapping[int, list[int]], expected: Mapping[int, list[int]]) -> Iterator[str]:
    for draw, samples in expected.items():
        if found.get(draw) != samples:
            yield f"samples of a minibatch: {found.get(draw)}, the plain loop has {samples}"


def has_same_bits(recipe: Recipe, replicas: Sequence[int]) -> bool:
    """Return whether a run must have the bits of the plain loop: whole minibatches, and the same order of additions.

    False for values that are read three times and weights that three layers share, since a stage adds up its own
    gradients first. False, too, for what the plain loop computes in another way than the engine: gradient norms, and
    the optimizers that torch lacks.
    """
    asked, optimizer, steps = recipe.parallelism, recipe.train.optimizer, [s.split() for s in recipe.model["steps"]]
    again = [(kind in _SHARING, int(given[0])) for kind, *given in steps if kind in ("add", "branch", *_SHARING)]
    again += [(False, index - 1) for index, (kind, *_) in enumerate(steps) if kind == "aux"]
    whole = asked.microbatches == 1 and asked.row.accumulate == 1 and set(replicas) == {1} and asked.row.flush
    ours = optimizer.name in ("lars", "lamb") or optimizer.clip_norm is not None
    return whole and not ours and all(again.count(each) < 2 for each in again)
