"""Searches in runs: history, weights and restarts, in several modes."""

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from pipebench.checkpoint.store import Checkpoints
from pipebench.engine.admission import StopRequest
from pipebench.engine.engine import OnLoss, OnUnit, TrainingEngine
from pipebench.engine.setup import Setup
from pipebench.engine.virtual import VirtualEngine
from pipebench.errors import UserError
from pipebench.extensions.moves.engine import moving as moving_setup
from pipebench.extensions.search.architectures import Architectures
from pipebench.extensions.search.recipe import SearchRecipe
from pipebench.extensions.search.setup import NAME, SearchSetup
from pipebench.extensions.search.strategy import Step
from pipebench.extensions.search.trace_file import SearchFile
from pipebench.model.plan import Plan
from pipebench.recipe.load import load
from pipebench.recipe.schema import PeriodRecipe, Recipe
from pipebench.run.deciding import prepare_job
from pipebench.train.checkpointing import CheckpointPolicy, resume_point
from pipebench.train.engines import on_virtual_clock
from pipebench.train.interfaces import MakeEngine
from pipebench.train.job import Job
from pipebench.train.loop import TrainingLoop
from pipebench.train.result import INTERRUPTED, RunResult
from tests.checkpoint.support import captured
from tests.checkpoint.test_round_trips import bits
from tests.engine.test_cells import whole
from tests.oracles.evolution import evolve
from tests.support import flat_cluster
from tests.train.test_training import Silent, recipe

PERIODS = 6
RULES = SearchRecipe(cells=["cells.*"], population=3, tournament=2, smallest=1)
PLANS: dict[str, dict[str, Any]] = {
    "one worker": {"cuts": ()},
    "1F1B": {"microbatches": 2},
    "GPipe": {"order": "all-forwards", "microbatches": 4},
    "replicas": {"replicas": [2, 1, 1]},
}


def recipe_of(**train: Any) -> Recipe:
    train = {"target": None, "max_epochs": 3, "evaluate_every": PeriodRecipe(minibatches=6)} | train
    return recipe(**train)


SAVING = recipe_of(checkpoint_every=PeriodRecipe(minibatches=3))


def job(setup: Setup, given: Recipe | None = None, steps: tuple[Step, ...] | None = None, seed: int = 0) -> Job:
    """Return a search of a setup's cells; 12 minibatches per epoch, two individuals."""
    given = given or recipe_of()
    architectures = Architectures(
        setup.graph, setup.profile, setup.dataset, given.train.optimizer, flat_cluster(4), RULES.cells
    )
    search = SearchSetup(RULES, architectures, architectures.all, "eval_loss", False, seed, steps)
    pipeline = dataclasses.replace(setup.pipeline, extensions={**setup.pipeline.extensions, NAME: RULES})
    return Job(given, flat_cluster(4), dataclasses.replace(setup, pipeline=pipeline), extensions={NAME: search})


def storing(make: MakeEngine, engines: list[VirtualEngine]) -> MakeEngine:
    """Return a function that makes an engine and stores it in a list."""

    def keep(on_loss: OnLoss, on_unit: OnUnit) -> TrainingEngine:
        made = make(on_loss, on_unit)
        assert isinstance(made, VirtualEngine)
        engines.append(made)
        return made

    return keep


def run(
    given: Job, policy: CheckpointPolicy | None = None, stop: StopRequest | None = None, progress: Any = None
) -> Any:
    """Return the result and the engine of a search."""
    engines: list[VirtualEngine] = []
    made = storing(on_virtual_clock(given, stop), engines)
    loop = TrainingLoop(given, made, progress or Silent(), lambda point: None, policy or CheckpointPolicy())
    return loop.run()[0], engines[0]


def history(result: RunResult) -> SearchFile:
    assert isinstance(result.search, SearchFile)
    return result.search


