"""Signals that end a command: Ctrl-C, SIGTERM, and SIGHUP, which the system sends when a terminal is closed.

Imports almost nothing, since the program needs it before all else.
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

# Functions of importlib that take the lock of all imports. An exception raised in one of them leaves the lock taken,
# and other threads, such as the one that imports MLflow, wait forever. Python handles a signal that arrives while a
# function waits for the lock inside that function, so this is likely.
_LOCKING_FILE, _LOCKING_FUNCTIONS = "<frozen importlib._bootstrap>", ("_get_module_lock", "cb")
_LATER_S = 0.01
_BY_SIGNAL = 128  # the exit code after a signal, less the signal's number
_heard: list[int] = []  # numbers of the signals that raised KeyboardInterrupt
_owner = os.getpid()


def listen() -> None:
    """Record every Ctrl-C of this process from now on, and raise KeyboardInterrupt; call it in the main thread.

    Libraries swallow a KeyboardInterrupt while they are imported, and fail later with other errors. The record shows
    that Ctrl-C was the cause.
    """
    # Otherwise it is ignored, as in a script's `command &`, or handled.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def leave_to_the_system() -> None:
    """Let Ctrl-C end this process at once: nothing catches a KeyboardInterrupt while the interpreter shuts down."""
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _end):
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def forget() -> None:
    """Clear the record of signals, before a command begins."""
    _heard.clear()


def exit_code() -> int | None:
    """Return the exit code of a command that a signal ended; None if no signal was recorded."""
    return _BY_SIGNAL + _heard[0] if _heard else None


class RaisedBySignals:
    """A context in which SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does, so that records are closed.

    Has no effect outside the main thread, nor on a signal that is handled or ignored already.
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
    # A forked process, such as a data loader's, ends as by default. So does a command while it imports torch, when
    # nothing is recorded yet: torch's C++ would swallow the exception, or abort with a page of its stack.
    if os.getpid() != _owner or _is_importing("torch", frame):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    if not comes_again(number, frame):
        _heard.append(number)
        raise KeyboardInterrupt


def comes_again(number: int, frame: FrameType | None) -> bool:
    """Return whether a signal's handler must not raise in this frame; if so, send the signal again a moment later."""
    code = None if frame is None else frame.f_code
    if code is None or code.co_filename != _LOCKING_FILE or code.co_name not in _LOCKING_FUNCTIONS:
        return False
    _thread.start_new_thread(_send_later, (number,))
    return True


def _send_later(number: int) -> None:
    time.sleep(_LATER_S)
    os.kill(os.getpid(), number)


def _is_importing(module: str, frame: FrameType | None) -> bool:
    """Return whether this frame, or one that called it, runs a module's own code to import it."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False
