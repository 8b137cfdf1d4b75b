"""How the replicas of a stage agree: what they send each other of their gradients, and who waits for whom."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

ALL_REDUCE, PARAMETER_SERVER, ASYNCHRONOUS = "all-reduce", "parameter-server", "asynchronous"
ALL_REDUCE_AFTER, PARAMETER_SERVER_AFTER = "all-reduce-after", "parameter-server-after"


@dataclass(frozen=True)
class Sync:
    """A way to agree.

    Attributes:
        summary: one line for people.
        kind: what its bytes are counted as.
        way: in which a buffer is summed: ALL_REDUCE, a ring, or PARAMETER_SERVER.
        overlaps: whether gradients set out while a round's last backward still runs, bucket by bucket (wait-free
            backpropagation); else all of them when it is over.
        extension: that brings what workers do instead of waiting for each other, if they don't.
    """

    summary: str
    kind: str
    way: str
    overlaps: bool = True
    extension: str = ""

    @cached_property
    def waits(self) -> bool:
        """Whether an update waits for a gradient of every replica; else each is an update of its own."""
        return not self.extension


SYNCS: Final[dict[str, Sync]] = {
    ALL_REDUCE: Sync("replicas sum their gradients in a ring", ALL_REDUCE, ALL_REDUCE),
    ALL_REDUCE_AFTER: Sync(
        "replicas sum their gradients in a ring, once the backward is over", ALL_REDUCE, ALL_REDUCE, overlaps=False
    ),
    PARAMETER_SERVER: Sync(
        "every replica is the server of a share: it sums what all send, and hands it back",
        PARAMETER_SERVER,
        PARAMETER_SERVER,
    ),
    PARAMETER_SERVER_AFTER: Sync(
        "every replica is the server of a share, and is sent it once the backward is over",
        PARAMETER_SERVER,
        PARAMETER_SERVER,
        overlaps=False,
    ),
    ASYNCHRONOUS: Sync(
        "a server applies every gradient as it comes, replicas pull the newest weights",
        PARAMETER_SERVER,
        PARAMETER_SERVER,
        extension=ASYNCHRONOUS,
    ),
}