def test_a_search_equals_evolution_on_its_evaluations() -> None:
    result, _ = run(job(whole(weights="one", cuts=())))
    found, scores = history(result), [point.metrics["eval_loss"] for point in result.points]
    expected = evolve(
        lambda number, cells, period: -scores[number], num_cells=4, first={0, 1, 2, 3}, population_size=3,
        sample_size=2, num_mutations=1, fewest=1, remove_oldest=True, max_hurdles=0, seed=0, num_periods=PERIODS,
    )  # fmt: skip
    names = ["cells.a", "cells.b", "cells.c", "cells.d"]
    assert [each.cells for each in found.individuals] == [[names[c] for c in sorted(cells)] for cells, _, _ in expected]
    assert [each.parent for each in found.individuals] == [parent for _, parent, _ in expected]
    assert [each.minibatch for each in found.individuals] == [6 * n for n in range(PERIODS)]
    assert [each.second for each in found.individuals] == [0, *(point.clock_s for point in result.points[:-1])]
    assert found.best == min(range(PERIODS), key=lambda n: (scores[n], n))
    assert f"of {PERIODS} individuals number {found.best} was the fittest: eval_loss" in result.sentence


def test_the_same_seed_searches_alike_and_another_one_does_not() -> None:
    (one, engine), (same, again), (other, _) = (run(job(whole(), seed=seed)) for seed in (0, 0, 1))
    assert history(one) == history(same)
    assert bits(captured(engine)) == bits(captured(again))
    assert [each.cells for each in history(one).individuals] != [each.cells for each in history(other).individuals]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_a_pipeline_that_flushes_searches_like_one_worker(plan: str) -> None:
    (alone, engine), (piped, other) = (
        run(job(whole(weights="one", plain=True, sizes=(1, 2, 4), **given))) for given in ({"cuts": ()}, PLANS[plan])
    )
    if plan == "replicas":  # twice as many samples per update: another training, the same beginning
        assert history(piped).individuals[0].cells == history(alone).individuals[0].cells
        return
    assert [each.cells for each in history(piped).individuals] == [each.cells for each in history(alone).individuals]
    mine, theirs = captured(engine).parameters, captured(other).parameters
    assert mine.keys() == theirs.keys()
    for name, parameter in mine.items():
        assert torch.allclose(parameter, theirs[name], rtol=1e-9, atol=1e-12), name


class Stopping(Silent):
    """Asks for a stop after so many updates."""

    def __init__(self, stop: StopRequest, after: int) -> None:
        super().__init__()
        self._stop, self._after = stop, after

    def update(self, samples: int, clock_s: float, loss: float, occupancy: float) -> None:
        super().update(samples, clock_s, loss, occupancy)
        if len(self.updates) == self._after:
            self._stop.reason = "stopped by the test"


@functools.cache
def undisturbed(weights: str) -> tuple[RunResult, dict[str, Any]]:
    """Return the result and the weights of a search that isn't stopped, with as many checkpoints as one that is."""
    with tempfile.TemporaryDirectory() as folder:
        found, engine = run(job(whole(weights=weights), SAVING), CheckpointPolicy(Checkpoints(Path(folder), keep=2)))
        return found, bits(captured(engine))


@pytest.mark.parametrize(("weights", "after"), [("one", 33), *(("stash", after) for after in (1, 6, 20))])
def test_a_search_that_was_stopped_and_resumed_ends_as_an_undisturbed_one(
    weights: str, after: int, tmp_path: Path
) -> None:
    expected, expected_bits = undisturbed(weights)
    stop, place = StopRequest(), Checkpoints(tmp_path, keep=2)
    stopped, _ = run(job(whole(weights=weights), SAVING), CheckpointPolicy(place), stop, Stopping(stop, after))
    assert stopped.outcome == INTERRUPTED
    again = job(whole(weights=weights), SAVING)
    found = place.latest()[0]
    assert found is not None
    result, other = run(again, CheckpointPolicy(place, resume_point(found, again)))
    assert history(result) == history(expected)
    for mine, theirs in zip(result.points, expected.points, strict=True):  # losses are summed in other parts
        assert mine.metrics == {**theirs.metrics, "train_loss": pytest.approx(theirs.metrics["train_loss"])}
    assert bits(captured(other)) == expected_bits


