"""What ends a command from outside: Ctrl-C, SIGTERM, and SIGHUP, which comes when a terminal is closed.

Imports almost nothing: the program needs it before all else.
"""

from __future__ import annotations

import _thread
import os
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, TracebackType
    from typing import Any

# Functions of importlib that take the lock of all imports: an exception right then leaves it locked, and other threads,
# such as the one that imports MLflow, wait forever. A signal that comes while they wait is handled just then.
_LOCKING = ("<frozen importlib._bootstrap>", ("_get_module_lock", "cb"))
_LATER_S = 0.01
_BY_SIGNAL = 128  # an exit code less the signal's number
_heard: list[int] = []  # numbers of the signals that raised KeyboardInterrupt
_owner = os.getpid()


def listen() -> None:
    """Note every Ctrl-C of this process from now on, beside raising KeyboardInterrupt; for the main thread.

    Libraries swallow that, and fail later because only a part of them is there.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else somebody has it ignored
        signal.signal(signal.SIGINT, _end)


def leave_to_the_system() -> None:
    """Let Ctrl-C end this process at once: while Python takes it apart, nobody would catch a KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _end):
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def forget() -> None:
    """Forget the signals that were noted: a command begins."""
    _heard.clear()


def exit_code() -> int | None:
    """Return the exit code of a command that a signal ended, None if none was noted."""
    return _BY_SIGNAL + _heard[0] if _heard else None


class RaisedBySignals:
    """A context in which SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does, so that records are closed.

    Only in the main thread; a signal that somebody handles, or has ignored, stays so.
    """

    def __enter__(self) -> None:
        self._before: list[int] = []
        for number in _ALSO:
            if signal.getsignal(number) is signal.SIG_DFL:
                try:
                    signal.signal(number, _end)
                except ValueError:  # not in the main thread
                    return
                self._before.append(number)

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        for number in self._before:
            signal.signal(number, signal.SIG_DFL)


_ALSO = (signal.SIGTERM, signal.SIGHUP)


def _end(number: int, frame: FrameType | None) -> None:
    # A copy of this process, such as a data loader's, ends as by default. So does a command that imports torch, of
    # which nothing is recorded yet: torch's C++ swallows exceptions, or ends of them with a page of its stack.
    if os.getpid() != _owner or _is_importing("torch", frame):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    if not comes_again(number, frame):
        _heard.append(number)
        raise KeyboardInterrupt


def comes_again(number: int, frame: FrameType | None) -> bool:
    """Return whether a signal's handler may raise nothing in this frame; the signal is sent again a moment later."""
    file, names = _LOCKING
    if frame is None or frame.f_code.co_filename != file or frame.f_code.co_name not in names:
        return False
    _thread.start_new_thread(_send_later, (number,))
    return True


def _send_later(number: int) -> None:
    time.sleep(_LATER_S)
    os.kill(os.getpid(), number)


def _is_importing(module: str, frame: FrameType | None) -> bool:
    """Return whether a module's own code is being run for its import, in this frame or in one that waits for it."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False
