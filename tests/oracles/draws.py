"""A run's random numbers, restated: the samples of minibatches, and the seeds of random layers.

All seeds derive from splitmix64's finaliser, chained over integers, and BLAKE2b hashes of names. The order of an epoch
is torch's permutation, seeded by ("epoch", number of the epoch).
"""

import hashlib
import itertools
import math
from collections.abc import Sequence

import torch

_BITS = 2**64


def mixed(*numbers: int) -> int:
    """Return a 63-bit hash of integers."""
    state = 0
    for number in numbers:
        state = (state + 0x9E3779B97F4A7C15 + number) % _BITS
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ state >> shift) * factor % _BITS
        state ^= state >> 31
    return state // 2


def of_name(name: str) -> int:
    """Return a 63-bit hash of a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") // 2


def layer_seed(seed: int, minibatch: int, microbatch: int, layer: str) -> int:
    """Return the seed of a random layer for a microbatch."""
    return mixed(mixed(seed, of_name(layer)), minibatch, microbatch)


def augmentation(seed: int, minibatch: int) -> int:
    """Return the number by which a data set draws its augmentation of a minibatch."""
    return mixed(seed, of_name("augmentation"), minibatch)


def epoch_order(num_samples: int, size: int, seed: int, epoch: int, buckets: Sequence[int] | None) -> list[int]:
    """Return an epoch's samples in order.

    A permutation; with buckets, permuted minibatches of (mostly) one bucket each, then the samples that are left over.
    """
    generator = torch.Generator().manual_seed(mixed(seed, of_name("epoch"), epoch))
    order: list[int] = torch.randperm(num_samples, generator=generator).tolist()
    if buckets is None:
        return order
    dealt = [i for bucket in sorted(set(buckets)) for i in order if buckets[i] == bucket]
    whole = num_samples // size
    turns: list[int] = torch.randperm(whole, generator=generator).tolist()
    return [dealt[turn * size + i] for turn in turns for i in range(size)] + dealt[whole * size :]


class Order:
    """The samples of minibatches, which are counted over all epochs; the last one of an epoch may be short."""

    def __init__(self, num_samples: int, size: int, seed: int, buckets: Sequence[int] | None = None) -> None:
        self.num_samples, self.size, self._seed, self._buckets = num_samples, size, seed, buckets
        self.per_epoch = math.ceil(num_samples / size)
        self._epochs: dict[int, list[int]] = {}

    def samples(self, k: int) -> list[int]:
        epoch, within = divmod(k, self.per_epoch)
        if epoch not in self._epochs:
            self._epochs[epoch] = epoch_order(self.num_samples, self.size, self._seed, epoch, self._buckets)
        return self._epochs[epoch][within * self.size : (within + 1) * self.size]

    def before(self, k: int) -> int:
        """Return the number of samples of all minibatches before k."""
        return k // self.per_epoch * self.num_samples + k % self.per_epoch * self.size


def parts(samples: Sequence[int], count: int) -> list[Sequence[int]]:
    """Return the microbatches of a minibatch, whose sizes differ by at most 1, larger ones first; some may be empty."""
    ends = [0]
    for index in range(count):
        ends.append(ends[-1] + len(samples) // count + (index < len(samples) % count))
    return [samples[start:stop] for start, stop in itertools.pairwise(ends)]
