"""Records every run in MLflow; a tracking failure never loses a training result."""

from pipebench.tracking.connection import default_uri
from pipebench.tracking.entries import logged_params
from pipebench.tracking.identity import identity_tags, recipe_hash, source_version
from pipebench.tracking.inputs import Inputs
from pipebench.tracking.record import read_record
from pipebench.tracking.run_log import RunLog, Tracking
from pipebench.tracking.store import require_writable
from pipebench.tracking.summary import count_reached, least_losses, seed_medians, summarise_seeds
from pipebench.tracking.ui import open_ui

__all__ = [
    "Inputs",
    "RunLog",
    "Tracking",
    "count_reached",
    "default_uri",
    "identity_tags",
    "least_losses",
    "logged_params",
    "open_ui",
    "read_record",
    "recipe_hash",
    "require_writable",
    "seed_medians",
    "source_version",
    "summarise_seeds",
]
