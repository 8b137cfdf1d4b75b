"""A working directory with a real SQLite store, for all tests of the folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipebench.tracking.run_log import Tracking


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory whose store is shared by the package: making one takes seconds."""
    path = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.chdir(path)
        yield path


@pytest.fixture(scope="package")
def tracking(folder: Path) -> Tracking:
    tracking = Tracking("suite")
    assert tracking.wait_until_ready()
    return tracking
