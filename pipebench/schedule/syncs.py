"""How replicas of a stage synchronise gradients: the algorithm, when it runs, and what they shard."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

ALL_REDUCE, PARAMETER_SERVER, ASYNCHRONOUS = "all-reduce", "parameter-server", "asynchronous"
ALL_REDUCE_AFTER, PARAMETER_SERVER_AFTER = "all-reduce-after", "parameter-server-after"
# In which order a sum adds its members' values: as a ring passes them on, so that the order differs from part to part
# of a buffer, or always by replica.
RING, ORDERED = "ring", "ordered"
SUMS: Final = (RING, ORDERED)
# The halves of a sum, as kinds of bytes: every member gets the sum of its shard; every member gets all shards.
REDUCE_SCATTER, ALL_GATHER = "reduce-scatter", "all-gather"
ALL_TO_ALL = "all-to-all"  # an algorithm: every member sends every other its part, as Gloo scatters and gathers
# What replicas of a stage shard instead of each holding all (ZeRO, Rajbhandari et al., SC'20, stages 1 to 3): the
# optimizer's state; gradients, too; parameters, too.
NOT_SHARDED, OPTIMIZER, GRADIENTS, PARAMETERS = "none", "optimizer", "gradients", "parameters"
SHARDS: Final = (NOT_SHARDED, OPTIMIZER, GRADIENTS, PARAMETERS)


@dataclass(frozen=True)
class Sync:
    """A way to synchronise."""

    summary: str  # one line, for lists
    # How a buffer is summed, and as which kind its bytes are counted: ALL_REDUCE, in a ring, or PARAMETER_SERVER
    algorithm: str
    overlaps: bool = True  # whether buckets are sent during a backward (wait-free backpropagation), else after it
    extension: str = ""  # of a way in which replicas don't wait for each other, the extension that implements it

    @cached_property
    def waits(self) -> bool:
        """Whether an update averages gradients of all replicas; else every gradient makes an update of its own."""
        return not self.extension


SYNCS: Final[dict[str, Sync]] = {
    ALL_REDUCE: Sync("replicas sum their gradients in a ring", ALL_REDUCE),
    ALL_REDUCE_AFTER: Sync(
        "replicas sum their gradients in a ring, once the backward is over", ALL_REDUCE, overlaps=False
    ),
    PARAMETER_SERVER: Sync(
        "every replica is the server of a share: it sums what all send, and hands it back", PARAMETER_SERVER
    ),
    PARAMETER_SERVER_AFTER: Sync(
        "every replica is the server of a share, and is sent it once the backward is over",
        PARAMETER_SERVER,
        overlaps=False,
    ),
    ASYNCHRONOUS: Sync(
        "a server applies every gradient as it comes, replicas pull the newest weights",
        PARAMETER_SERVER,
        extension=ASYNCHRONOUS,
    ),
}


def algorithm_of(sync: str, sums: str) -> str:
    """Return the algorithm by which replicas that aren't sharded sum a buffer, with an order of adding in `SUMS`."""
    algorithm = SYNCS[sync].algorithm
    return PARAMETER_SERVER if sums == ORDERED and algorithm == ALL_REDUCE else algorithm
