"""Closes the record of a run whose processes ended without doing so: what they couldn't send, and how the run ended.

MLflow takes seconds to be imported, on a busy machine half a minute. Who presses Ctrl-C twice isn't kept waiting for
it: another process, `pipebench.run.closing FOLDER SUITE`, closes the record while the prompt is back.
"""

import logging
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pipebench.distributed.launch import INTERRUPTED
from pipebench.distributed.launch_command import python_module
from pipebench.errors import UserError
from pipebench.run.folder import RunFolder
from pipebench.run.lock import CLOSES, locked
from pipebench.tracking import Tracking
from pipebench.tracking.record import Status

_closing: list["subprocess.Popen[bytes]"] = []  # Python warns of one that is forgotten before it has ended
_LOG = logging.getLogger("pipebench.run")
_PATIENCE_S = 30.0  # for the process that was stopped to let go of the run


def close_record(folder: RunFolder, code: int) -> None:
    """Close a run's record, now or, if its user has ended it, soon; where MLflow fails, the run's folder has it.

    Args:
        folder: the run's.
        code: the exit code that its processes came to.
    """
    try:
        suite = folder.read().suite
        if code != INTERRUPTED:
            _close(folder.record_path, suite, "FAILED")
            return
        # Of a session of its own, it hears neither the terminal's Ctrl-C nor its end.
        process = subprocess.Popen(
            [*python_module("pipebench.run.closing"), str(folder.path), suite],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        _closing.append(process)
    except Exception as error:  # whatever the disk can think of: the launcher's report stands
        _LOG.debug("the record of %s could not be closed: %s", folder.run_id, error)


def _close(record: Path, suite: str, status: Status) -> None:
    log = Tracking(suite).reopen(record)
    if log is not None:
        log.finish(status=status)


def main(words: Sequence[str]) -> None:
    """Close the record of a run that its user has ended, unless somebody goes on with it before this process can.

    Args:
        words: the run's folder, and the suite.
    """
    folder, suite = RunFolder(Path(words[0])), words[1]
    with suppress(UserError), locked(folder.path, patience_s=_PATIENCE_S, doing=CLOSES):
        _close(folder.record_path, suite, "KILLED")


if __name__ == "__main__":
    main(sys.argv[1:])
