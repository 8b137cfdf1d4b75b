"""MLflow is the record of every run; a tracking failure must never lose a training result."""

from pipebench.tracking.entries import logged_params
from pipebench.tracking.record import RunRecord, Status, read_record
from pipebench.tracking.run_log import RunLog, Tracking
from pipebench.tracking.store import default_uri, require_writable
from pipebench.tracking.summary import seed_medians, summarise_curves, summarise_seeds
from pipebench.tracking.ui import open_ui

__all__ = [
    "RunLog",
    "RunRecord",
    "Status",
    "Tracking",
    "default_uri",
    "logged_params",
    "open_ui",
    "read_record",
    "require_writable",
    "seed_medians",
    "summarise_curves",
    "summarise_seeds",
]
