"""Starts workers as copies of one process that has imported what they need: torch's import takes seconds in each.

`pipebench run` copies itself (forks) when it has imported everything and computed nothing: no thread of OpenMP,
autograd or CUDA is lost in a copy, as there is none. That copy, the template, waits in the background and makes a copy
of itself for every worker. Linux only.
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
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

from pipebench.distributed.launch_child import end_with
from pipebench.model.first_backward import import_for_backward
from pipebench.model.heap import keep_freed_blocks
from pipebench.zoo.late import torch

_MOST_BYTES, _MOST_DESCRIPTORS = 1 << 17, 16  # of a request
_PR_SET_NAME = 15
_STANDARD = (0, 1, 2)  # input, output, errors


class TemplateWorker:
    """A worker that the template started; poll it as a `subprocess.Popen`."""

    def __init__(self, template: "Template", pid: int) -> None:
        self._template, self.pid = template, pid
        self.returncode: int | None = None  # None while it runs, negative for a signal

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        if self.returncode is None:
            self.returncode = self._template.exit_code(self.pid)
        return self.returncode


class Template:
    """The process that copies itself for every worker, as a context manager; leaving it ends what is left of them.

    This process must not have computed with torch. The template ends with it, and workers with the template. `main` is
    what a worker does, with its arguments in `sys.argv`.
    """

    def __init__(self, main: Callable[[], object]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._ended: dict[int, int] = {}
        self._is_gone = False
        parent = os.getpid()
        self._pid = _fork()
        if self._pid == 0:
            try:
                ours.close()
                _serve(theirs, parent, main)
            finally:  # never back into the launcher's work
                os._exit(1)
        theirs.close()

    def __enter__(self) -> Self:
        """Return the template."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the template and its workers."""
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def start(self, words: Sequence[str], settings: Mapping[str, str], passed: Mapping[str, int]) -> TemplateWorker:
        """Start a worker with arguments, further environment variables, and file descriptors by their variables' names.

        Raises:
            OSError: the template has ended.
        """
        request = json.dumps([[*words], {**settings}, [*passed]]).encode()
        socket.send_fds(self._socket, [request], [*_STANDARD, *passed.values()])
        while answer := self._receive():
            if "started" in answer:
                self._ended.pop(answer["started"], None)  # of an earlier worker, whose number the kernel gives anew
                return TemplateWorker(self, answer["started"])
        raise BrokenPipeError("the template has ended")

    def exit_code(self, pid: int) -> int | None:
        """Return a worker's exit code, None while it runs; if the template has ended, that of its end with it."""
        while not self._is_gone and select.select([self._socket], [], [], 0)[0]:
            self._receive()
        return self._ended.get(pid, -signal.SIGKILL if self._is_gone else None)

    def _receive(self) -> dict[str, int] | None:
        """Note the next message of the template and return it; None if it has ended."""
        try:
            message = self._socket.recv(_MOST_BYTES)
        except ConnectionError:
            message = b""
        if not message:
            self._is_gone = True
            return None
        answer: dict[str, int] = json.loads(message)
        if "ended" in answer:
            self._ended[answer["ended"]] = answer["code"]
        return answer


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns of the other threads: one that waits to print a line, and idle ones of BLAS, which handles forks.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _serve(requests: socket.socket, launcher: int, main: Callable[[], object]) -> NoReturn:
    """Start workers on request and report their ends, until the launcher closes the connection."""
    os.setsid()  # the terminal's Ctrl-C is for the launcher
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # workers, which end with this process, are to stop at a drain
    end_with(launcher)
    _name("template")
    import_for_backward()
    gc.freeze()  # else the collector writes to all objects, and copies of a process share what none writes
    ends, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakes)
    while True:
        ready, _, _ = select.select([requests.fileno(), ends], [], [])
        if requests.fileno() in ready:
            request, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, _MOST_DESCRIPTORS)
            if not request:
                os._exit(0)
            pid = _fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for each in (requests.detach(), ends, wakes):
                    os.close(each)
                _become(os.getppid(), json.loads(request), descriptors, main)
            with contextlib.suppress(OSError):  # it does so itself, too: whoever comes first
                os.setpgid(pid, pid)
            for each in descriptors:
                os.close(each)
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
    """Do a worker's work in this copy of the template, and end as Python would, but for taking all modules apart."""
    code = 1
    try:
        words, settings, names = request
        # A process group of its own, which includes its loader's processes.
        os.setpgid(0, 0)
        end_with(template)
        for each in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
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
    """Set environment variables, and what libraries read from them when they were loaded."""
    keep_freed_blocks()
    os.environ.update(settings)
    if "OMP_NUM_THREADS" in settings:
        torch.set_num_threads(int(settings["OMP_NUM_THREADS"]))
    _name(f"worker {settings['RANK']}.{settings['PIPEBENCH_ATTEMPT']}")


def _name(name: str) -> None:
    """Name this process as `ps` and `top` show it, up to 15 characters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
