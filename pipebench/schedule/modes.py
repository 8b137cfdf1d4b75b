"""The table of parallelism modes: a mode is a row of data, not code.

A recipe names a row and may change its columns, to get combinations that no paper has tried.
"""

from dataclasses import dataclass
from typing import Final

from pipebench.schedule.orders import ALL_FORWARDS, INTERLEAVED, ONE_F_ONE_B, SEQUENTIAL, ZERO_BUBBLE
from pipebench.schedule.pipeline import SPLIT, STASH, WHOLE
from pipebench.schedule.placement import DUALPIPE, DUALPIPEV, ZBV
from pipebench.schedule.syncs import ALL_REDUCE, ASYNCHRONOUS, GRADIENTS, NOT_SHARDED, OPTIMIZER, PARAMETERS, RING
from pipebench.schedule.weights import CORRECT, DOUBLE_BUFFER, NEWEST_PULLED, ONE, PREDICT, WEIGHT_POLICIES

KEEP, RECOMPUTE, SWAP = "keep", "recompute", "swap"
MEMORY_POLICIES = (KEEP, RECOMPUTE, SWAP)  # what becomes of a layer's activations between forward and backward
LAYER_GROUPS = 8  # most groups of layers under sharding; the weights of a group are gathered, used and freed together
AUTO = "auto"  # the planner chooses the mode or plan


@dataclass(frozen=True)
class Mode:
    """A way to parallelise training."""

    summary: str  # one line, for lists of modes
    # Which plans it allows: `one` (a single worker), `one-stage` (one stage on all workers), `straight` (one worker per
    # stage), `equal` (equally many workers per stage), `even` (the same, an even number) or `any`
    shape: str
    order: str  # order of work: a name in `orders.ORDERS`, or the path of a file in torch's CSV form
    flush: bool  # whether every update empties the pipeline
    weights: str  # numbering of weight versions, a name in `weights.WEIGHT_POLICIES`
    sync: str = ALL_REDUCE  # how replicas of a stage agree, a name in `syncs.SYNCS`
    accumulate: int | None = 1  # minibatches of every replica per update by default; None: as many as are in flight
    chunks: int = 1  # default stages per worker
    backward: str = WHOLE  # `whole`, or `split` into an input part, whose gradients are sent at once, and a weight part
    depth: int | None = None  # minibatches in flight per input-stage replica; None for NOAM
    microbatches: bool = False  # whether a minibatch may be cut into microbatches
    recompute: bool = False  # whether activations are recomputed by default
    # In which order a sum adds the replicas' values, a name in `syncs.SUMS`; AUTO: `ordered`, unless a ring is faster
    # on the cluster
    sums: str = RING
    shard: str = NOT_SHARDED  # what replicas of a stage shard, a name in `syncs.SHARDS`
    reshard_after_forward: bool = True  # whether sharded parameters are freed between a forward and its backward

    def takes_microbatches(self, flush: bool | None = None, weights: str | None = None) -> bool:
        """Return whether minibatches may be cut into microbatches; the arguments replace columns of the mode.

        Without a flush this takes the same minibatches per round on all stages, and weights that all units of a round
        share.
        """
        flush, policy = self.flush if flush is None else flush, WEIGHT_POLICIES[weights or self.weights]
        return self.microbatches and (flush or (policy.aim is not None and self.shape == "equal"))

    @property
    def is_one_stage(self) -> bool:
        """Whether its plans have one stage, on one worker or on all."""
        return self.shape in ("one", "one-stage")

    @property
    def is_sharded(self) -> bool:
        """Whether replicas of a stage each step on a shard of its parameters."""
        return self.shard != NOT_SHARDED

    @property
    def chooses_memory(self) -> bool:
        """Whether the planner can choose a memory policy for every layer, as vPipe's does.

        It can with several stages, one per worker, whose backwards aren't split.
        """
        return not self.is_one_stage and self.chunks == 1 and self.backward == WHOLE

    @property
    def ties(self) -> bool:
        """Whether stages whose layers share a weight may hold a copy each, and sum its gradients.

        Their updates must average the same minibatches, and none may be due before the first of these stages can make
        its own. Replicas that shard only the optimizer's state are excluded. In a pipeline they don't sum the shards of
        other stages' copies, and in data parallelism a second copy would only cost memory.
        """
        return (
            self.shard != OPTIMIZER
            and WEIGHT_POLICIES[self.weights].together
            and (self.flush or (self.shape == "equal" and self.chunks == 1))
        )

    @property
    def weight_sets(self) -> int | None:
        """Most sets of weights that a replica holds; None for one per minibatch in flight."""
        return WEIGHT_POLICIES[self.weights].most_sets(shares=self.microbatches or self.accumulate != 1)


