"""What tests of real labs share: the reason to skip them, and waiting for conditions."""

import time
from collections.abc import Callable

import pytest

from tests.lab.hosts import why_not
from tests.patience import PATIENCE_S

needs_a_lab = pytest.mark.skipif(bool(why_not()), reason=why_not())


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until something is so; the test fails if it never is."""
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s, f"waited for ever: {what}"
        time.sleep(0.02)
