"""Python's garbage collector, paused or spared."""

import gc
import sys
from types import ModuleType

import pytest

from pipebench.garbage import freeze_all


def test_objects_of_triton_can_be_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 3.9 printed 25 lines on leaks after a run whose profile was computed, README's first command for one."""
    gc.unfreeze()
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    freeze_all()
    assert gc.get_freeze_count() == 0
    monkeypatch.delitem(sys.modules, "triton")
    freeze_all()
    assert gc.get_freeze_count() > 0  # and stays so, as conftest.py leaves it for all tests