def test_a_trace_is_followed_at_the_evaluation_after_each_change() -> None:
    steps = (Step(0, None, frozenset({0, 1})), Step(5, None, frozenset({3})), Step(18, None, frozenset({0, 2, 3})))
    result, _ = run(job(whole(), steps=steps))
    rows = history(result).individuals
    assert [(each.minibatch, [name[-1] for name in each.cells]) for each in rows] == [
        (0, ["a", "b"]), (6, ["d"]), (18, ["a", "c", "d"]),
    ]  # fmt: skip
    assert [len(each.scores) for each in rows] == [1, 2, 3]


def test_a_trace_resumed_with_another_period_keeps_its_trained_scores(tmp_path: Path) -> None:
    """The time of each score was computed from the period of the resumed recipe."""
    steps = (Step(0, None, frozenset({0, 1})), Step(12, None, frozenset({3})), Step(18, None, frozenset({0, 1, 2})))
    place = Checkpoints(tmp_path, keep=9)
    run(job(whole(), recipe_of(checkpoint_every=PeriodRecipe(minibatches=6)), steps), CheckpointPolicy(place))
    again = job(whole(), recipe_of(evaluate_every=PeriodRecipe(minibatches=3)), steps)
    result, _ = run(again, CheckpointPolicy(None, resume_point(place.at(24), again)))
    rows = history(result).individuals
    assert [(each.minibatch, [name[-1] for name in each.cells]) for each in rows] == [
        (0, ["a", "b"]), (12, ["d"]), (18, ["a", "b", "c"]),
    ]  # fmt: skip


def test_a_recorded_search_trains_the_same_individuals_again() -> None:
    first, engine = run(job(whole(weights="stash")))
    steps = tuple(
        Step(each.minibatch, None, frozenset("abcd".index(name[-1]) for name in each.cells))
        for each in history(first).individuals
    )
    again, other = run(job(whole(weights="stash"), steps=steps))
    assert bits(captured(engine)) == bits(captured(other))
    assert again.points == first.points


def test_cuts_stay_for_all_architectures() -> None:
    plans: list[Plan] = []
    engines: list[VirtualEngine] = []

    class Watching(Silent):
        def note(self, text: str) -> None:
            plans.append(engines[0].setup.plan)

    given = job(whole())
    TrainingLoop(given, storing(on_virtual_clock(given), engines), Watching(), lambda point: None).run()
    assert {tuple((stage.start, stage.stop) for stage in plan.stages) for plan in plans} == {
        tuple((stage.start, stage.stop) for stage in given.setup.plan.stages)
    }
    assert len({str(plan.crossings) for plan in plans}) > 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize("live", [True, False])
def test_moves_of_layers_do_not_change_a_search_with_a_flush(live: bool) -> None:
    """As vPipe claims for searches (TPDS'21, section 6.3): all scores and weights have the same bits."""
    setup = whole(weights="one", plain=True, sizes=(1, 2, 4), microbatches=2, cuts=("cells_a_up", "cells_b_up"))
    moving = moving_setup(setup, balances=True, live=live)
    (stays, engine), (moves, other) = (run(job(given)) for given in (setup, moving))
    assert moves.moves, "the last stage had nearly all layers"
    mine, theirs = ([(each.cells, each.scores) for each in history(result).individuals] for result in (stays, moves))
    assert mine == theirs
    assert bits(captured(engine)) == bits(captured(other))


def test_a_first_individual_with_too_few_cells_is_refused() -> None:
    """It was trained, with fewer cells than `smallest`."""
    loaded = load("search/single", ["search.first=[]", "search.smallest=2"])
    with pytest.raises(UserError, match=r"search.first: got 0 of the cells, allowed are at least search.smallest, 2"):
        prepare_job(loaded, silent=True)
