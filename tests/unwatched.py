"""A worker's `Control` without its threads, so without heartbeats, watchdog and requests to stop."""

from torch.distributed import HashStore  # type: ignore[attr-defined] # torch lists it nowhere

from pipebench.distributed.control import Control
from pipebench.engine.setup import Setup
from tests.patience import PATIENCE_S


def unwatched(setup: Setup) -> Control:
    return Control(HashStore(), 0, 1, setup.pipeline, stall_limit_s=PATIENCE_S)
