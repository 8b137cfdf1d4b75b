"""A user's mistake that all workers find before they have joined, such as one in the recipe, is reported by rank 0.

Every worker reads the recipe itself. Rank 0 writes into the job's store what it has found, and the others look there
before they report. So what only one worker finds, such as data that its host lacks, is reported by that worker.
"""

import hashlib
import time

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined] # torch lists them nowhere

from pipebench.distributed.launch_join import HostSlot, connect, peers
from pipebench.errors import UserError

_POLL_S = 0.02  # between two looks into the store
_SERVING_S = 10.0  # for which a rank 0 that serves the store waits for the others
_PATIENCE_S = 2 * _SERVING_S  # for rank 0, which may take longer to find the mistake


def found_none(store: Store, place: HostSlot) -> None:
    """Say, as a worker that begins to join, that it has found no mistake."""
    if place.connection is None:
        with peers():
            _room(store).set(f"found/{place.rank}", "")


def is_rank_0s(mistake: str, place: HostSlot, patience_s: float = _PATIENCE_S) -> bool:
    """Return whether rank 0, which is another worker, has reported the same mistake; false if it doesn't answer."""
    if place.rank == 0 or place.connection is not None:
        return False
    until_s = time.monotonic() + patience_s
    try:
        room = _room(connect(place, patience_s))
        while not room.check(["found/0"]):
            if time.monotonic() > until_s:
                return False
            time.sleep(_POLL_S)
        found = room.get("found/0")
        room.set(f"found/{place.rank}", _digest(mistake))
    except (UserError, RuntimeError):  # nothing answers, or rank 0 ends
        return False
    return bool(found == _digest(mistake).encode())


def tell_the_others(mistake: str, place: HostSlot, patience_s: float = _SERVING_S) -> None:
    """Answer the others' `is_rank_0s`, on rank 0 once it has reported; if it serves the store, until all have asked."""
    if place.rank > 0 or place.connection is not None:
        return
    until_s = time.monotonic() + patience_s
    others = [f"found/{rank}" for rank in range(1, place.size)]
    try:
        room = _room(connect(place, patience_s))
        room.set("found/0", _digest(mistake))
        while not (place.agent_store or room.check(others) or time.monotonic() > until_s):
            time.sleep(_POLL_S)
    except (UserError, RuntimeError):  # the store can't be served here, or its launcher has ended
        return


def _room(store: Store) -> Store:
    return PrefixStore("pipebench/mistake", store)


def _digest(mistake: str) -> str:
    return hashlib.sha256(mistake.encode(errors="replace")).hexdigest()
