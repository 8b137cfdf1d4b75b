"""Engines that are captured at a drain and set up again."""

import copy

from pipebench.checkpoint.state import ModelState
from pipebench.engine.setup import Setup, share_of
from pipebench.engine.virtual import VirtualEngine
from tests.support import make_engine


def captured(engine: VirtualEngine) -> ModelState:
    """Return the state that an engine's workers would write, as it would be read back."""
    states = [replica.state(share_of(engine.setup, worker)) for worker, replica in enumerate(engine.replicas)]
    return copy.deepcopy(ModelState.merge(ModelState.from_plain(state.to_plain()) for state in states))


def restored(setup: Setup, state: ModelState) -> VirtualEngine:
    """Return a new engine that goes on from a state."""
    engine = make_engine(setup)
    for worker, replica in enumerate(engine.replicas):
        replica.restore(state, share_of(setup, worker))
    return engine
