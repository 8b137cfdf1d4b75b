"""A recipe run by the product, beside the plain loop that computes what it means."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from pipebench.checkpoint.share import own_names
from pipebench.checkpoint.state import ModelState
from pipebench.engine.virtual import OnLoss, OnUnit
from pipebench.errors import UserError
from pipebench.model.device import torch_settings
from pipebench.recipe.load import LoadedRecipe, load_file
from pipebench.run.deciding import prepare_job
from pipebench.train.interfaces import Engine
from pipebench.train.job import Job
from pipebench.train.loop import TrainingLoop
from pipebench.train.result import DIVERGED, Point, RunResult
from pipebench.train.virtual import on_virtual_clock
from tests.oracles.draws import mixed, of_name
from tests.oracles.per_minibatch import Loop, Meaning, Outcome
from tests.random_recipes.meaning import meaning_of
from tests.random_recipes.nets import Rows, net, rows

# Relative to the largest number of a tensor. Of float64, after tens of updates: sums are added in another order. A wrong
# formula is off by 1e-5 and more. Of float32 24 bits in place of 53.
TOLERANCES = {"float64": 1e-9, "float32": 2e-3}
LARGEST = 1e4  # weights: what grows beyond makes differences grow, too


class RefusedError(Exception):
    """The product refuses a recipe, or its weights grow beyond all bounds: there is nothing to compare."""


@dataclass(frozen=True)
class Disagreement:
    """What differs.

    Attributes:
        what: a weight, a metric of an evaluation, or the samples of a minibatch.
        how: the numbers.
    """

    what: str
    how: str

    def __str__(self) -> str:
        return f"{self.what}: {self.how}"


class Ran(NamedTuple):
    """What the product came to.

    Attributes:
        result: of the run.
        tensors: parameters and buffers at its end.
        fetched: samples by the draw of their minibatch.
    """

    result: RunResult
    tensors: dict[str, torch.Tensor]
    fetched: dict[int, list[int]]


class _Silent:
    """Progress nobody sees."""

    def update(self, samples: int, clock_s: float, loss: float, occupancy: float) -> None:
        """Nothing to do."""

    def evaluation(self, point: Point, epoch: float) -> None:
        """Nothing to do."""

    def note(self, text: str) -> None:
        """Nothing to do."""


def written(recipe: Mapping[str, Any], folder: Path) -> Path:
    """Write a recipe, and the order of pushes that it brings along, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text("# a random recipe\n" + yaml.safe_dump(dict(recipe), sort_keys=False, default_flow_style=None))
    return path


def disagreements(path: Path) -> list[Disagreement]:
    """Run a recipe both ways and return what differs, the order of samples first.

    Raises:
        RefusedError: the product has no such run.
    """
    loaded, job = prepared(path)
    ran = run_virtual(loaded, job)
    meaning, expected = expected_of(job, [pushes.minibatches for pushes in ran.result.pushes])
    return [*_differences(ran, expected, meaning, str(loaded.recipe.model.get("dtype", "float64")))]


def prepared(path: Path) -> tuple[LoadedRecipe, Job]:
    """Load and prepare a recipe.

    Raises:
        RefusedError: the product refuses it.
    """
    try:
        loaded = load_file(path)
        job = prepare_job(loaded, silent=True)
    except UserError as error:
        raise RefusedError(str(error)) from error
    return loaded, job


def run_virtual(loaded: LoadedRecipe, job: Job) -> Ran:
    """Train with the virtual engine.

    Raises:
        RefusedError: training diverges.
    """
    made: list[Engine] = []

    def make(on_loss: OnLoss, on_unit: OnUnit) -> Engine:
        made.append(on_virtual_clock(job)(on_loss, on_unit))
        return made[0]

    Rows.fetched.clear()
    with torch_settings(loaded.recipe.engine):
        result, _ = TrainingLoop(job, make, _Silent(), lambda point: None).run()
    if result.outcome == DIVERGED:
        raise RefusedError(result.sentence)
    state = ModelState.merge(part for _, part in made[0].parts())
    tensors = {name: tensor.detach() for name, tensor in {**state.buffers, **state.parameters}.items()}
    if not all(float(tensor.abs().max()) < LARGEST for tensor in tensors.values()):
        raise RefusedError("weights diverge")
    return Ran(result, tensors, {draw: sorted(samples) for draw, samples in Rows.fetched.items()})


def expected_of(job: Job, pushes: list[list[int]]) -> tuple[Meaning, Outcome]:
    """Return what a prepared recipe means, and what the plain loop makes of it."""
    recipe, plan, graph = job.recipe, job.setup.plan, job.setup.graph
    model_options, data_options = ({k: v for k, v in part.items() if k not in ("target", "leaves")}
                                   for part in (recipe.model, recipe.dataset))  # fmt: skip
    torch.default_generator.manual_seed(mixed(recipe.train.seed, of_name("initial weights")))
    model, dataset = net(**model_options), rows(**data_options)
    own, stage_of = own_names(graph), dict[str, int]()
    for index, stage in enumerate(plan.stages):
        for layer in graph.layers[stage.start : stage.stop]:
            for name in (*layer.parameters, *layer.buffers):
                stage_of[own[name]] = index
    meaning = meaning_of(recipe, dataset, plan.replicas, stage_of, pushes)
    return meaning, Loop(model, dataset, meaning).run()


def _differences(ran: Ran, expected: Outcome, meaning: Meaning, dtype: str) -> Iterator[Disagreement]:
    """Yield what differs by more than sums in another order can."""
    for draw, samples in expected.samples.items():
        if ran.fetched.get(draw) != samples:
            yield Disagreement("samples of a minibatch", f"{ran.fetched.get(draw)}, the plain loop has {samples}")
    tolerance = 0.0 if has_same_bits(meaning) else TOLERANCES[dtype]
    points = [(point.samples, point.metrics) for point in ran.result.points]
    if [samples for samples, _ in points] != [samples for samples, _ in expected.points]:
        yield Disagreement("evaluations", f"after {[n for n, _ in points]}, {[n for n, _ in expected.points]} samples")
        return
    for (samples, metrics), (_, wanted) in zip(points, expected.points, strict=True):
        for name, value in wanted.items():
            if abs(metrics[name] - value) > max(tolerance, 1e-12) * max(1.0, abs(value)):
                yield Disagreement(f"{name} after {samples} samples", f"{metrics[name]!r}, the plain loop has {value!r}")
    for name, tensor in expected.tensors.items():
        found = ran.tensors.get(name)
        if found is None:
            yield Disagreement(name, "is missing")
            continue
        size = max(1.0, float(tensor.double().abs().max()))
        error = float((found.double() - tensor.double()).abs().max())
        if not error <= tolerance * size:
            yield Disagreement(name, f"differs by {error:.3g} of {size:.3g}")


def has_same_bits(meaning: Meaning) -> bool:
    """Return whether DESIGN promises the bits of a plain loop: nothing is added in another order."""
    whole = meaning.microbatches == meaning.accumulate == 1 and set(meaning.replicas) == {1}
    return whole and meaning.flushes and meaning.clip_norm is None


def quietly(path: Path) -> list[Disagreement]:
    """Return what differs; warnings of torch about a schedule's order of steps are the plain loop's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return disagreements(path)
