"""Moves: layers change stages while training goes on. Who runs them for which minibatch, and where a worker hands over.

A straight pipeline goes on with its forwards and backwards in turn; nothing is drained, nothing is left out. A move is
told by one number, K: forwards of the minibatches from K on run under the new cuts. Between a stage a and the next one,
backwards follow from B = K - d_a + 1 on, d_a being the depth of the left stage. That is where both of them turn over:
the left stage runs the backward of B - 1 right before its forward of K, the right stage that of B right after its
forward of K - 1. So every unit runs once through every layer, both ways, and each stage's list stays what it was.

Updates go with the backwards: those up to B - 1 are the old owner's, all later ones the new owner's. A forward reads
the newest version of where it runs, and its backward the same, wherever that runs: with the units whose forward was
here and whose backward is there, their versions travel. Where every update empties the pipeline, B = K, and nothing is
in flight.

What layers do with their activations may change with a move, too. A unit's policies are those of its forward, wherever
it runs backward: so nobody has to do to a unit in flight what wasn't begun in its forward.

Paper: vPipe (TPDS'21) section 4.3 and its eq. 4. Differs: it copies what was saved for backwards; here what the layers
read travels, and the new owner computes them again to run backward.
"""

import itertools
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pipebench.errors import PlanError
from pipebench.schedule.csv_form import is_csv
from pipebench.schedule.pipeline import STASH, WHOLE, Pipeline
from pipebench.schedule.syncs import SYNCS

Starts = tuple[int, ...]  # first layer of every stage but the first
Policies = tuple[str, ...]  # of every layer: what is done with its activations


class CutLayout(NamedTuple):
    """What a unit runs under.

    Attributes:
        starts: first layer of every stage but the first.
        memory: what every layer does with its activations.
    """

    starts: Starts
    memory: Policies

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.memory)

    @property
    def ends(self) -> tuple[int, ...]:
        """Where stages begin and, last, end."""
        return (0, *self.starts, self.num_layers)

    def with_policies(self, memory: Policies, stages: Collection[int]) -> "CutLayout":
        """Return the same with the policies that layers of some stages have elsewhere.

        Args:
            memory: what every layer does there.
            stages: whose layers do so.
        """
        given = (
            (memory if stage in stages else self.memory)[start:stop]
            for stage, (start, stop) in enumerate(itertools.pairwise(self.ends))
        )
        return CutLayout(self.starts, tuple(itertools.chain.from_iterable(given)))


@dataclass(frozen=True)
class Repartition:
    """New cuts for a pipeline that trains.

    Attributes:
        at: K, the first minibatch, numbered since the drain, that runs forward under the new cuts.
        starts: first layer of every stage but the first, from then on.
        memory: what every layer does with its activations from then on; None: what it did before.
    """

    at: int
    starts: Starts
    memory: Policies | None = None

    def after(self, before: CutLayout) -> CutLayout:
        """Return what this makes of what there was."""
        return CutLayout(self.starts, before.memory if self.memory is None else self.memory)


class BlockTransfer(NamedTuple):
    """A block of layers that a stage gives to a neighbour.

    Attributes:
        at: K of its move.
        first: B, the first minibatch whose backward of the block runs at its new owner.
        source: the stage that gives it.
        target: the stage that takes it.
        start: first layer of the block.
        stop: the layer after its last.
    """

    at: int
    first: int
    source: int
    target: int
    start: int
    stop: int

    @property
    def goes_left(self) -> bool:
        """Whether the stage before takes the block."""
        return self.target < self.source


def hand_overs(pipeline: Pipeline, before: Starts, move: Repartition) -> tuple[BlockTransfer, ...]:
    """Return what stages give each other in a move, from the first boundary to the last."""
    found = []
    for left, (old, new) in enumerate(zip(before, move.starts, strict=True)):
        first = first_backward(pipeline, move.at, left)
        if new < old:
            found.append(BlockTransfer(move.at, first, left, left + 1, new, old))
        elif new > old:
            found.append(BlockTransfer(move.at, first, left + 1, left, old, new))
    return tuple(found)


def first_backward(pipeline: Pipeline, at: int, left: int) -> int:
    """Return B, the first minibatch that runs backward under new cuts between stage `left` and the next."""
    return at if pipeline.flushes else at - pipeline.warmups[left] + 1


