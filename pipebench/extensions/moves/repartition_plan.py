"""Moves of layers between neighbouring stages during training: which stage runs a layer for which minibatch.

Paper: vPipe (TPDS'21), section 4.3 and equation 4. Differs: the paper copies saved activations to the new stage. Here
the layers' inputs are sent, and the new stage recomputes the layers' forward before the backward.

The pipeline is not drained for a move. A move is given by K, the first minibatch whose forward runs under the new
cuts. At the boundary between stages a and a + 1, backwards run under the new cuts from minibatch B = K - d_a + 1 on,
where d_a is the depth of stage a: the minibatches it has in flight. In 1F1B order this is where both stages can switch:
stage a runs the backward of B - 1 right before its forward of K, and stage a + 1 runs the backward of B right after its
forward of K - 1. So every unit passes every layer once in each direction, and no stage's order of passes changes.

Updates follow the backwards: the old owner of a layer makes those up to B - 1, the new owner all later ones. A forward
reads the newest version of its stage, and the backward reads the same version, on either stage: units whose forward
and backward run on different stages carry their version along. If every update flushes the pipeline, nothing is in
flight at an update, and B = K.

A move may also change activation policies. A unit keeps the policies of its forward for its backward, on any stage.
"""

import itertools
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pipebench.errors import PlanError
from pipebench.model.plan import Plan
from pipebench.schedule.csv_form import is_csv
from pipebench.schedule.pipeline import STASH, WHOLE, Pipeline
from pipebench.schedule.syncs import SYNCS

Starts = tuple[int, ...]  # first layer of every stage but the first
Policies = tuple[str, ...]  # of every layer: what is done with its activations


class CutLayout(NamedTuple):
    """Cuts and policies that a unit runs under."""

    starts: Starts  # first layer of every stage but the first
    memory: Policies  # activation policy of every layer

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.memory)

    @property
    def ends(self) -> tuple[int, ...]:
        """Where stages begin and, last, end."""
        return (0, *self.starts, self.num_layers)

    def with_policies(self, memory: Policies, stages: Collection[int]) -> "CutLayout":
        """Return the layout with the policies of `memory` in some stages."""
        given = (
            (memory if stage in stages else self.memory)[start:stop]
            for stage, (start, stop) in enumerate(itertools.pairwise(self.ends))
        )
        return CutLayout(self.starts, tuple(itertools.chain.from_iterable(given)))


def layout_of(plan: Plan) -> CutLayout:
    """Return a plan's cuts and activation policies."""
    return CutLayout(plan.starts, plan.memory)


@dataclass(frozen=True)
class Repartition:
    """New cuts for a pipeline in training."""

    at: int  # K, the first minibatch since the drain that runs forward under them
    starts: Starts  # first layer of every stage but the first
    memory: Policies | None = None  # activation policy of every layer; None: unchanged

    def after(self, before: CutLayout) -> CutLayout:
        """Return the layout that follows `before`."""
        return CutLayout(self.starts, before.memory if self.memory is None else self.memory)


class BlockTransfer(NamedTuple):
    """A block of consecutive layers that moves to a neighbouring stage."""

    at: int  # K of its move
    first: int  # B, the first minibatch whose backward through the block runs on stage `target`
    source: int  # the stage that gives the block
    target: int  # the stage that takes it
    start: int  # first layer of the block
    stop: int  # the layer after its last

    @property
    def goes_left(self) -> bool:
        """Whether it moves to the previous stage."""
        return self.target < self.source


def block_transfers(pipeline: Pipeline, before: Starts, move: Repartition) -> tuple[BlockTransfer, ...]:
    """Return the blocks that a move transfers, at most one per boundary, in the order of boundaries.

    Args:
        pipeline: the pipeline, the same under all cuts.
        before: cuts before the move.
        move: the new cuts.
    """
    found = []
    for left, (old, new) in enumerate(zip(before, move.starts, strict=True)):
        first = first_backward(pipeline, move.at, left)
        if new < old:
            found.append(BlockTransfer(move.at, first, left, left + 1, new, old))
        elif new > old:
            found.append(BlockTransfer(move.at, first, left + 1, left, old, new))
    return tuple(found)


