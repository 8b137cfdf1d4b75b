"""The threads beside a worker's training: stalls that name the worker."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined] # torch lists them nowhere

from pipebench.distributed.control import Control
from pipebench.distributed.stall import Activity, describe, stall_report
from pipebench.schedule.instructions import Instruction
from pipebench.schedule.operations import Op
from pipebench.schedule.pipeline import Pipeline, chain
from tests.distributed.waiting import straight
from tests.instruction_text import parse
from tests.patience import PATIENCE_S, wait_for

_RECEIVE_TO_SEND = Op.SEND_ACTIVATION - Op.RECEIVE_ACTIVATION


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)


def test_a_stall_names_the_worker_that_computes_while_its_peer_waits(server: TCPStore) -> None:
    reports: list[str] = []
    store = PrefixStore("attempt 1", server)
    first, second = (
        Control(store, w, 2, straight(), stall_limit_s=3.0, on_stall=reports.append, heartbeat_s=0.05) for w in range(2)
    )
    first.start()
    second.start()
    first.begin(1, 10)
    second.begin(1, 10)
    second.at(parse("1F4"))
    first.at(parse("0RG3<1"))
    wait_for(lambda: len(reports) == 2)
    first.close()
    second.close()
    for report in reports:
        head, *rows = report.splitlines()
        assert re.match(r"worker 1 \(stage 1\) has been at 1F4 for \d+\.\d s: ", head)
        assert "it runs the forward of minibatch 4; minibatches are those of segment 1" in head
        assert head.endswith("engine.stall_limit_s, is 3 s")
        assert re.match(r"  worker 0 \(stage 0\): 0RG3<1 for \d+\.\d s: ", rows[0])
        assert rows[0].endswith("waits for the gradient of minibatch 3 from worker 1")


def test_a_stall_names_the_worker_without_heartbeats(server: TCPStore) -> None:
    reports: list[str] = []
    control = Control(server, 0, 2, straight(), stall_limit_s=3.0, on_stall=reports.append, heartbeat_s=0.02)
    beat = {"count": 7, "text": "RA3<0", "description": "waits", "waits": True, "since_s": 0.1}
    server.set("pipebench/heartbeat/1", json.dumps(beat))
    control.start()
    control.at(None, "exchange")
    wait_for(lambda: reports)
    control.close()
    silent = r"worker 1 \(stage 1\) has not been heard of for \d+ s; last it was at RA3<0: waits;"
    assert re.match(silent, reports[0])
    assert re.search(r"worker 0 \(stage 0\): exchange for \d+\.\d s", reports[0])


def _watch(control: Control, clock: list[float], num_looks: int, before: Callable[[], object] = lambda: None) -> None:
    """Run the watchdog for `num_looks` checks on a simulated clock, calling `before` before each."""
    left = iter(range(num_looks))

    def wait(period_s: float) -> bool:
        clock[0] += period_s
        before()
        return next(left, None) is None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control._closed, "wait", wait)
        control._watchdog()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds, as the control threads see it."""
    now_s = [100.0]
    monkeypatch.setattr("pipebench.distributed.control.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    return now_s


@pytest.mark.parametrize(("num_processes", "num_heartbeats"), [(2, 120), (128, 120), (1024, 15)])
def test_many_processes_send_and_read_heartbeats_more_rarely(
    clock: list[float], num_processes: int, num_heartbeats: int
) -> None:
    """0.2.0: 512 processes asked the store for half a million values a second, more than it can answer."""
    control = Control(HashStore(), 0, num_processes, straight(), stall_limit_s=300.0)
    looks = iter(range(120))

    def wait(period_s: float) -> None:
        assert period_s == 0.5, "a request to stop is seen as soon as ever"
        clock[0] += period_s
        if next(looks, None) == 119:
            control._closed.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control._wake, "wait", wait)
        control._talk()
    assert control._num_heartbeats == num_heartbeats, "in a minute"


def test_progress_and_work_without_a_name_are_no_stall(clock: list[float]) -> None:
    reports: list[str] = []
    control = Control(HashStore(), 0, 1, straight(1), stall_limit_s=2.0, on_stall=reports.append)
    numbers = itertools.count()
    _watch(control, clock, 50, lambda: control.at(Instruction(Op.FORWARD, 0, next(numbers))))
    control.at(None)
    _watch(control, clock, 150)  # longer than anything may take
    assert reports == []
    control.at(None, "checkpoint")  # which may take ten times as long as an instruction
    _watch(control, clock, 90)
    assert reports == []
    _watch(control, clock, 110)
    assert re.match(r"worker 0 \(stage 0\) has been at checkpoint for \d+\.\d s: ", reports[0])


@pytest.mark.parametrize(("busy", "num_reports"), [("checkpoint", 0), ("", 1)])
def test_waiting_for_a_worker_that_reports_work_is_no_stall(clock: list[float], busy: str, num_reports: int) -> None:
    reports: list[str] = []
    control = Control(HashStore(), 0, 2, straight(2), stall_limit_s=2.0, on_stall=reports.append)
    control.at(None, "exchange")
    said = json.dumps(asdict(describe(straight(2), 1, None, busy, 4, 1.0)) | {"count": 1}).encode()
    _watch(control, clock, 20, lambda: control._heard.update({1: (said, clock[0])}))
    assert len(reports) == num_reports


