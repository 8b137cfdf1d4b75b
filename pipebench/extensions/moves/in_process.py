"""Moves of workers that share a process; a simulation, which has none, doesn't load it."""

from pipebench.engine.collectives import InProcessCollectives
from pipebench.extensions.moves.engine import EngineMoves
from pipebench.extensions.moves.monitor import monitors
from pipebench.extensions.moves.settings import settings_of
from pipebench.extensions.moves.worker import moving_worker


def in_process(collectives: InProcessCollectives) -> EngineMoves:
    """Return the moves of workers that share a process."""
    moves, setup = EngineMoves(collectives.setup), collectives.setup
    if settings_of(setup.pipeline).balances:
        for worker, monitor in zip(collectives.workers, monitors(setup, moves.decided), strict=True):
            moving_worker(worker).monitor = monitor
    return moves
