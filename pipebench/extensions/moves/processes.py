"""Moves of a worker in a process of its own, and the channels that layers are sent over."""

from collections.abc import Iterator

from pipebench.distributed.collectives import ProcessCollectives
from pipebench.engine.setup import Setup
from pipebench.extensions.moves.engine import EngineMoves
from pipebench.extensions.moves.monitor import monitors
from pipebench.extensions.moves.repartition_plan import shape_problems
from pipebench.extensions.moves.settings import settings_of
from pipebench.extensions.moves.worker import moving_worker
from pipebench.model.allocator import allocator_of
from pipebench.schedule.operations import MIGRATION


def processes(collectives: ProcessCollectives) -> EngineMoves:
    """Return the moves of a worker with a process of its own."""
    moves, setup, worker = EngineMoves(collectives.setup), collectives.setup, collectives.worker
    if settings_of(setup.pipeline).balances:
        moving_worker(worker).monitor = monitors(setup, moves.decided, allocator_of(setup.device))[worker.index]
    return moves


def channels(setup: Setup) -> Iterator[tuple[str, int, int]]:
    """Yield (kind, sending stage, receiving stage) of every channel between neighbours, if layers move in training."""
    if not settings_of(setup.pipeline).live or any(shape_problems(setup.pipeline)):
        return
    for left in range(setup.pipeline.num_stages - 1):
        yield MIGRATION, left, left + 1
        yield MIGRATION, left + 1, left
