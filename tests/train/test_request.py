"""A recipe's request to the planner: what holds for other modes than the recipe's."""

import pytest

from pipebench.planner.compare import compare
from pipebench.planner.planner import Planner
from pipebench.planner.plans import Request
from pipebench.recipe.load import load
from pipebench.train.profile_cache import to_plan
from pipebench.train.request import plan_request


def request_of(*words: str) -> Request:
    loaded = load("quickstart", ["dataset.num_train=1000", "engine.kind=simulated", *words])
    known = to_plan(loaded)
    return plan_request(loaded.recipe, loaded.cluster, known.profile, known.dataset)


@pytest.mark.parametrize("asked", ["dp", "model", "auto"])
def test_other_modes_accumulate_as_they_would_in_a_run(asked: str) -> None:
    """They were cut into microbatches, too, and pipedream-2bw accumulated as many minibatches as are in flight."""
    accumulate = "parallelism.accumulate=3"
    comparison = compare(request_of(f"parallelism.mode={asked}", accumulate), None if asked == "auto" else asked)
    planned = {each.plan.mode: each for each in (comparison.best, *comparison.others)}
    for mode in ("gpipe", "pipedream-flush", "pipedream-2bw"):
        run = Planner(request_of(f"parallelism.mode={mode}", accumulate), mode).best()
        assert run.accumulate == 3
        assert run.microbatches == 1
        assert planned[mode] == run


def test_other_modes_do_not_take_over_that_a_mode_accumulates_nothing() -> None:
    comparison = compare(request_of("parallelism.mode=gpipe"), "gpipe")
    planned = {each.plan.mode: each for each in comparison.others}
    assert planned["pipedream-2bw"].accumulate == planned["pipedream-2bw"].plan.depth > 1
