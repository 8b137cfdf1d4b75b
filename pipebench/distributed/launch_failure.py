"""Worker failures: their records, their root cause, and the report on the cause.

When one worker dies, the others fail moments later with errors about lost connections. Only the cause is reported.
"""

import contextlib
import json
import os
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Final

from pipebench import files
from pipebench.distributed.launch_join import HostLostError, lost
from pipebench.errors import UserError, is_out_of_memory, limit_text, memory_text, printable_lines
from pipebench.recipe.users_code import as_users, traceback_of

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
FAILURE = "PIPEBENCH_FAILURE"  # file descriptor of the launcher's file for a worker's failure
# Kinds of failure, from most to least likely to be the cause of others, with what has happened.
KINDS: Final[dict[str, str]] = {
    "user": "the input has a mistake",
    "memory": "a device had no memory left",
    "killed": "the worker was ended by a signal",
    "stalled": "an instruction took too long",
    "silent": "another host's heartbeat ended, or the process that starts the workers doesn't answer",
    "failed": "the worker raised an exception",
    "ended": "the worker ended with an exit code and without a record",
    "lost": "another worker was gone",
    "interrupted": "the user interrupted the run",
    "closed": "the launcher ended the worker, because another had failed",
}


@dataclass(frozen=True)
class Failure:
    """How one worker process failed."""

    rank: int
    kind: str  # a key of `KINDS`
    message: str  # a sentence or two
    traceback: str = ""  # for a `user` mistake only if the user's own code raised it

    @property
    def exit_code(self) -> int:
        """The exit code of a run with this failure."""
        return {"user": 2, "interrupted": 130}.get(self.kind, 3)


def of_exception(error: BaseException, rank: int) -> Failure:
    """Return the failure of a worker with this exception."""
    if lost(error):
        return Failure(rank, "lost", str(error).splitlines()[0] if str(error) else type(error).__name__)
    if isinstance(error, HostLostError):
        return Failure(rank, "silent", str(error).splitlines()[0])
    if is_out_of_memory(error):
        return Failure(rank, "memory", memory_text(error))
    if isinstance(error, UserError):
        return Failure(rank, "user", str(error) or type(error).__name__, traceback_of(error))
    if isinstance(error, KeyboardInterrupt):
        return Failure(rank, "interrupted", "interrupted")
    of_users_code = as_users(error)
    if of_users_code is not None:
        return of_exception(of_users_code, rank)
    if (limit := limit_text(error)) is not None:
        return Failure(rank, "failed", limit)
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Failure(rank, "failed", message, "".join(traceback.format_exception(error)))


def record(failure: Failure) -> None:
    """Write a worker's first failure where its launcher reads it, which is `pipebench run` or torchrun."""
    given, name = os.environ.get(FAILURE), os.environ.get(_ERROR_FILE)
    if given is not None:
        if os.fstat(int(given)).st_size == 0:
            os.pwrite(int(given), json.dumps(asdict(failure)).encode(), 0)
        return
    if not name or Path(name).exists():
        return
    # torchrun takes the failure with the earliest time for the cause. A killed worker's time is the second in which
    # torchrun notices, so workers that lost it claim to have failed later.
    recorded_s = int(time.time()) + (2 if failure.kind == "lost" else 0)
    extra = {"py_callstack": failure.traceback or failure.message, "timestamp": str(recorded_s)}
    data = {"message": {"message": failure.message, "extraInfo": extra}}
    # Atomically: torchrun may end this process at any moment, and then reads the file.
    files.replace(Path(name), json.dumps(data).encode())


def read(rank: int, exit_code: int, recorded: IO[bytes]) -> Failure:
    """Return a worker's failure from its exit code, negative for a signal, and its record, which may be incomplete."""
    recorded.seek(0)
    with contextlib.suppress(ValueError):
        return Failure(**json.loads(recorded.read()))
    if exit_code < 0:
        return Failure(rank, "killed", f"ended by {signal_name(-exit_code)}")
    return Failure(rank, "ended", f"ended with exit code {exit_code} and said nothing")


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9; numbers without a name stay numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def root_cause(failures: Sequence[Failure]) -> Failure:
    """Return the failure that caused the others, by kind, then by rank."""
    kinds = list(KINDS)
    return min(failures, key=lambda failure: (kinds.index(failure.kind), failure.rank))


def sentence(failure: Failure) -> str:
    """Return a failure as a sentence, with its rank unless it is the user's mistake or names a worker."""
    if failure.kind in ("user", "silent", "memory"):
        return failure.message
    if failure.kind in ("killed", "ended", "closed"):
        return f"worker process rank {failure.rank} {failure.message}"
    return f"rank {failure.rank}: {failure.message}"


def report(failure: Failure, after: str = "", *, verbose: bool = False) -> str:
    """Return the report on a run.

    Args:
        failure: the cause of the run's end.
        after: when it happened or what was tried, such as `after 3 restarts`.
        verbose: whether a `user` mistake is shown with the traceback of the user's code; other tracebacks always are.
    """
    lines = printable_lines(sentence(failure))
    if after and failure.kind != "user":
        lines[0] += f" ({after})"
    if failure.message == "ended by SIGKILL":
        lines.append("the system sends SIGKILL when memory runs out, unless somebody did")
    text = "\n".join(f"pipebench: error: {line}" for line in lines)
    shows = failure.traceback and (verbose or failure.kind != "user")
    return "\n".join([text, *printable_lines(failure.traceback)]) if shows else text
