"""Workers wait until their launcher has recorded them; those without a launcher don't wait."""

import threading

import pytest

from pipebench.distributed.launch_pipes import announcing_ready, ready_listener
from tests.patience import PATIENCE_S


def test_workers_wait_for_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    is_ready = threading.Event()
    with announcing_ready(is_ready.wait) as passed:
        ((name, descriptor),) = passed.items()
        monkeypatch.setenv(name, str(descriptor))
        waits = [ready_listener(), ready_listener()]
        assert [wait(0.0) for wait in waits if wait] == [False, False]
        is_ready.set()
        assert [wait(PATIENCE_S) for wait in waits if wait] == [True, True]
        assert [wait(0.0) for wait in waits if wait] == [True, True]


def test_a_worker_without_a_launcher_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPEBENCH_RECORDER", raising=False)
    assert ready_listener() is None
