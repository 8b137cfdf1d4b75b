"""What a recipe means once all in it is resolved: the arguments of training as `per_minibatch` runs it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tests.oracles.draws import Order
from tests.oracles.rates import Rates


@dataclass(frozen=True)
class Meaning:
    """What a recipe means, once everything in it is resolved."""

    seed: int  # the run's
    order: Order  # which samples a minibatch has
    total: int  # minibatches of the run
    periods: tuple[int, int]  # minibatches between evaluations, and between checkpoints: the pipeline drains at both
    stage_of: Mapping[str, int]  # stage of every parameter and buffer
    starts: Sequence[int]  # first step of every stage but the first, where that is said; needed to compute stages again
    replicas: Sequence[int]  # of every stage
    depth: int  # minibatches in flight per replica of the input stage
    flushes: bool  # whether every update empties the pipeline
    policy: str  # which weights a minibatch uses, as `parallelism.weights` names it
    microbatches: int  # parts of a minibatch
    accumulate: int  # minibatches of every replica per update
    asynchronous: bool  # whether every minibatch is an update of its own, made when it is pushed
    recompute: bool  # whether backwards compute their stage again
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]  # makes a stage's
    rates: Rates  # learning rates
    scaling: str  # `lr_scaling`
    clip_norm: float | None = None  # largest norm, if any
    decay: float = 0.135  # PipeMare's D
    pushes: Sequence[Sequence[int]] = ()  # of every segment, minibatches in the order of their pushes
    tied: frozenset[str] = frozenset()  # parameters of several stages, which are clipped alone where stages are

    @property
    def block(self) -> int:
        """Minibatches that give every replica of every stage equally many."""
        return math.lcm(*self.replicas)

    def round_size(self, stage: int) -> int:
        return 1 if self.asynchronous else (self.block if self.flushes else self.replicas[stage]) * self.accumulate

    def units(self, count: int) -> Iterator[tuple[int, int]]:
        """Yield minibatch and microbatch in the order of their forwards: a block's first microbatches, then the next.

        Running statistics follow that order.
        """
        for start in range(0, count, self.block):
            for part in range(self.microbatches):
                yield from ((k, part) for k in range(start, min(start + self.block, count)))
