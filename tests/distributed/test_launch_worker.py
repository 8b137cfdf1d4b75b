"""The start and end of a worker process: signals that its launcher forwards, and which process reports a failure."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipebench.distributed import launch_worker, world
from pipebench.distributed.launch_failure import Failure

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


def test_an_error_before_joining_is_reported_once_per_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of only a process with LOCAL_RANK 1 was reported by none."""
    monkeypatch.setattr(world, "_joined", [])

    def reports(local_rank: int, kind: str, message: str, error_file: str | None = None) -> bool:
        name = str(tmp_path / "attempt_0" / str(local_rank) / "error.json") if error_file is None else error_file
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", name)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
        return launch_worker._is_first_to_report(Failure(local_rank, kind, message))

    (tmp_path / "attempt_0").mkdir()
    assert reports(1, "user", "of all")
    assert not reports(0, "user", "of all")
    assert reports(0, "user", "of one")
    assert reports(1, "failed", "so")
    assert not reports(1, "lost", "so")
    assert reports(1, "user", "of all", error_file="")
    monkeypatch.chdir(tmp_path)
    assert reports(1, "user", "of all", error_file="error.json")


def test_another_launcher_s_error_file_hides_no_error_of_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "_joined", [])
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "errors" / "error.json"))
    (tmp_path / "errors").mkdir()
    assert [launch_worker._is_first_to_report(Failure(0, "user", "so")) for _ in range(2)] == [True, True]
    assert [each.name for each in tmp_path.iterdir()] == ["errors"]


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
