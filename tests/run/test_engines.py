"""Every kind of engine that a recipe may name can be run."""

from pipebench.recipe.engines import ENGINES
from pipebench.recipe.ranges import CHOICES
from pipebench.run.runner import RUNS


def test_every_kind_of_engine_has_its_runs() -> None:
    assert set(RUNS) == set(ENGINES) == set(CHOICES["engine.kind"])


def test_only_engines_that_compute_need_a_process_per_worker_or_can_be_measured() -> None:
    assert [kind.name for kind in ENGINES.values() if not kind.trains] == ["simulated"]
    assert [kind.name for kind in ENGINES.values() if kind.measures] == ["distributed"]
    assert all(kind.in_processes == kind.measures for kind in ENGINES.values())
