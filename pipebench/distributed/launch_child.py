"""The first program of a worker process: `python launch_child.py PARENT COMMAND...`.

It ties the process's life to its parent's before heavy imports, so that a parent that dies leaves no workers behind,
and then becomes COMMAND. Standard library only, for a fast start.

`python -m` alone would search the working directory first: a file there called yaml.py or torch.py would be imported by
every worker.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence


def python_module(name: str) -> list[str]:
    """Return a command that runs a module as `python -m` does, with this process's search path.

    The module's arguments may be appended.
    """
    # -P: the working directory is searched only if this process searches it.
    program = f"import runpy, sys; sys.path[:] = {sys.path!a}; runpy.run_module({name!r}, None, '__main__', True)"
    return [sys.executable, "-P", "-c", program]


_PR_SET_PDEATHSIG = 1


def main(words: Sequence[str]) -> None:
    """Become the command; `words` are the parent's process id and the command."""
    end_with(int(words[0]))
    # The parent handles Ctrl-C and stops the workers, so they ignore SIGINT.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.execvp(words[1], list(words[1:]))


def end_with(parent: int) -> None:
    """End this process when its parent, of this process id, ends; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)  # the parent had ended before the call above


if __name__ == "__main__":
    main(sys.argv[1:])
