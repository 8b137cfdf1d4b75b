"""Names of runs in MLflow."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipebench.run.recorder import run_title


@pytest.mark.parametrize(
    ("varied", "title"),
    [
        ("", "pipedream 2-2, seed 3"),
        ("plan=2-2", "pipedream 2-2, seed 3"),
        ("pipedream,plan=2-2,depth=4", "pipedream 2-2, depth=4, seed 3"),
        ("depth=4,seed=3", "pipedream 2-2, depth=4, seed 3"),
        ("plan=auto", "pipedream 2-2, plan=auto, seed 3"),
    ],
)
def test_a_title_has_mode_plan_and_seed_once(varied: str, title: str) -> None:
    """A sweep over plans was called `pipedream 2-2, plan=2-2, seed 3`."""
    parallelism, train = SimpleNamespace(mode="pipedream"), SimpleNamespace(seed=3)
    job = SimpleNamespace(
        recipe=SimpleNamespace(parallelism=parallelism, train=train), setup=SimpleNamespace(plan="2-2")
    )
    request = SimpleNamespace(loaded=SimpleNamespace(varied_name=varied), suite=SimpleNamespace(brief=False), name="")
    assert run_title(cast(Any, request), cast(Any, job)) == title
