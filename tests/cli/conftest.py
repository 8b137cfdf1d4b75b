"""A small recipe to plan, and the modes that are planned."""

from pathlib import Path

import pytest

from pipebench.planner.planner import Planner
from pipebench.planner.plans import PlanEstimate
from tests.recipes import uniform_recipe


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few.yaml").write_text(uniform_recipe(6, 384, 8, minibatch_size=32))
    return "few.yaml"


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the modes that are planned, in order, which grows."""
    names: list[str] = []
    best = Planner.best

    def counted(self: Planner) -> PlanEstimate:
        names.append(self.name)
        return best(self)

    monkeypatch.setattr(Planner, "best", counted)
    return names
