"""Close the record of a run whose processes ended without doing so: send what is unsent, and how the run ended.

Importing MLflow takes seconds, on a busy machine half a minute. After a second Ctrl-C another process closes the record
(`pipebench.run.closing FOLDER SUITE`), so the prompt returns at once.
"""

import logging
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pipebench.distributed.launch import INTERRUPTED
from pipebench.distributed.launch_child import python_module
from pipebench.errors import UserError
from pipebench.run.folder import RunFolder
from pipebench.run.lock import CLOSES, locked
from pipebench.tracking import RunLog, Tracking, read_record
from pipebench.tracking.entries import outcome_status
from pipebench.train.result import RunResult

FAILED = 3  # the exit code of a run whose workers have failed
_closing: list["subprocess.Popen[bytes]"] = []  # referenced because Python warns if a running one is collected
_LOG = logging.getLogger("pipebench.run")
_PATIENCE_S = 30.0  # for the stopped process to release the run


def close_record(folder: RunFolder, code: int, log: RunLog) -> None:
    """Close a run's record, in the background if its user ended it.

    If MLflow fails, the run's folder still has the record. `code` is the exit code of the run's processes, `log` what
    has followed them.
    """
    try:
        suite = folder.read().suite
        if code != INTERRUPTED:
            if read_record(folder.record_path) is not None:
                log.log_file()
                log.finish(status="FAILED")
            return
        log.stop()
        # In a session of its own it gets neither the terminal's Ctrl-C nor its hang-up.
        process = subprocess.Popen(
            [*python_module("pipebench.run.closing"), str(folder.path), suite],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        _closing.append(process)
    except Exception as error:  # any disk failure: the launcher's report stands
        _LOG.debug("the record of %s could not be closed: %s", folder.run_id, error)


def end_record(folder: RunFolder, result: RunResult, log: RunLog) -> None:
    """Close the record of a run that has ended, if its process could not: on a full disk the end is missing."""
    record = read_record(folder.record_path)
    if record is None or record.status is None:
        log.finish(status=outcome_status(result))


def main(words: Sequence[str]) -> None:
    """Close the record of a run ended by its user, unless it was resumed meanwhile; `words` are folder and suite."""
    folder, suite = RunFolder(Path(words[0])), words[1]
    with suppress(UserError), locked(folder.path, patience_s=_PATIENCE_S, doing=CLOSES):
        log = Tracking(suite).reopen(folder.record_path)
        if log is not None:
            log.log_file()
            log.finish(status="KILLED")


if __name__ == "__main__":
    main(sys.argv[1:])