MODES: Final[dict[str, Mode]] = {
    "single": Mode("one worker, one minibatch at a time", "one", ONE_F_ONE_B, True, ONE, depth=1),
    "dp": Mode("bulk-synchronous data parallelism (BSP)", "one-stage", ONE_F_ONE_B, True, ONE, depth=1),
    "dp-asp": Mode(
        "asynchronous data parallelism (ASP)", "one-stage", ONE_F_ONE_B, False, NEWEST_PULLED, sync=ASYNCHRONOUS,
        depth=1,
    ),
    "zero1": Mode(
        "ZeRO-1: data parallelism, optimizer state sharded", "one-stage", SEQUENTIAL, True, ONE, chunks=LAYER_GROUPS,
        depth=1, sums=AUTO, shard=OPTIMIZER,
    ),
    "zero2": Mode(
        "ZeRO-2: data parallelism, optimizer state and gradients sharded", "one-stage", SEQUENTIAL, True, ONE,
        chunks=LAYER_GROUPS, depth=1, sums=AUTO, shard=GRADIENTS,
    ),
    "fsdp": Mode(
        "FSDP, ZeRO-3: data parallelism, parameters sharded, too, and gathered before use", "one-stage", SEQUENTIAL,
        True, ONE, chunks=LAYER_GROUPS, depth=1, sums=AUTO, shard=PARAMETERS,
    ),
    "model": Mode("model parallelism, one minibatch in the pipeline", "straight", ONE_F_ONE_B, True, ONE, depth=1),
    "hybrid": Mode("stages replicated, nothing pipelined", "any", ONE_F_ONE_B, True, ONE, depth=1),
    "gpipe": Mode(
        "GPipe: all forwards, all backwards, flush", "any", ALL_FORWARDS, True, ONE, microbatches=True, recompute=True
    ),
    "pipedream-flush": Mode("1F1B with a flush at every update", "any", ONE_F_ONE_B, True, ONE, microbatches=True),
    "interleaved": Mode(
        "1F1B with a flush, several stages per worker", "equal", INTERLEAVED, True, ONE, chunks=2, microbatches=True
    ),
    "zero-bubble": Mode(
        "ZB-H1: 1F1B with a flush whose weight gradients fill the bubble", "any", ZERO_BUBBLE, True, ONE,
        backward=SPLIT, microbatches=True,
    ),
    "zbv": Mode(
        "ZB-V: two stages per worker in a V, no bubble if all passes take as long", "equal", ZBV, True, ONE, chunks=2,
        backward=SPLIT, microbatches=True,
    ),
    "dualpipev": Mode(
        "DualPipeV: two stages per worker in a V, forwards beside backwards", "equal", DUALPIPEV, True, ONE, chunks=2,
        backward=SPLIT, microbatches=True,
    ),
    "dualpipe": Mode(
        "DualPipe: two replicas of every stage, pipelines in both directions", "even", DUALPIPE, True, ONE, chunks=2,
        backward=SPLIT, microbatches=True,
    ),
    "pipedream": Mode("1F1B-RR without a flush, weight stashing", "any", ONE_F_ONE_B, False, STASH),
    "pipedream-2bw": Mode(
        "1F1B without a flush, gradients accumulated, two weight versions", "equal", ONE_F_ONE_B, False, DOUBLE_BUFFER,
        accumulate=None,
    ),
    "spectrain": Mode("SpecTrain: 1F1B without a flush, predicted weights", "any", ONE_F_ONE_B, False, PREDICT),
    "xpipe": Mode(
        "XPipe: SpecTrain's prediction, minibatches cut into microbatches", "equal", ONE_F_ONE_B, False, PREDICT,
        microbatches=True,
    ),
    "pipemare": Mode("PipeMare: 1F1B without a flush, corrected weights", "any", ONE_F_ONE_B, False, CORRECT),
}  # fmt: skip
