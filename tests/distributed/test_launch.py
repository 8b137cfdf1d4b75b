"""Starting workers, finding the cause of their end, restarting and stopping them."""

import contextlib
import errno
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil  # type: ignore[import-untyped] # it has no types of its own
import pytest
from torch.distributed.elastic.multiprocessing import ProcessFailure

from pipebench.distributed import launch, launch_worker, world
from pipebench.distributed.launch import run_workers, spawned, worker_settings, worth_restart
from pipebench.distributed.launch_failure import Failure, of_exception, read, record, report, root_cause
from pipebench.distributed.launch_join import PeerLostError
from pipebench.errors import UserError
from reports.studies.watched_run import lives
from tests.patience import PATIENCE_S
from tests.support import raise_as_ours

ROOT = Path(__file__).parents[2]


def killed(rank: int) -> Failure:
    return Failure(rank, "killed", "ended by SIGKILL")


def terminated(rank: int) -> Failure:
    return Failure(rank, "killed", "ended by SIGTERM")


def failed(rank: int, kind: str) -> Failure:
    return Failure(rank, kind, f"{kind} at {rank}")


@pytest.mark.parametrize(
    ("error", "kind", "message", "exit_code"),
    [
        (UserError("train.epochs: got 0"), "user", "train.epochs: got 0", 2),
        (PeerLostError("lost a peer: reset"), "lost", "lost a peer: reset", 3),
        (ValueError("bad\nshape"), "failed", "ValueError: bad\nshape", 3),
        (AssertionError(), "failed", "AssertionError", 3),
        (KeyboardInterrupt(), "interrupted", "interrupted", 130),
    ],
)
def test_exceptions_are_recorded_by_kind(
    error: BaseException, kind: str, message: str, exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        raise_as_ours(error)
    except BaseException as raised:
        failure = of_exception(raised, 3)
    assert (failure.rank, failure.kind, failure.message, failure.exit_code) == (3, kind, message, exit_code)
    assert ("Traceback" in failure.traceback) == (kind == "failed")
    with tempfile.TemporaryFile() as ours:
        monkeypatch.setenv("PIPEBENCH_FAILURE", str(ours.fileno()))
        record(failure)
        record(Failure(3, "lost", "a consequence"))
        assert read(3, exit_code, ours) == failure
        ours.truncate(9)
        assert read(3, -9, ours) == Failure(3, "killed", "ended by SIGKILL")
    monkeypatch.delenv("PIPEBENCH_FAILURE")
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    record(failure)
    record(Failure(3, "lost", "a consequence"))
    theirs = ProcessFailure(local_rank=3, pid=1, exitcode=exit_code, error_file=str(file))
    assert theirs.error_file_data["message"]["message"] == message
    assert list(tmp_path.iterdir()) == [file]


def test_workers_without_a_record_are_reported_by_their_exit_codes() -> None:
    nothing = io.BytesIO()
    assert read(1, -signal.SIGSEGV, nothing) == Failure(1, "killed", "ended by SIGSEGV")
    assert read(1, -150, nothing) == Failure(1, "killed", "ended by signal 150")
    assert read(1, 7, nothing) == Failure(1, "ended", "ended with exit code 7 and said nothing")


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([failed(0, "lost"), failed(1, "lost"), killed(2), failed(3, "lost")], 2),
        ([failed(0, "lost"), failed(1, "failed")], 1),
        ([failed(0, "lost"), failed(1, "ended")], 1),
        ([failed(0, "failed"), failed(1, "user"), killed(2)], 1),
        ([failed(0, "lost"), failed(1, "stalled"), failed(2, "failed")], 1),
        ([failed(1, "user"), failed(0, "user")], 0),
        ([failed(0, "closed"), failed(1, "lost")], 1),
    ],
)
def test_the_cause_of_failures_is_distinguished_from_its_consequences(failures: list[Failure], cause: int) -> None:
    assert root_cause(failures).rank == cause


def test_reports() -> None:
    assert report(Failure(1, "user", "one\ntwo")) == "pipebench: error: one\npipebench: error: two"
    assert report(Failure(1, "failed", "ValueError: x", "Traceback: ...\n"), "after 1 restart") == (
        "pipebench: error: rank 1: ValueError: x (after 1 restart)\nTraceback: ..."
    )
    assert report(Failure(1, "failed", "ValueError: \x1b[2J", "Traceback: \x85\nValueError: \x1b[2J\n")) == (
        "pipebench: error: rank 1: ValueError: \\x1b[2J\nTraceback: \\x85\nValueError: \\x1b[2J"
    )
    assert report(killed(1)).splitlines() == [
        "pipebench: error: worker process rank 1 ended by SIGKILL",
        "pipebench: error: the system sends SIGKILL when memory runs out, unless somebody did",
    ]