class RepartitionPlan:
    """The moves of one segment of training, some of which may be announced while it runs.

    Any thread may ask; programs do, for every unit, and never twice with different answers: a move is announced before
    any worker has come to where it changes anything.

    Args:
        pipeline: the shape that all cuts share.
        layout: at the drain.
    """

    def __init__(self, pipeline: Pipeline, layout: CutLayout) -> None:
        self._pipeline = pipeline
        self._begun = 0
        self._lock = threading.Lock()
        self._moves: tuple[Repartition, ...] = ()
        self._hand_overs: tuple[BlockTransfer, ...] = ()
        self._layouts: tuple[CutLayout, ...] = (layout,)

    @property
    def announced(self) -> tuple[Repartition, ...]:
        """All moves, the first one first."""
        return self._moves

    @property
    def last_layout(self) -> CutLayout:
        """What there is after the last move."""
        return self._layouts[-1]

    @property
    def hand_overs(self) -> tuple[BlockTransfer, ...]:
        """What all moves hand over, in their order."""
        return self._hand_overs

    @property
    def begun(self) -> int:
        """Minibatches that have begun to run, as far as is known here."""
        return self._begun

    def begin(self, minibatch: int) -> None:
        """Take note that a minibatch begins."""
        if minibatch >= self._begun:
            self._begun = minibatch + 1

    def announce(self, move: Repartition) -> None:
        """Add a move.

        Raises:
            PlanError: it can't be made, or not from that minibatch on.
        """
        with self._lock:
            for problem in self.problems(move):
                raise PlanError(problem)
            self._hand_overs += hand_overs(self._pipeline, self.last_layout.starts, move)
            self._layouts += (move.after(self.last_layout),)
            self._moves += (move,)

    def problems(self, move: Repartition) -> Iterator[str]:
        """Yield a sentence for everything that is wrong with a move."""
        yield from shape_problems(self._pipeline)
        yield from layout_problems(self.last_layout, move)
        depth, last = self._pipeline.depth, self._moves[-1].at if self._moves else 0
        if self._pipeline.flushes:
            period = self._pipeline.period
            earliest = max(-(-self._begun // period) * period, last + period)
            if move.at < earliest or move.at % period:
                yield (
                    f"a move from minibatch {move.at} on: updates come every {period} minibatches, and layers move "
                    f"between two of them; from {earliest} on, a multiple of {period}"
                )
        elif move.at < max(self._begun, last) + 2 * depth:
            yield (
                f"a move from minibatch {move.at} on comes too early: {self._begun} minibatches have begun"
                + (f", the move before is from minibatch {last} on" if last else "")
                + f", and it takes twice the depth, {2 * depth} more; from {max(self._begun, last) + 2 * depth} on"
            )

    def forward_layout(self, minibatch: int) -> CutLayout:
        """Return what a minibatch runs forward under."""
        found = self._layouts[0]
        for move, layout in zip(self._moves, self._layouts[1:], strict=False):
            if minibatch < move.at:
                break
            found = layout
        return found

    def backward_layout(self, minibatch: int) -> CutLayout:
        """Return what a minibatch runs backward under: boundaries turn over one by one, the first first."""
        found = self._layouts[0].starts
        for move, (starts, _) in zip(self._moves, self._layouts[1:], strict=False):
            turned = (first_backward(self._pipeline, move.at, left) <= minibatch for left in range(len(starts)))
            found = tuple(new if has else old for has, old, new in zip(turned, found, starts, strict=True))
        return CutLayout(found, self.forward_layout(minibatch).memory)

    def before_forward(self, stage: int, minibatch: int) -> int:
        """Return the minibatch whose update a stage makes right before a forward, without a flush."""
        return minibatch - self._pipeline.warmups[stage]

    def new_policies(self, stage: int) -> Iterator[int]:
        """Yield the first minibatches, K, from which on a stage's own layers have others of the policies.

        Where a block joins them, they are cut anew together with it, and what they do then is new as well.
        """
        for move, before, after in zip(self._moves, self._layouts, self._layouts[1:], strict=False):
            start, stop = after.ends[stage : stage + 2]
            takes = start < before.ends[stage] or stop > before.ends[stage + 1]
            if not takes and before.memory[start:stop] != after.memory[start:stop]:
                yield move.at

    def handed(self, source: int, target: int, minibatch: int) -> BlockTransfer:
        """Return the block that is on its way from a stage to another at a minibatch: from its B to its K."""
        return next(
            each
            for each in self._hand_overs
            if (each.source, each.target) == (source, target) and each.first <= minibatch <= each.at
        )

    def version(self, stage: int, minibatch: int) -> int:
        """Return the version that a minibatch's forward reads at a stage: the newest there (PipeDream section 3.3)."""
        return max(0, minibatch - self._pipeline.warmups[stage] + 1)

    def at_stage(self, stage: int) -> tuple[BlockTransfer, ...]:
        """Return the blocks that a stage gives or takes."""
        return tuple(each for each in self._hand_overs if stage in (each.source, each.target))


def shape_problems(pipeline: Pipeline) -> Iterator[str]:
    """Yield a sentence for everything about a pipeline that keeps layers from moving while it trains."""
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
    """Yield a sentence for everything that keeps one move from leading from what there is to something else."""
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
