"""The arguments of the plain loop of `tests.oracles.per_minibatch`: a recipe with everything in it resolved."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tests.oracles.draws import Order
from tests.oracles.rates import Rates


@dataclass(frozen=True)
class Meaning:
    """A run, described completely."""

    seed: int  # the run's
    order: Order  # the samples of minibatches
    total: int  # minibatches of the run
    periods: tuple[int, int]  # minibatches between evaluations, and between checkpoints: the pipeline drains at both
    stage_of: Mapping[str, int]  # stage of every parameter and buffer
    starts: Sequence[int]  # first step of every stage but the first; only needed for recomputation
    replicas: Sequence[int]  # of every stage
    depth: int  # minibatches in flight per replica of the input stage
    flushes: bool  # whether every update flushes the pipeline
    policy: str  # weight policy, as in `parallelism.weights`
    microbatches: int  # per minibatch
    accumulate: int  # minibatches of every replica per update
    asynchronous: bool  # whether every minibatch is an update of its own, made when it is pushed
    recompute: bool  # whether backwards recompute their stage
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]  # makes the optimizer of a stage
    rates: Rates  # learning rates
    scaling: str  # as in `lr_scaling`
    clip_norm: float | None = None  # largest norm of gradients, if any
    decay: float = 0.135  # PipeMare's D
    pushes: Sequence[Sequence[int]] = ()  # of every segment, minibatches in the order of their pushes
    tied: frozenset[str] = frozenset()  # parameters of several stages, which are clipped alone if stages are

    @property
    def block(self) -> int:
        """The smallest number of minibatches of which all replicas of a stage have equally many."""
        return math.lcm(*self.replicas)

    def round_size(self, stage: int) -> int:
        """Return the minibatches per update of a stage."""
        return 1 if self.asynchronous else (self.block if self.flushes else self.replicas[stage]) * self.accumulate

    def units(self, count: int) -> Iterator[tuple[int, int]]:
        """Yield minibatch and microbatch in the order of their forwards, which running statistics depend on.

        In a block of minibatches, all first microbatches come before all second ones.
        """
        for start in range(0, count, self.block):
            for part in range(self.microbatches):
                yield from ((k, part) for k in range(start, min(start + self.block, count)))
