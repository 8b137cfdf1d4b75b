"""Engines that are captured at a drain and set up again."""

import copy

from pipebench.checkpoint.state import ModelState
from pipebench.engine.setup import Setup
from pipebench.engine.virtual import VirtualEngine
from tests.support import make_engine


def captured(engine: VirtualEngine) -> ModelState:
    """Return the state that an engine's workers would write, as it would be read back."""
    states = [state for _, state in engine.parts()]
    return copy.deepcopy(ModelState.merge(ModelState.from_plain(state.to_plain()) for state in states))


def restored(setup: Setup, state: ModelState) -> VirtualEngine:
    """Return a new engine that continues from a state."""
    engine = make_engine(setup)
    for worker in engine.workers:
        worker.restore(state)
    return engine
