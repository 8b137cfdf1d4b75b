"""MLflow is the record of every run; a tracking failure must never lose a training result."""

from pipebench.tracking.run_log import RunLog, Status, Tracking
from pipebench.tracking.store import default_uri
from pipebench.tracking.summary import summarise_curves, summarise_seeds
from pipebench.tracking.ui import open_ui

__all__ = ["RunLog", "Status", "Tracking", "default_uri", "open_ui", "summarise_curves", "summarise_seeds"]
