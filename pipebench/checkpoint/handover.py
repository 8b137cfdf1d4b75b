"""State transfer between workers when layers move from stage to stage.

A state is in pieces, each under a key. Every worker offers the pieces that it saves in checkpoints, and requests those
that its stages need and it lacks. So each piece is sent once to every worker that lacks it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from pipebench.checkpoint.share import Share
from pipebench.checkpoint.state import ModelState
from pipebench.model.values import bytes_in

Key = tuple[str, str]  # a section of `ModelState`, and the key in it


@dataclass(frozen=True)
class StateClaim:
    """What a worker needs of a model's state."""

    names: frozenset[str]  # the model's own names of the parameters and buffers of its stages
    stateful: frozenset[str]  # qualified names of its stages' modules that carry a state
    share: Share  # of any of its stages, for the replica's index

    def wants(self, key: Key) -> bool:
        """Return whether a piece is needed.

        Every worker needs the loss scales: a stage without parameters uses those of the others.
        """
        section, name = key
        if section == "loss_scale":
            return True
        if section == "counters":
            replica, _, name = name.partition("/")
            return int(replica) == self.share.replica and name in self.names
        if section == "carried":
            stream, _, module = name.split("/", 2)
            return module in self.stateful and self.share.holds(int(stream))
        return name in self.names


def keys_of(state: ModelState) -> list[Key]:
    """Return the key of every piece of a state."""
    return [(section.name, name) for section in fields(state) for name in getattr(state, section.name)]


def pieces(state: ModelState, keys: Iterable[Key]) -> ModelState:
    """Return some pieces of a state, as references."""
    found = ModelState()
    for section, name in keys:
        getattr(found, section)[name] = getattr(state, section)[name]
    return found


def retained(held: ModelState, claim: StateClaim) -> ModelState:
    """Return the pieces that a worker needs and already holds."""
    return pieces(held, [key for key in keys_of(held) if claim.wants(key)])


def requests_of(
    taker: int, offers: Sequence[Iterable[Key]], has: Collection[Key], claim: StateClaim
) -> dict[int, list[Key]]:
    """Return the pieces that a worker requests, by the worker that gives them: the first one that offers a piece.

    Args:
        taker: the worker that requests.
        offers: every worker's pieces.
        has: the pieces that `taker` holds.
        claim: which pieces it needs.
    """
    found = {*has}
    requests: dict[int, list[Key]] = {}
    for giver, offered in enumerate(offers):
        for key in offered if giver != taker else ():
            if key not in found and claim.wants(key):
                found.add(key)
                requests.setdefault(giver, []).append(key)
    return requests


def state_bytes(state: ModelState) -> int:
    """Return the bytes of the tensors of a state."""
    sections: Iterable[Mapping[str, object]] = (getattr(state, section.name) for section in fields(state))
    return sum(bytes_in(dict(section)) for section in sections)