def test_time_for_which_the_process_was_suspended_is_no_stall(clock: list[float]) -> None:
    reports: list[str] = []
    control = Control(HashStore(), 0, 1, straight(1), stall_limit_s=2.0, on_stall=reports.append)
    control.at(Instruction(Op.FORWARD, 0, 0))
    sleeps_s = iter([0.0, 3600.0])

    def sleep() -> None:
        clock[0] += next(sleeps_s, 0.0)

    _watch(control, clock, 4, sleep)
    assert reports == []


def test_waiting_for_the_agreement_is_watched_too(server: TCPStore) -> None:
    reports: list[str] = []
    control = Control(server, 0, 2, straight(), stall_limit_s=0.3, on_stall=reports.append, heartbeat_s=0.02)
    control.start()
    control.begin(0, 4)
    control.request_stop("interrupted")
    wait_for(lambda: server.check(["pipebench/position/0"]))
    thread = threading.Thread(target=control.admit, args=(0,), daemon=True)
    thread.start()
    wait_for(lambda: reports)
    server.set("pipebench/position/1", json.dumps([0, 2, "interrupted"]))
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert control.limit == 2
    control.close()
    assert re.search(r"worker 0 \(stage 0\): admit for \d+\.\d s", reports[0])
    assert "waits for all workers to agree where the run stops" in reports[0]


_SERVER = """
import time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def test_a_suspended_store_is_reported_and_a_lost_one_ends_the_worker() -> None:
    reports: list[str] = []
    gone = threading.Event()
    with (
        subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True) as launcher,
        contextlib.ExitStack() as at_the_end,
    ):
        at_the_end.callback(launcher.kill)
        assert launcher.stdout is not None
        store = TCPStore("127.0.0.1", int(launcher.stdout.readline()), None, False, timedelta(seconds=10))
        control = Control(
            store, 0, 2, straight(), stall_limit_s=3.0, heartbeat_s=0.05, on_stall=reports.append, on_orphan=gone.set
        )
        peer = Control(store, 1, 2, straight(), stall_limit_s=600, heartbeat_s=0.05, on_orphan=lambda: None)
        control.start()
        peer.at(parse("1RA3<0"))
        peer.start()
        wait_for(lambda: len(control._heard) == 2)
        os.kill(launcher.pid, signal.SIGSTOP)
        control.at(parse("0B2"))
        wait_for(lambda: reports)
        assert not gone.is_set()
        launcher.kill()
        assert gone.wait(PATIENCE_S)
        control.close()
        peer.close()
    head, note, _, last = reports[0].splitlines()
    assert re.match(r"  worker 1 \(stage 1\): 1RA3<0 for \d+\.\d s: ", last)
    assert head.startswith("worker 0 (stage 0) has been at 0B2")
    assert note.startswith("the launcher's store has not answered for")


@pytest.mark.parametrize(
    ("text", "work", "words", "waits"),
    [
        ("1L5", "", "loads microbatch 0 of minibatch 3", False),
        ("1RA3<0", "", "waits for the activation of microbatch 1 of minibatch 1 from worker 0", True),
        ("0SA3>1", "", "sends the activation of microbatch 1 of minibatch 1 to worker 2", False),
        ("1B8+1", "", "runs the backward of microbatch 0 of minibatch 4", False),
        ("0RG3<1", "", "waits for the gradient of microbatch 1 of minibatch 1 from worker 2", True),
        ("1SG3>0", "", "sends the gradient of microbatch 1 of minibatch 1 to worker 0", False),
        ("1W1", "", "waits for the all-reduce of round 1 (minibatches 4 to 6) with worker 1", True),
        ("1N0", "", "waits for the gradients' norm of round 0 (minibatches 0 to 3) from all workers", True),
        ("1U2", "", "makes the update of round 2", False),
        ("1PUSH5", "", "pushes the gradient of microbatch 0 of minibatch 3 to the server", True),
        ("1PULL5", "", "pulls weights of the server, up to microbatch 0 of minibatch 3", True),
        ("1F3", "evaluate", "runs the forward of minibatch 3 in 'evaluate'", False),
    ],
)
def test_instructions_are_described(text: str, work: str, words: str, waits: bool) -> None:
    pipeline = Pipeline((1, 2), chain(2), "1f1b", True, 2, microbatches=2, accumulate=2, shares_norm=True)
    assert describe(pipeline, 2, parse(text), work, 7, 1.5) == Activity(text, words, waits, 1.5)


def test_a_stall_is_blamed_on_the_silent_then_the_busy_then_the_longest_waiting_worker() -> None:
    pipeline = straight(3)
    waits = {w: Activity(f"RA{w}<0", "waits", True, 10.0 + w) for w in range(3)}
    busy = Activity("F1", "computes", False, 9.0)

    def culprit(activities: dict[int, Activity], silent_s: dict[int, float]) -> str:
        return stall_report(pipeline, activities, silent_s, 10.0, segment=0).split(" (")[0]

    assert culprit(waits, {}) == "worker 2"
    assert culprit(waits | {0: busy}, {}) == "worker 0"
    assert culprit(waits | {0: Activity("F1", "computes", False, 0.1)}, {}) == "worker 2"
    assert culprit(waits | {0: busy}, {1: 12.0}) == "worker 1"
    assert culprit({0: busy}, {1: 12.0, 2: 12.0}) == "worker 1"
