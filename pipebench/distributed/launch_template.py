"""Starts workers as copies of one process that has imported what they need: torch's import takes seconds in each.

`pipebench run` copies itself (forks) when it has imported everything and computed nothing. A copy of a process has none
of its threads, and a process that has computed has threads of OpenMP, autograd or CUDA, which the copy would lack. The
first copy, the template, waits in the background and makes a copy of itself for every worker. Linux only.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

from pipebench.distributed.launch_child import end_with
from pipebench.errors import PipebenchError
from pipebench.model.first_backward import import_for_backward
from pipebench.model.heap import keep_freed_blocks
from pipebench.zoo.late import torch

# Limits of a request to the template.
_MAX_REQUEST_BYTES, _MAX_DESCRIPTORS = 1 << 17, 16
# The template answers in milliseconds, but its own imports come first, on a host that may be busy.
_ANSWER_S = 60.0
_LOOK_EVERY_S = 1.0  # launchers poll every worker many times a second
_PR_SET_NAME = 15
_STANDARD = (0, 1, 2)  # input, output, errors


class SilentTemplateError(PipebenchError):
    """The template doesn't answer: it hangs or is suspended."""


class TemplateWorker:
    """A worker that the template started, with the interface of `subprocess.Popen` that a launcher uses."""

    def __init__(self, template: "Template", pid: int) -> None:
        self._template, self.pid = template, pid
        self.returncode: int | None = None  # None while it runs, negative for a signal

    def poll(self) -> int | None:
        """Set and return the exit code, None while it runs; raises a SilentTemplateError."""
        if self.returncode is None:
            self.returncode = self._template.exit_code(self.pid)
        return self.returncode


