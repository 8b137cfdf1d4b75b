"""When loading sets the pace, a run says so, and how many processes would keep up; processes stay for a run."""

import multiprocessing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pipebench.recipe.schema import PeriodRecipe
from pipebench.simulate.costs import HostCosts
from pipebench.train.engines import on_virtual_clock
from pipebench.train.loop import TrainingLoop
from pipebench.train.metrics import loading_note
from tests.support import Blobs, Mlp, make_setup
from tests.train.test_training import Silent, prepared, recipe

IMAGES = {"name": "imagenet"}


def job(load_s: float, plan: Any = ([], [1]), processes: int = 0, fetches: bool = False, **columns: Any) -> Any:
    """Return a job whose loading stages take `load_s` per unit; of its 8 layers each computes for 3 s."""
    data = Blobs()
    data.loader_processes = processes
    setup = make_setup(Mlp(), plan, dataset=data, **columns)
    stages = [replace(each, update_s=0.0) for each in setup.costs.stages]
    stages[0] = replace(stages[0], load_s=dict.fromkeys(stages[0].load_s, load_s))
    costs = replace(setup.costs, stages=tuple(stages), host=HostCosts(fetches=fetches))
    setup = replace(setup, costs=costs)
    return SimpleNamespace(
        setup=setup, profile=SimpleNamespace(source="measured"), recipe=SimpleNamespace(dataset=IMAGES)
    )


def computing_s(setup: Any, stage: int) -> float:
    costs, size = setup.costs.stages[stage], setup.costs.most_samples
    return float(costs.forward_s[size] + costs.backward_s[size])


@pytest.mark.parametrize(
    ("processes", "plan", "columns"),
    [
        (0, ([], [1]), {}),
        (3, ([], [1]), {}),
        (0, ([], [4]), {}),
        (2, ([4], [2, 1]), {}),
        (0, ([4], [1, 1]), {"weights": "one", "microbatches": 2}),
    ],
)
def test_the_advised_processes_keep_up_with_the_slowest_stage(processes: int, plan: Any, columns: Any) -> None:
    found = job(0.0, plan, processes, **columns)
    parts = found.setup.pipeline.microbatches
    slowest_s = max(parts * computing_s(found.setup, i) / r for i, r in enumerate(plan[1]))
    own_s = slowest_s * plan[1][0] / parts  # what a replica of the stage that loads has for a unit
    assert loading_note(job(0.9 * own_s, plan, processes, **columns)) == ""
    note = loading_note(job(2.5 * own_s, plan, processes, **columns))
    needed = -(-5 * max(1, processes // plan[1][0]) // 2) * plan[1][0]  # each replica has as many
    assert note.endswith(f"of computing: dataset.loader_processes={needed} would keep up")


def test_fetching_on_demand_waits_even_if_loading_is_faster() -> None:
    own_s = computing_s(job(0.0).setup, 0)
    assert loading_note(job(0.05 * own_s, fetches=True)) == ""
    assert loading_note(job(0.5 * own_s, fetches=True)).endswith("dataset.loader_processes=1 would keep up")


def test_advice_without_processes_and_none_for_computed_times() -> None:
    found = job(1e3)
    found.recipe.dataset = {"name": "synthetic"}
    assert loading_note(found).endswith("of computing")
    found.profile.source = "analytic"
    assert loading_note(found) == ""


@pytest.mark.parametrize("interrupted", [False, True])
def test_loader_processes_serve_a_whole_run_and_end_with_it(interrupted: bool) -> None:
    given = prepared(recipe(max_epochs=2, evaluate_every=PeriodRecipe(minibatches=4)), plan=([4], [2, 1]))
    given.setup.dataset.loader_processes = 4
    before, during = children(), list[set[int | None]]()
    progress = Silent(20 if interrupted else 10**9)
    TrainingLoop(given, on_virtual_clock(given), progress, lambda point: during.append(children() - before)).run()
    assert len(during) > 3
    assert len(during[0]) == 4
    assert all(each == during[0] for each in during)
    assert children() == before


def children() -> set[int | None]:
    return {child.pid for child in multiprocessing.active_children()}
