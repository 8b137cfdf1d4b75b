"""Seeds the global random number generators of torch, NumPy and Python, for a while."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy
import torch


@contextmanager
def seeded(seed: int) -> Iterator[Callable[[int], None]]:
    """Seed the CPU's global generators of torch, NumPy and Python inside the context; restore their states after it.

    The context's value is a function that seeds them again.
    """
    states = (torch.get_rng_state(), numpy.random.get_state(), random.getstate())

    def seed_all(number: int) -> None:
        torch.default_generator.manual_seed(number)
        numpy.random.seed(number % 2**32)
        random.seed(number)

    seed_all(seed)
    try:
        yield seed_all
    finally:
        torch.set_rng_state(states[0])
        numpy.random.set_state(states[1])
        random.setstate(states[2])
