"""Moves of workers that share a process. A module of its own, since simulations have no workers to import."""

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