def first_backward(pipeline: Pipeline, at: int, left: int) -> int:
    """Return B of a move at minibatch `at`, for the boundary between stage `left` and the next."""
    return at if pipeline.flushes else at - pipeline.warmups[left] + 1


class RepartitionPlan:
    """The moves of one segment of training, some of which may be announced while it runs.

    Thread-safe. Workers' programs query it for every unit. They get consistent answers, since a move is announced
    before any worker reaches the first minibatch that it changes.

    Args:
        pipeline: the pipeline, the same under all cuts.
        layout: cuts and policies at the drain before the segment.
    """

    def __init__(self, pipeline: Pipeline, layout: CutLayout) -> None:
        self.announced: tuple[Repartition, ...] = ()
        self.begun = 0  # minibatches that have begun on stage 0; on other processes, as far as known
        self._pipeline = pipeline
        self._lock = threading.Lock()
        self._transfers: tuple[BlockTransfer, ...] = ()
        self._layouts: tuple[CutLayout, ...] = (layout,)

    @property
    def last_layout(self) -> CutLayout:
        """The layout after the last move."""
        return self._layouts[-1]

    def begin(self, minibatch: int) -> None:
        """Record that a minibatch begins."""
        if minibatch >= self.begun:
            self.begun = minibatch + 1

    def announce(self, move: Repartition) -> None:
        """Add a move; raises a PlanError if it is impossible, or too early."""
        with self._lock:
            for problem in self.problems(move):
                raise PlanError(problem)
            self._transfers += block_transfers(self._pipeline, self.last_layout.starts, move)
            self._layouts += (move.after(self.last_layout),)
            self.announced += (move,)

    def problems(self, move: Repartition) -> Iterator[str]:
        """Yield a sentence per reason why a move is impossible, or comes too early."""
        yield from shape_problems(self._pipeline)
        yield from layout_problems(self.last_layout, move)
        depth, last = self._pipeline.depth, self.announced[-1].at if self.announced else 0
        if self._pipeline.flushes:
            period = self._pipeline.period
            earliest = max(-(-self.begun // period) * period, last + period)
            if move.at < earliest or move.at % period:
                yield (
                    f"a move from minibatch {move.at} on: updates come every {period} minibatches, and layers move "
                    f"between two of them; from {earliest} on, a multiple of {period}"
                )
        elif move.at < max(self.begun, last) + 2 * depth:
            yield (
                f"a move from minibatch {move.at} on comes too early: {self.begun} minibatches have begun"
                + (f", the move before is from minibatch {last} on" if last else "")
                + f", and it takes twice the depth, {2 * depth} more; from {max(self.begun, last) + 2 * depth} on"
            )

    def forward_layout(self, minibatch: int) -> CutLayout:
        """Return the layout of a minibatch's forward."""
        found = self._layouts[0]
        for move, layout in zip(self.announced, self._layouts[1:], strict=False):
            if minibatch < move.at:
                break
            found = layout
        return found

    def backward_layout(self, minibatch: int) -> CutLayout:
        """Return the layout of a minibatch's backward.

        B grows from the first boundary to the last, so boundaries switch one by one, the last one last.
        """
        found = self._layouts[0].starts
        for move, (starts, _) in zip(self.announced, self._layouts[1:], strict=False):
            switched = (first_backward(self._pipeline, move.at, left) <= minibatch for left in range(len(starts)))
            found = tuple(new if has else old for has, old, new in zip(switched, found, starts, strict=True))
        return CutLayout(found, self.forward_layout(minibatch).memory)

    def new_policies(self, stage: int) -> Iterator[int]:
        """Yield K of every move that changes policies of a stage's layers and gives the stage no block.

        A stage that takes a block is rebuilt then, with its new policies.
        """
        for move, before, after in zip(self.announced, self._layouts, self._layouts[1:], strict=False):
            start, stop = after.ends[stage : stage + 2]
            takes = start < before.ends[stage] or stop > before.ends[stage + 1]
            if not takes and before.memory[start:stop] != after.memory[start:stop]:
                yield move.at

    def moving_block(self, source: int, target: int, minibatch: int) -> BlockTransfer:
        """Return the block that moves from one stage to another; `minibatch` is from its B to its K."""
        return next(
            each
            for each in self._transfers
            if (each.source, each.target) == (source, target) and each.first <= minibatch <= each.at
        )

    def last_updated(self, stage: int, minibatch: int) -> int:
        """Return the minibatch whose update a stage without flushes makes right before `minibatch`'s forward."""
        return minibatch - self._pipeline.warmups[stage]

    def version(self, stage: int, minibatch: int) -> int:
        """Return the version that a minibatch's forward reads: the stage's newest (PipeDream, SOSP'19, section 3.3)."""
        return max(0, self.last_updated(stage, minibatch) + 1)

    def at_stage(self, stage: int) -> tuple[BlockTransfer, ...]:
        """Return the blocks that a stage gives or takes."""
        return tuple(each for each in self._transfers if stage in (each.source, each.target))


def shape_problems(pipeline: Pipeline) -> Iterator[str]:
    """Yield a sentence per property of a pipeline because of which layers can't move during training."""
    can = "layers move while training goes on only where"
    replicated = [stage for stage, r in enumerate(pipeline.replicas) if r > 1]
    if replicated:
        replicas = pipeline.replicas[replicated[0]]
        yield f"{can} every stage has one replica, and stage {replicated[0]} has {replicas}; set vpipe.live: false"
    if pipeline.num_stages == 1:
        yield f"{can} there are several stages, and there is one"
    if pipeline.chunks > 1:
        yield f"{can} a worker has one stage, and there are {pipeline.chunks} chunks per worker; set chunks: 1"
    if pipeline.backward != WHOLE:
        yield f"{can} backwards are whole, and these are split; set backward: {WHOLE}"
    if not SYNCS[pipeline.sync].waits:
        yield f"{can} stages wait for their replicas, and with sync {pipeline.sync} they don't"
    if is_csv(pipeline.order):
        yield f"{can} the order of work has a name, and {pipeline.order} is a file"
    if not pipeline.flushes and pipeline.weights != STASH:
        yield f"{can} minibatches keep their weights, weights: {STASH}, or every update flushes; got {pipeline.weights}"
    elif not pipeline.flushes and pipeline.accumulate > 1:
        yield f"{can} every minibatch is an update, and {pipeline.accumulate} make one; set accumulate: 1"
    elif not pipeline.flushes and not replicated and pipeline.depth != pipeline.num_stages:
        yield (
            f"{can} as many minibatches are in flight as there are stages, {pipeline.num_stages}, or every update "
            f"flushes; got depth: {pipeline.depth}"
        )


def layout_problems(before: CutLayout, move: Repartition) -> Iterator[str]:
    """Yield a sentence per reason why a move can't follow a layout."""
    after = move.after(before)
    if len(after.starts) != len(before.starts):
        yield f"a move keeps the number of stages, {len(before.starts) + 1}; got cuts for {len(after.starts) + 1}"
        return
    if after.num_layers != before.num_layers:
        yield f"a move says of every layer what it does, of {before.num_layers}; got {after.num_layers} policies"
        return
    for stage, (start, stop) in enumerate(itertools.pairwise(after.ends)):
        if start >= stop:
            yield f"a move leaves stage {stage} without layers: cuts before layers {list(after.starts)}"
            return
    if after == before:
        yield "a move that moves nothing: the cuts are those there are"
    old = before.ends
    for stage, (start, stop) in enumerate(itertools.pairwise(after.ends)):
        if max(start, old[stage]) >= min(stop, old[stage + 1]):
            yield (
                f"a layer moves by one stage at a time, and each stage keeps one of its layers: none of those of stage "
                f"{stage}, {old[stage]} to {old[stage + 1] - 1}, stays; go there in two moves"
            )
            return