class Template:
    """The process that copies itself for every worker, as a context manager; leaving it ends the template and workers.

    This process must not have computed with torch. The template ends with this process, and workers with the template.

    Args:
        main: a worker's work, with its arguments in `sys.argv`.
    """

    def __init__(self, main: Callable[[], object]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._exit_codes: dict[int, int] = {}  # of workers that have ended, by process id
        self._unreported_since_s: dict[int, float] = {}  # when a worker was seen to have ended, by process id
        self._looks_again_s: dict[int, float] = {}  # when to look next whether a worker has ended, by process id
        self._is_gone = False
        launcher = os.getpid()
        self.pid = _fork()
        if self.pid == 0:
            try:
                ours.close()
                _serve(theirs, launcher, main)
            finally:  # never back into the launcher's work
                os._exit(1)
        theirs.close()

    def __enter__(self) -> Self:
        """Return the template."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the template and its workers."""
        self._socket.close()
        self._kill()
        os.waitpid(self.pid, 0)

    def start(self, words: Sequence[str], settings: Mapping[str, str], passed: Mapping[str, int]) -> TemplateWorker:
        """Start a worker.

        Args:
            words: the worker's arguments.
            settings: additional environment variables.
            passed: file descriptors that the worker inherits, by the environment variable that gets their number.

        Raises:
            OSError: the template has ended.
            SilentTemplateError: the template doesn't answer.
        """
        request = json.dumps([[*words], {**settings}, [*passed]]).encode()
        socket.send_fds(self._socket, [request], [*_STANDARD, *passed.values()])
        while self._has_message(_ANSWER_S):
            answer = self._receive()
            if answer is None:
                raise BrokenPipeError("the template has ended")
            if "started" in answer:
                pid = answer["started"]
                self._exit_codes.pop(pid, None)  # of an earlier worker with the same process id
                return TemplateWorker(self, pid)
        raise self._silent()

    def exit_code(self, pid: int) -> int | None:
        """Return a worker's exit code, None while it runs; if the template has ended, SIGKILL's, which workers got.

        Raises:
            SilentTemplateError: the worker has ended, and the template doesn't report it.
        """
        while not self._is_gone and self._has_message(0.0):
            self._receive()
        if pid in self._exit_codes:
            return self._exit_codes[pid]
        if self._is_gone:
            return -signal.SIGKILL
        now_s = time.monotonic()
        if now_s < self._looks_again_s.get(pid, 0.0):
            return None
        self._looks_again_s[pid] = now_s + _LOOK_EVERY_S
        if _has_ended(pid) and now_s - self._unreported_since_s.setdefault(pid, now_s) > _ANSWER_S:
            raise self._silent()
        return None

    def _has_message(self, timeout_s: float) -> bool:
        return bool(select.select([self._socket], [], [], timeout_s)[0])

    def _receive(self) -> dict[str, int] | None:
        """Take the next message of the template and return it; None if the template has ended."""
        try:
            message = self._socket.recv(_MAX_REQUEST_BYTES)
        except ConnectionError:
            message = b""
        if not message:
            self._is_gone = True
            return None
        answer: dict[str, int] = json.loads(message)
        if "ended" in answer:
            self._exit_codes[answer["ended"]] = answer["code"]
            self._unreported_since_s.pop(answer["ended"], None)
        return answer

    def _silent(self) -> SilentTemplateError:
        """End the template, and workers with it; return the error."""
        self._kill()
        self._is_gone = True
        why = "it hangs or is suspended, and was ended with its workers"
        return SilentTemplateError(
            f"process {self.pid}, which starts the workers, has not answered for {_ANSWER_S:g} s: {why}"
        )

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def _has_ended(pid: int) -> bool:
    """Return whether a process has ended, though its parent may not have waited for it yet; False without /proc."""
    if not Path("/proc/self/stat").exists():
        return False
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return fields[0] in ("Z", "X")  # zombie, dead


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns of other threads, which a fork doesn't copy. Here they are harmless: idle ones of BLAS, which
        # handles forks, and one that waits to print a line.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _serve(requests: socket.socket, launcher: int, main: Callable[[], object]) -> NoReturn:
    """Start workers on request and report their ends, until the launcher closes the connection."""
    os.setsid()  # the terminal's Ctrl-C is for the launcher
    # Who ends a job may send SIGTERM to all its processes. Workers handle it; they would end with this process.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with(launcher)
    _name("template")
    import_for_backward()
    # The collector writes to every object that it visits. Pages that no process writes stay shared between copies.
    gc.freeze()
    # A worker's end (SIGCHLD) makes Python write a byte into this pipe, which wakes `select` below.
    ends, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakes)
    while True:
        ready, _, _ = select.select([requests.fileno(), ends], [], [])
        if requests.fileno() in ready:
            request, descriptors, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, _MAX_DESCRIPTORS)
            if not request:
                os._exit(0)
            pid = _fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for descriptor in (requests.detach(), ends, wakes):
                    os.close(descriptor)
                _become(os.getppid(), json.loads(request), descriptors, main)
            # The worker does so itself, too: it must lead its group before either process goes on.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            for descriptor in descriptors:
                os.close(descriptor)
            requests.send(json.dumps({"started": pid}).encode())
        if ends in ready:
            os.read(ends, 1 << 12)
            for pid, code in _reaped():
                requests.send(json.dumps({"ended": pid, "code": code}).encode())


def _reaped() -> list[tuple[int, int]]:
    """Return process ids and exit codes of the workers that have ended."""
    found = []
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found.append((ended[0], os.waitstatus_to_exitcode(ended[1])))
    return found


def _become(template: int, request: Any, descriptors: Sequence[int], main: Callable[[], object]) -> NoReturn:
    """Do a worker's work in this copy of the template, and end as Python does, but without cleaning up all modules."""
    code = 1
    try:
        words, settings, names = request
        # A process group of its own, which includes its loader's processes.
        os.setpgid(0, 0)
        end_with(template)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        # The launcher handles Ctrl-C and stops the workers.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for standard, descriptor in zip(_STANDARD, descriptors, strict=False):
            os.dup2(descriptor, standard)
            os.close(descriptor)
        passed = map(str, descriptors[len(_STANDARD) :])
        _settle({**settings, **dict(zip(names, passed, strict=True))})
        sys.argv[1:] = words
        main()
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined] # as multiprocessing's processes end
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        finally:
            os._exit(code)


def _settle(settings: Mapping[str, str]) -> None:
    """Set environment variables, and settings that libraries have read from the template's."""
    keep_freed_blocks()
    os.environ.update(settings)
    if "OMP_NUM_THREADS" in settings:
        torch.set_num_threads(int(settings["OMP_NUM_THREADS"]))
    _name(f"worker {settings['RANK']}.{settings['PIPEBENCH_ATTEMPT']}")


def _name(name: str) -> None:
    """Name this process as `ps` and `top` show it, up to 15 characters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
