"""What a worker process is before it is pipebench: `python launch_child.py PARENT NAME=VALUE... -- COMMAND...`.

It ties the process's life to its parent's, before anything heavy is imported: a parent that dies, however it dies,
leaves no workers behind. Then it becomes COMMAND. Standard library only, so that it starts in an instant.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PID_FILE = "pid"
_PR_SET_PDEATHSIG = 1


def main(words: Sequence[str]) -> None:
    """Become the command: `words` are the parent's process id, settings of the environment, `--` and the command."""
    end = words.index("--")
    parent, settings, command = int(words[0]), words[1:end], list(words[end + 1 :])
    end_with(parent)
    # The parent hears of Ctrl-C and asks the workers to stop; whoever else sends it to them means the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for setting in settings:
        name, _, value = setting.partition("=")
        os.environ[name] = value
    error_file = os.environ["TORCHELASTIC_ERROR_FILE"]
    with open(os.path.join(os.path.dirname(error_file), PID_FILE), "w", encoding="ascii") as file:
        file.write(f"{os.environ['RANK']} {os.getpid()}\n")
    os.execvp(command[0], command)


def end_with(parent: int) -> None:
    """Let this process end when its parent, whose process id is given, does; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            # It died before it was watched.
            sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
