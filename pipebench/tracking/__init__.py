"""MLflow is the record of every run; a tracking failure must never lose a training result."""

from pipebench.tracking.entries import logged_params
from pipebench.tracking.run_log import RunLog, Status, Tracking
from pipebench.tracking.store import default_uri, require_writable
from pipebench.tracking.summary import seed_medians, summarise_curves, summarise_seeds
from pipebench.tracking.ui import open_ui

__all__ = [
    "RunLog",
    "Status",
    "Tracking",
    "default_uri",
    "logged_params",
    "open_ui",
    "require_writable",
    "seed_medians",
    "summarise_curves",
    "summarise_seeds",
]
