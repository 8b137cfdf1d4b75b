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

Paper: vPipe (TPDS'21) section 4.3 and its eq. 4. Differs: it copies what was saved for backwards; here what the layers
read travels, and the new owner computes them again to run backward.
"""

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipebench.errors import PlanError
from pipebench.schedule.csv_form import is_csv
from pipebench.schedule.pipeline import STASH, WHOLE, Pipeline
from pipebench.schedule.syncs import SYNCS

Starts = tuple[int, ...]  # first layer of every stage but the first


@dataclass(frozen=True)
class Move:
    """New cuts for a pipeline that trains.

    Attributes:
        at: K, the first minibatch, numbered since the drain, that runs forward under the new cuts.
        starts: first layer of every stage but the first, from then on.
    """

    at: int
    starts: Starts


class HandOver(NamedTuple):
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


def hand_overs(pipeline: Pipeline, before: Starts, move: Move) -> tuple[HandOver, ...]:
    """Return what stages give each other in a move, from the first boundary to the last."""
    found = []
    for left, (old, new) in enumerate(zip(before, move.starts, strict=True)):
        first = first_backward(pipeline, move.at, left)
        if new < old:
            found.append(HandOver(move.at, first, left, left + 1, new, old))
        elif new > old:
            found.append(HandOver(move.at, first, left + 1, left, old, new))
    return tuple(found)


def first_backward(pipeline: Pipeline, at: int, left: int) -> int:
    """Return B, the first minibatch that runs backward under new cuts between stage `left` and the next."""
    return at if pipeline.flushes else at - pipeline.warmups[left] + 1


class Moves:
    """The moves of one segment of training, some of which may be announced while it runs.

    Any thread may ask; programs do, for every unit, and never twice with different answers: a move is announced before
    any worker has come to where it changes anything.

    Args:
        pipeline: the shape that all cuts share.
        starts: the cuts at the drain.
        num_layers: of the model.
    """

    def __init__(self, pipeline: Pipeline, starts: Sequence[int], num_layers: int) -> None:
        self._pipeline = pipeline
        self._num_layers = num_layers
        self._begun = 0
        self._lock = threading.Lock()
        self._moves: tuple[Move, ...] = ()
        self._hand_overs: tuple[HandOver, ...] = ()
        self._starts: tuple[Starts, ...] = (tuple(starts),)

    @property
    def announced(self) -> tuple[Move, ...]:
        """All moves, the first one first."""
        return self._moves

    @property
    def last_starts(self) -> Starts:
        """The cuts after the last move."""
        return self._starts[-1]

    @property
    def hand_overs(self) -> tuple[HandOver, ...]:
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

    def announce(self, move: Move) -> None:
        """Add a move.

        Raises:
            PlanError: it can't be made, or not from that minibatch on.
        """
        with self._lock:
            for problem in self.problems(move):
                raise PlanError(problem)
            self._hand_overs += hand_overs(self._pipeline, self.last_starts, move)
            self._starts += (move.starts,)
            self._moves += (move,)

    def problems(self, move: Move) -> Iterator[str]:
        """Yield a sentence for everything that is wrong with a move."""
        yield from shape_problems(self._pipeline)
        yield from cut_problems(self.last_starts, move.starts, self._num_layers)
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

    def forward_starts(self, minibatch: int) -> Starts:
        """Return the cuts under which a minibatch runs forward."""
        found = self._starts[0]
        for move, starts in zip(self._moves, self._starts[1:], strict=False):
            if minibatch < move.at:
                break
            found = starts
        return found

    def backward_starts(self, minibatch: int) -> Starts:
        """Return the cuts under which a minibatch runs backward: boundaries turn over one by one, the first first."""
        found = self._starts[0]
        for move, starts in zip(self._moves, self._starts[1:], strict=False):
            turned = (first_backward(self._pipeline, move.at, left) <= minibatch for left in range(len(starts)))
            found = tuple(new if has else old for has, old, new in zip(turned, found, starts, strict=True))
        return found

    def handed(self, source: int, target: int, minibatch: int) -> HandOver:
        """Return the block that is on its way from a stage to another at a minibatch: from its B to its K."""
        return next(
            each
            for each in self._hand_overs
            if (each.source, each.target) == (source, target) and each.first <= minibatch <= each.at
        )

    def version(self, stage: int, minibatch: int) -> int:
        """Return the version that a minibatch's forward reads at a stage: the newest there (PipeDream section 3.3)."""
        return max(0, minibatch - self._pipeline.warmups[stage] + 1)

    def at_stage(self, stage: int) -> tuple[HandOver, ...]:
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


def cut_problems(before: Starts, after: Starts, num_layers: int) -> Iterator[str]:
    """Yield a sentence for everything that keeps one move from leading from cuts to others."""
    if len(after) != len(before):
        yield f"a move keeps the number of stages, {len(before) + 1}; got cuts for {len(after) + 1}"
        return
    bounds = [0, *after, num_layers]
    for stage, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if start >= stop:
            yield f"a move leaves stage {stage} without layers: cuts before layers {list(after)}"
            return
    if after == before:
        yield "a move that moves nothing: the cuts are those there are"
    old = [0, *before, num_layers]
    for stage, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if max(start, old[stage]) >= min(stop, old[stage + 1]):
            yield (
                f"a layer moves by one stage at a time, and each stage keeps one of its layers: none of those of stage "
                f"{stage}, {old[stage]} to {old[stage + 1] - 1}, stays; go there in two moves"
            )
            return
