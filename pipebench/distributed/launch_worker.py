"""The outermost function of a worker process: it records or reports a failure, and ends the process promptly."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from pipebench.distributed import nccl, world
from pipebench.distributed.launch_failure import Failure, of_exception, record, report
from pipebench.distributed.launch_join import RUN, HostSlot, read_place
from pipebench.distributed.launch_mistake import is_rank_0s, tell_the_others
from pipebench.errors import UserError

_ASKING_S = 10.0  # for the store's answer; well beyond what rank 0 waits for the others to ask
_LOST_PATIENCE_S = 4.0  # for a worker that only lost another, so that others report first
_listeners: list[Callable[[str], None]] = []


def worker_main(function: Callable[[], object], *, verbose: bool = False) -> int:
    """Do a worker process's work and return 0 when done; end the process at once if it fails.

    A failure is recorded for `pipebench run`, which reports it. Under another launcher, such as torchrun, the worker
    that was the cause prints the report. A failing process doesn't join threads of Gloo and NCCL, which may wait for
    lost peers.

    Args:
        function: the work.
        verbose: whether a printed report on the user's own code has its traceback.
    """
    _handle_signals()
    nccl.set_before_cuda(os.environ)  # now, because checks before a run ask torch for a device
    try:
        function()
    except BaseException as error:
        fail(of_exception(error, _rank()), verbose=verbose)
    return 0


def launched_by_us() -> bool:
    """Return whether `pipebench run` started this process, rather than torchrun or the like."""
    return RUN in os.environ


def fail(failure: Failure, *, verbose: bool = False, asks: bool = True) -> NoReturn:
    """Record a failure and end this process now; from any thread.

    Args:
        failure: the failure.
        verbose: as for `report`.
        asks: whether to ask the store if another worker has reported; False if the store is silent.
    """
    try:
        launcher_reports = _is_recorded(failure) and launched_by_us()
        reports = not launcher_reports and failure.kind != "interrupted"
        if reports and (not asks or _is_first_to_report(failure)):
            print(report(failure, verbose=verbose), file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if failure.kind == "user" and (place := _place_before_joining()) is not None:
            tell_the_others(failure.message, place)
    finally:  # standard error may be closed
        os._exit(failure.exit_code)


def _is_recorded(failure: Failure) -> bool:
    """Record a failure; return whether that was possible: the disk of temporary files may be full."""
    try:
        record(failure)
    except OSError:
        return False
    return True


def _is_first_to_report(failure: Failure) -> bool:
    """Return whether no other worker has reported; true if the store doesn't answer soon.

    Before workers have joined, all may find the same mistake, which rank 0 reports. A worker that has only lost another
    one lets others report first, who know more; torchrun reports a worker that was killed.
    """
    joined, is_lost = world.current(), failure.kind == "lost"
    if joined is None:
        place = _place_before_joining() if failure.kind == "user" else None
        return not is_lost and (place is None or not is_rank_0s(failure.message, place))
    if is_lost and joined.place.agent_store:
        return False
    patience_s = _LOST_PATIENCE_S if is_lost else 0.0
    answers: list[bool] = []
    # In a thread: the store's connection may be in use by one that waits.
    asking = threading.Thread(target=lambda: answers.append(joined.first("report", patience_s=patience_s)), daemon=True)
    asking.start()
    asking.join(_ASKING_S)
    return answers != [False]


def _place_before_joining() -> HostSlot | None:
    """Return this worker's place if it hasn't joined; None, too, if its environment doesn't say it."""
    with contextlib.suppress(UserError):
        return read_place(os.environ) if world.current() is None else None
    return None


def fail_stalled(text: str) -> NoReturn:
    """Record a stalled instruction and end this process now; from any thread."""
    fail(Failure(_rank(), "stalled", text))


def fail_silent(text: str, store_answers: bool) -> NoReturn:
    """Record that a worker or the store is silent, and end this process now; from any thread."""
    fail(Failure(_rank(), "silent", text), asks=store_answers)


def on_stop_request(listener: Callable[[str], None]) -> None:
    """Have Ctrl-C, SIGTERM, SIGHUP and SIGQUIT call `listener` with a reason, once; a second ends the process.

    torchrun forwards them to its workers. pipebench's own launcher requests a stop through the store, but a system that
    ends a job (PBS, LSF, systemd) may send SIGTERM to all its processes. Without a listener the first signal ends the
    process.
    """
    _listeners.append(listener)


def _rank() -> int:
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


def _handle_signals() -> None:
    if threading.current_thread() is not threading.main_thread():
        return  # Python refuses to set handlers elsewhere
    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked process, such as a loader's: it ends, as by default
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if not _listeners:
            fail(Failure(_rank(), "interrupted", "interrupted"))
        for listener in _listeners:
            listener("interrupted")
        _listeners.clear()

    forwarded = () if launched_by_us() else (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # by torchrun
    for number in (signal.SIGTERM, *forwarded):
        signal.signal(number, handle)
