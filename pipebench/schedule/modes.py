"""The table of parallelism modes: a mode is a row of data, not code.

A recipe names a row, and may overwrite its columns to get a combination no paper has tried.
"""

from dataclasses import dataclass

ALL_FORWARDS, ONE_F_ONE_B = "all-forwards", "1f1b"
ONE, STASH, VERTICAL_SYNC, NONE = "one", "stash", "stash-vertical-sync", "none"
TWO_BUFFERS = "two-buffers"
KEEP, RECOMPUTE, SWAP = "keep", "recompute", "swap"  # of a layer's activations; swapping isn't done yet
AUTO = "auto"  # leaves the choice of a mode, or of a plan, to the planner
ORDERS = (ALL_FORWARDS, ONE_F_ONE_B)
WEIGHT_POLICIES = (ONE, STASH, VERTICAL_SYNC, NONE)
# Weight versions that a replica keeps; None for one per minibatch in flight.
_VERSIONS: dict[str, int | None] = {ONE: 1, NONE: 1, TWO_BUFFERS: 2, STASH: None, VERTICAL_SYNC: None}


@dataclass(frozen=True)
class Mode:
    """A point in the space of ways to parallelise training.

    Attributes:
        summary: one line for people.
        shape: plans it takes: `one` (a single worker), `one-stage` (one stage on all workers), `straight` (one
            worker per stage), `equal` (equally many workers for every stage) or `any`.
        order: `all-forwards` (every forward of a flush, then every backward, in reverse) or `1f1b`.
        weights: `one` version (the mode flushes at every update); or no flush, with versions kept in a `stash`,
            `stash-vertical-sync` (all stages use the input stage's version) or `none` (the broken naive pipeline).
        depth: minibatches in flight per input-stage replica; None for NOAM.
        microbatches: whether a minibatch may be cut into microbatches.
        recompute: whether activations are computed again for the backward, unless the recipe says otherwise.
        chunks: stages per worker. With P positions in the pipeline, stages s and s + P are on the same workers.
    """

    summary: str
    shape: str
    order: str
    weights: str
    depth: int | None = None
    microbatches: bool = False
    recompute: bool = False
    chunks: int = 1

    @property
    def weight_versions(self) -> int | None:
        """Weight versions that a replica keeps; None for one per minibatch in flight."""
        return _VERSIONS[self.weights]

    @property
    def flushes(self) -> bool:
        """Whether the pipeline is emptied as part of every update."""
        return self.weights == ONE


MODES: dict[str, Mode] = {
    "single": Mode("one worker, one minibatch at a time", "one", ONE_F_ONE_B, ONE, depth=1),
    "dp": Mode("bulk-synchronous data parallelism (BSP)", "one-stage", ONE_F_ONE_B, ONE, depth=1),
    "model": Mode("model parallelism, one minibatch in the pipeline", "straight", ONE_F_ONE_B, ONE, depth=1),
    "gpipe": Mode(
        "GPipe: all forwards, all backwards, flush", "any", ALL_FORWARDS, ONE, microbatches=True, recompute=True
    ),
    "pipedream-flush": Mode("1F1B with a flush at every update", "any", ONE_F_ONE_B, ONE, microbatches=True),
    "pipedream": Mode("1F1B-RR without a flush, weight stashing", "any", ONE_F_ONE_B, STASH),
}
