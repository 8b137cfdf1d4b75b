"""Plans are found once for equal requests, and anew for any other."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from pipebench.planner.memo import arranged, best_plan, compared
from pipebench.planner.planner import Planner
from pipebench.planner.plans import Request
from pipebench.recipe.load import load
from pipebench.train.prepare import prepare
from pipebench.train.profile_cache import to_plan
from pipebench.train.request import plan_request

WORDS = ("dataset.num_train=1000", "engine.kind=simulated")


def request_of(*words: str) -> Request:
    loaded = load("quickstart", [*WORDS, *words])
    known = to_plan(loaded)
    return plan_request(loaded.recipe, loaded.cluster, known.profile, known.dataset)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modes that were planned, one by one."""
    found, best = list[str](), Planner.best

    def counted(planner: Planner) -> Any:
        found.append(planner.name)
        return best(planner)

    monkeypatch.setattr(Planner, "best", counted)
    return found


def test_a_request_made_again_is_not_planned_again(searches: list[str]) -> None:
    first, second = request_of("train.minibatch_size=31"), request_of("train.minibatch_size=31")
    assert first is not second
    assert best_plan(first, "pipedream") is best_plan(second, "pipedream")
    assert searches == ["pipedream"]
    assert best_plan(first, "gpipe").plan.mode == "gpipe"
    assert compared(first, "model", others=False) is compared(second, "model", others=False)
    assert searches == ["pipedream", "gpipe", "dp", "model"]


def test_seeds_and_rates_of_learning_share_a_plan_and_depths_do_not(searches: list[str]) -> None:
    plans = []
    for words in (["train.seed=1"], ["train.seed=2"], ["train.optimizer.lr=0.5"], ["parallelism.depth=2"]):
        loaded = load("quickstart", [*WORDS, "train.minibatch_size=30", *words])
        plans.append(prepare(loaded.recipe, loaded.cluster).setup.plan)
    assert len(searches) == 2
    assert plans[0] == plans[1] == plans[2]
    assert [plan.depth for plan in plans[2:]] == [4, 2]


def test_given_replicas_are_arranged_as_the_planner_arranges_them() -> None:
    request, planner = request_of(), Planner(request_of(), "pipedream")
    starts = planner.starts_of([2, 2])
    found = arranged(request, "pipedream", [2, 2], None)
    assert found == (tuple(starts), planner.policies_of([2, 2], starts), planner.devices_of([2, 2], starts))
    moved = [starts[0] - 1]
    assert arranged(request, "pipedream", [2, 2], moved).starts == tuple(moved)


def parts_of(value: Any) -> Iterator[Any]:
    """Yield the dataclasses in a value, itself included."""
    if is_dataclass(value):
        yield value
        for field in fields(value):
            yield from parts_of(getattr(value, field.name))
    elif isinstance(value, dict):
        for each in value.values():
            yield from parts_of(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from parts_of(each)


def test_no_part_of_a_request_is_left_out_of_its_repr() -> None:
    """Requests are compared by it."""
    kinds = {type(part) for part in parts_of(request_of("parallelism.recompute=true"))}
    assert {kind.__name__ for kind in kinds} >= {"Request", "Profile", "LayerProfile", "Cluster", "Level", "Mode"}
    for kind in kinds:
        assert all(field.repr for field in fields(kind)), kind
        assert kind.__dataclass_params__.repr, kind


def test_requests_that_differ_in_one_time_differ() -> None:
    request = request_of("train.minibatch_size=29")
    slower = request.profile.with_rows(lambda rows: (replace(rows[0], forward_s=1.0), *rows[1:]))
    changed = best_plan(replace(request, profile=slower), "pipedream")
    assert changed.minibatch_s > best_plan(request, "pipedream").minibatch_s