def test_only_failures_that_a_restart_may_avoid_are_restarted() -> None:
    assert worth_restart(failed(0, "failed"), started=True)
    assert worth_restart(failed(0, "lost"), started=True)
    assert not worth_restart(failed(0, "failed"), started=False)
    assert not worth_restart(Failure(0, "killed", "ended by SIGSEGV"), started=False)
    assert worth_restart(killed(0), started=False)
    assert worth_restart(terminated(0), started=False)
    for kind in ("user", "stalled", "interrupted"):
        assert not worth_restart(failed(0, kind), started=True)


def test_workers_share_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launch, "usable_cores", lambda: 8.0)
    assert [worker_settings(n)["OMP_NUM_THREADS"] for n in (1, 3, 16)] == ["8", "2", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "OMP_NUM_THREADS" not in worker_settings(1)


class _EndedError(BaseException):
    """Raised instead of ending the process."""


@pytest.fixture
def _ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> NoReturn:
        raise _EndedError(code)

    monkeypatch.setattr(os, "_exit", end)


@pytest.mark.usefixtures("_ends")
@pytest.mark.parametrize("launched_by_us", [True, False])
def test_a_failing_worker_prints_its_error_only_without_our_launcher(
    launched_by_us: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(world, "current", lambda: None)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.delenv("PIPEBENCH_RUN", raising=False)
    if launched_by_us:
        monkeypatch.setenv("PIPEBENCH_RUN", "somewhere")
    monkeypatch.setattr(launch_worker, "_handle_signals", lambda: None)

    def work(error: Exception) -> None:
        raise_as_ours(error)

    with pytest.raises(_EndedError, match="3"):
        launch_worker.worker_main(lambda: work(ValueError("x")))
    printed = capsys.readouterr().err.splitlines()
    assert printed[:1] == ([] if launched_by_us else ["pipebench: error: rank 2: ValueError: x"])
    assert (printed[-1:] == ["ValueError: x"]) is not launched_by_us
    with pytest.raises(_EndedError, match="3"):
        launch_worker.worker_main(lambda: work(PeerLostError("lost a peer")))
    assert capsys.readouterr().err == ""
    assert launch_worker.worker_main(lambda: "target missed") == 0


@pytest.mark.usefixtures("_ends")
def test_a_failure_that_a_full_disk_cannot_store_is_printed_by_its_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its launcher could only report that the worker had recorded nothing."""

    def full(failure: Failure) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(world, "current", lambda: None)
    monkeypatch.setattr(launch_worker, "record", full)
    monkeypatch.setenv("PIPEBENCH_RUN", "somewhere")
    with pytest.raises(_EndedError, match="2"):
        launch_worker.fail(Failure(0, "user", "train.epochs: got 0"))
    assert capsys.readouterr().err == "pipebench: error: train.epochs: got 0\n"


@pytest.mark.usefixtures("_ends")
def test_the_first_signal_of_torchrun_asks_for_a_stop_and_the_second_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    reasons: list[str] = []
    try:
        launch_worker._handle_signals()
        launch_worker.on_stop_request(reasons.append)
        os.kill(os.getpid(), signal.SIGTERM)
        assert reasons == ["interrupted"]
        with pytest.raises(_EndedError, match="130"):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def script(folder: Path, text: str) -> list[str]:
    """Write a worker in plain Python, which starts in an instant; `rank`, `attempt` and `folder` are there."""
    head = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "rank, attempt = int(os.environ['RANK']), int(os.environ['PIPEBENCH_ATTEMPT'])\n"
        f"folder = Path({str(folder)!r})\n"
        "(folder / f'coming-{attempt}-{rank}').write_text(str(os.getpid()))\n"
        "(folder / f'coming-{attempt}-{rank}').rename(folder / f'up-{attempt}-{rank}')\n"  # whole at once
    )
    file = folder / "worker.py"
    file.write_text(head + text)
    return [sys.executable, "-S", str(file)]


@contextlib.contextmanager
def when(exists: Sequence[Path], then: Callable[[], object]) -> Iterator[None]:
    """Call `then` in a thread as soon as these files exist, while the block lasts; fail if it was too late.

    It is called even then, after `PATIENCE_S`, since the block may wait for its effect.
    """
    over, late = threading.Event(), threading.Event()

    def wait() -> None:
        until = time.monotonic() + PATIENCE_S
        while not all(each.exists() and each.stat().st_size for each in exists):
            if time.monotonic() > until:
                late.set()
                break
            # What it does may be meant for workers only, and ends pytest when they have failed before.
            if over.wait(0.01):
                return
        then()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not late.is_set(), f"not within {PATIENCE_S:g} s: {exists}"


def alive(folder: Path) -> list[int]:
    return [pid for pid in (int(file.read_text()) for file in folder.glob("up-*")) if lives(pid)]


def run(
    command: list[str],
    folder: Path,
    num_workers: int = 2,
    max_restarts: int = 2,
    hear: Callable[[str], object] = lambda text: None,
    **options: Any,
) -> tuple[int, str]:
    """Run workers; `hear` is called with every message of the launcher."""
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        hear(text)

    code = run_workers(spawned(command), num_workers, folder, max_restarts=max_restarts, say=say, **options)
    assert alive(folder) == []
    return code, "\n".join(said)


def test_workers_get_their_ranks_and_a_successful_run_prints_nothing(tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    text = (
        "names = ['RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'PIPEBENCH_RUN']\n"
        "told = [os.environ[name] for name in names] + sys.argv[1:] + [str(signal.getsignal(2))]\n"
        "(folder / f'told-{rank}').write_text(' '.join(told))\n"
    )
    command = [*script(tmp_path, text), "a=${local_rank}", "b=$$", "--"]
    assert run(command, tmp_path, num_workers=3) == (0, "")
    for rank in range(3):
        expected = f"{rank} 3 {rank} 3 {tmp_path} a=${{local_rank}} b=$$ -- {signal.Handlers.SIG_IGN}"
        assert (tmp_path / f"told-{rank}").read_text() == expected
    assert {number: signal.getsignal(number) for number in before} == before


def test_the_workers_store_has_no_port(tmp_path: Path) -> None:
    """Torch's store has a port, by which every user of the host can read it."""
    before = [each for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
    attempt = launch.Attempt(2, 0)
    try:
        attempt.start(spawned(script(tmp_path, "")), {}, {})
        listens = [each for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
        assert [each for each in listens if each not in before] == []  # another test's may have been closed
        assert attempt.wait(PATIENCE_S)
        assert not attempt.failures()
    finally:
        attempt.close()


def test_a_killed_worker_restarts_all_up_to_the_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    text = (
        "while rank == 1:\n"
        "    if (folder / f'up-{attempt}-0').exists(): os.kill(os.getpid(), signal.SIGKILL)\n"
        "    time.sleep(0.01)\n"
        f"time.sleep({PATIENCE_S})\n"
    )
    code, said = run(script(tmp_path, text), tmp_path)
    assert code == 3
    assert said.splitlines() == [
        "pipebench: worker process rank 1 ended by SIGKILL; restart 1 of 2",
        "pipebench: worker process rank 1 ended by SIGKILL; restart 2 of 2",
        "pipebench: error: worker process rank 1 ended by SIGKILL (before training began, after 2 restarts)",
        "pipebench: error: the system sends SIGKILL when memory runs out, unless somebody did",
    ]
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")
    assert sorted(file.name for file in tmp_path.glob("up-*-0")) == ["up-0-0", "up-1-0", "up-2-0"]


@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        ("sys.exit(7)", "ended with exit code 7 and said nothing"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "ended by SIGTERM"),  # `kill PID` of a worker
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
    ],
)
def test_workers_that_the_launcher_ended_are_not_the_cause(how: str, outcome: str, tmp_path: Path) -> None:
    text = f"""
while rank == 1:
    if (folder / "up-0-0").exists() and (folder / "up-0-2").exists():
        {how}
    time.sleep(0.01)
time.sleep({PATIENCE_S})
"""
    code, said = run(script(tmp_path, text), tmp_path, num_workers=3, max_restarts=0)
    assert (code, said) == (3, f"pipebench: error: worker process rank 1 {outcome} (before training began)")


def test_a_failing_start_is_not_repeated_and_does_not_wait_for_a_stuck_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipebench.distributed.launch._CLOSING_S", 0.3)
    text = f"""
import psutil

def is_stopped(pid):
    return psutil.Process(int(pid)).status() == psutil.STATUS_STOPPED

other, until = folder / "up-0-0", time.monotonic() + {PATIENCE_S}
while rank == 1 and time.monotonic() < until:
    if other.exists() and other.read_text() and is_stopped(other.read_text()):
        sys.exit(7)
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGSTOP)
"""
    command = script(tmp_path, text)
    command.remove("-S")
    code, said = run(command, tmp_path)
    assert code == 3
    assert said == (
        "pipebench: error: worker process rank 1 ended with exit code 7 and said nothing (before training began)"
    )


@pytest.mark.usefixtures("handles_sighup")
@pytest.mark.parametrize(
    ("signals", "grace_s"), [([signal.SIGINT, signal.SIGINT], 60.0), ([signal.SIGTERM], 0.2), ([signal.SIGHUP], 0.2)]
)
def test_workers_that_do_not_stop_are_ended(
    signals: list[signal.Signals], grace_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.Attempt, "started", True)

    def send(_: str = "") -> None:
        # One at a time, the second when the first has been answered: two that wait are one to the system.
        if signals:
            os.kill(os.getpid(), signals.pop(0))

    signals = list(signals)
    with when([tmp_path / "up-0-0", tmp_path / "up-0-1"], send):
        code, said = run(script(tmp_path, f"time.sleep({PATIENCE_S})\n"), tmp_path, hear=send, grace_s=grace_s)
    assert code == launch.INTERRUPTED
    assert said.splitlines() == [
        "pipebench: stopping at the next drain; Ctrl-C again ends now",
        "pipebench: ended before the next drain",
    ]


def test_one_ctrl_c_ends_workers_that_have_nothing_to_finish(tmp_path: Path) -> None:
    with when([tmp_path / "up-0-0", tmp_path / "up-0-1"], lambda: os.kill(os.getpid(), signal.SIGINT)):
        code, said = run(script(tmp_path, f"time.sleep({PATIENCE_S})\n"), tmp_path)
    assert (code, said) == (launch.INTERRUPTED, "pipebench: ended before training began")


def test_no_worker_outlives_its_parent(tmp_path: Path) -> None:
    command = script(tmp_path, f"time.sleep({2 * PATIENCE_S})\n")
    text = (
        "from pathlib import Path\nfrom pipebench.distributed.launch import run_workers, spawned\n"
        f"run_workers(spawned({command!r}), 2, Path({str(tmp_path)!r}), max_restarts=0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temporary")}
    (tmp_path / "temporary").mkdir()
    up = [tmp_path / "up-0-0", tmp_path / "up-0-1"]
    with subprocess.Popen([sys.executable, "-c", text], env=environment) as parent, when(up, parent.kill):
        parent.wait()
    until = time.monotonic() + PATIENCE_S  # before they end by themselves
    while alive(tmp_path):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert parent.returncode == -signal.SIGKILL
    assert not list((tmp_path / "temporary").iterdir())


# The whole life of a job: killed while training, restarted, hears of Ctrl-C, stops.
JOB = """
import json
import psutil
from pipebench.errors import UserError
from pipebench.distributed.launch_worker import worker_main
from pipebench.distributed.world import join, shared_folder_check

def listening():
    own = psutil.Process().net_connections()
    return sorted({each.laddr.ip for each in own if each.status == psutil.CONN_LISTEN})

def work():
    import torch
    import torch.distributed as dist
    world = join("cpu", limit_s=PATIENCE_S, operation_limit_s=PATIENCE_S)
    both, alone = world.new_group("gloo"), world.new_group("gloo", [1])
    world.mark_started()
    if attempt == 0:
        world.exchange(0)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        world.exchange("to nobody")
    total = torch.ones(1) * (rank + 1)
    dist.all_reduce(total, group=both)
    facts = {"ranks": world.exchange(["x" * rank, rank]), "total": total.item(), "listening": listening()}
    facts["member"] = alone is not dist.GroupMember.NON_GROUP_MEMBER
    shared_folder_check(world, folder)
    try:
        shared_folder_check(world, folder / str(rank))
    except UserError as error:
        facts["error"] = str(error)
    (folder / f"facts-{rank}").write_text(json.dumps(facts))
    until = time.monotonic() + PATIENCE_S
    while not any(world.exchange(world.store.check(["pipebench/stop"]))):
        assert time.monotonic() < until, "nobody asks to stop"
        time.sleep(0.01)
    facts["reason"] = world.store.get("pipebench/stop").decode()
    (folder / f"facts-{rank}").write_text(json.dumps(facts))
    world.close()

sys.exit(worker_main(work))
"""


def test_a_job_is_restarted_and_stops_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = script(tmp_path, f"PATIENCE_S = {PATIENCE_S}\n{JOB}")
    command.remove("-S")
    ready = [tmp_path / "facts-0", tmp_path / "facts-1"]
    with when(ready, lambda: os.kill(os.getpid(), signal.SIGINT)):
        code, said = run(command, tmp_path, max_restarts=1)
    assert code == 0
    assert said.splitlines() == [
        "pipebench: worker process rank 1 ended by SIGKILL; restart 1 of 1",
        "pipebench: stopping at the next drain; Ctrl-C again ends now",
    ]
    facts = [json.loads(file.read_text()) for file in ready]
    assert [each["ranks"] for each in facts] == [[["", 0], ["x", 1]]] * 2
    assert [each["total"] for each in facts] == [3.0, 3.0]
    assert [each["member"] for each in facts] == [False, True]
    assert [each["reason"] for each in facts] == ["interrupted"] * 2
    assert all("1 of 2 workers don't see what rank 0 writes there (rank 1 on" in each["error"] for each in facts)
    assert all(each["listening"] == ["127.0.0.1"] for each in facts)
