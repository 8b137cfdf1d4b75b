"""`pipebench ui`: the recorded runs in a browser."""

import click

from pipebench.run.folder import records
from pipebench.tracking.ui import open_ui


@click.command
@click.option("--port", type=click.IntRange(1, 65535), help="Port on 127.0.0.1; by default a free one, from 5000 on.")
def ui(port: int | None) -> int:
    """Serve the MLflow UI for the store that `pipebench run` writes to, on this machine only (127.0.0.1).

    The store is mlflow.db in the working directory, or the one in MLFLOW_TRACKING_URI.
    """
    return open_ui(port, records())
