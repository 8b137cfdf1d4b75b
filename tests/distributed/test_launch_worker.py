"""The start and end of a worker process: signals that its launcher forwards, and which process reports a failure."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from pipebench.distributed import launch_worker, world
from pipebench.distributed.launch_failure import Failure
from pipebench.distributed.launch_join import HostSlot

FORWARDED = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]  # by torchrun


@pytest.fixture
def _handlers_are_put_back() -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in FORWARDED}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.usefixtures("_handlers_are_put_back")
@pytest.mark.parametrize("sent", FORWARDED)
def test_signals_that_torchrun_forwards_ask_for_a_stop(sent: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGHUP, of a terminal that is gone, ended workers without a checkpoint."""
    asked: list[str] = []
    monkeypatch.setattr(launch_worker, "_listeners", [asked.append])
    launch_worker._handle_signals()
    os.kill(os.getpid(), sent)
    assert asked == ["interrupted"]


@pytest.mark.usefixtures("_handlers_are_put_back")
def test_sigterm_to_all_processes_of_a_job_asks_for_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PBS, LSF and systemd send it: workers of our own launcher died of it, and no checkpoint was written."""
    asked: list[str] = []
    monkeypatch.setattr(launch_worker, "_listeners", [asked.append])
    monkeypatch.setenv("PIPEBENCH_RUN", "run")
    others = [signal.getsignal(each) for each in FORWARDED if each != signal.SIGTERM]
    launch_worker._handle_signals()
    os.kill(os.getpid(), signal.SIGTERM)
    assert asked == ["interrupted"]
    assert [signal.getsignal(each) for each in FORWARDED if each != signal.SIGTERM] == others


@pytest.mark.usefixtures("_handlers_are_put_back")
def test_a_copy_of_a_worker_can_be_terminated(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that took the signal for itself would have `multiprocessing` wait for it for ever."""
    monkeypatch.setattr(launch_worker, "_listeners", [lambda reason: None])
    launch_worker._handle_signals()
    copy = os.fork()
    if copy == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)  # for the signal, which Python handles between two instructions
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("kind", "variables", "reports"),
    [
        ("user", {}, False),
        ("user", {"RANK": "2"}, True),  # it isn't below WORLD_SIZE
        ("user", {"RANK": "0"}, True),
        ("failed", {}, True),
        ("lost", {}, False),
    ],
)
def test_before_joining_rank_0_alone_reports_its_mistake(
    kind: str, variables: dict[str, str], reports: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def is_rank_0s(mistake: str, place: HostSlot) -> bool:
        asked.append(mistake)
        return place.rank > 0

    monkeypatch.setattr(world, "_joined", [])
    monkeypatch.setattr(launch_worker, "is_rank_0s", is_rank_0s)
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **variables}
    monkeypatch.setattr(os, "environ", given)
    assert launch_worker._is_first_to_report(Failure(1, kind, "so")) == reports
    assert asked == (["so"] if kind == "user" and given["RANK"] != "2" else [])


@pytest.mark.parametrize(("answer", "reports"), [(True, True), (False, False), (None, True)])
def test_a_store_that_waits_does_not_delay_the_report(
    answer: bool | None, reports: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection answers nothing while torch waits on it for another rank, which is half an hour."""
    over = threading.Event()

    def first(_: str, patience_s: float) -> bool:
        assert patience_s == 0.0
        if answer is None:
            over.wait()
        return bool(answer)

    monkeypatch.setattr(world, "_joined", [SimpleNamespace(first=first)])
    monkeypatch.setattr(launch_worker, "_ASKING_S", 0.05 if answer is None else 60.0)
    assert launch_worker._is_first_to_report(Failure(0, "silent", "so")) == reports
    over.set()


def test_cuda_s_number_of_queues_is_set_before_a_device_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks of a recipe with `engine.device: cuda` asked torch, which begins CUDA, before the worker had joined."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(launch_worker, "_handle_signals", lambda: None)
    found: list[str | None] = []
    launch_worker.worker_main(lambda: found.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")))
    assert found == ["32"]
