"""What tests of control threads share: a small pipeline, and patience."""

import time
from collections.abc import Callable

from pipebench.schedule.pipeline import Pipeline, chain
from tests.patience import PATIENCE_S


def straight(num_stages: int = 2) -> Pipeline:
    """Return a pipeline of stages with one worker each."""
    return Pipeline((1,) * num_stages, chain(num_stages), "1f1b", False, num_stages)


def wait_for(true: Callable[[], object]) -> None:
    """Wait until something holds."""
    end_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end_s, "nothing happened"
        time.sleep(0.01)
