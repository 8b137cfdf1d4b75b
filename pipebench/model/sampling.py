"""Samples and random draws as pure functions of the seed and their purpose.

Minibatch k is a function of (seed, k), and a layer's random draw one of (seed, minibatch, microbatch, layer name).
Neither depends on engine, plan or order of work.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from bisect import bisect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from pipebench.zoo.late import torch

_MASK = (1 << 64) - 1
_COLUMNS_CACHED = 1 << 16


def mix(*numbers: int) -> int:
    """Return a hash of 63 bits of some integers: splitmix64's finaliser, chained."""
    state = 0
    for number in numbers:
        state = (state + 0x9E3779B97F4A7C15 + number) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def name_hash(name: str) -> int:
    """Return a hash of 63 bits of a name, which unlike `hash` is the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def seed_default_generator(device: torch.device, seed: int) -> None:
    """Seed the generator that random layers on a device draw from.

    It takes 1 us. `torch.manual_seed` would take 98 us, since it seeds the generators of all devices.
    """
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        torch.cuda.default_generators[index].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


class Stream(NamedTuple):
    """The place of a minibatch in a sequential data set."""

    number: int  # the stream that it continues; 0 if samples don't follow each other
    starts: bool  # whether it is the stream's first minibatch, before which modules reset their carried states


class UnitShape(NamedTuple):
    """What the costs of a unit depend on if lengths vary."""

    num_samples: int  # at least 1
    columns: int  # the samples' length


Size = int | UnitShape  # what the costs of a unit depend on: its number of samples and, if lengths vary, their length


class Sampler:
    """Which samples make up minibatch k: a new permutation every epoch, whose last minibatch may be short.

    Args:
        num_samples: samples of an epoch.
        minibatch_size: samples of every minibatch except the last of an epoch.
        seed: of the permutations.
        buckets: called when the first permutation is made; returns a bucket per sample, or None. With buckets, the
            samples of a minibatch are of one bucket, except at the borders between buckets.
    """

    streams: int | None = None  # number of streams that take turns, if samples follow each other
    varies = False  # whether minibatches differ in more than their number of samples

    def __init__(
        self,
        num_samples: int,
        minibatch_size: int,
        seed: int,
        buckets: Callable[[], Sequence[int] | None] = lambda: None,
    ) -> None:
        self.num_samples = num_samples
        self.minibatch_size = minibatch_size
        self.minibatches_per_epoch = math.ceil(num_samples / minibatch_size)
        self._seed = seed
        self._buckets = lru_cache(maxsize=1)(buckets)
        self._permutation = lru_cache(maxsize=3)(self._permute)

    def size(self, k: int) -> int:
        """Return the number of samples of minibatch k."""
        last = self.minibatches_per_epoch - 1
        return self.num_samples - last * self.minibatch_size if k % (last + 1) == last else self.minibatch_size

    def sizes(self, k: int, microbatches: int) -> list[Size]:
        """Return what the costs of each microbatch of minibatch k depend on."""
        return [*microbatch_sizes(self.size(k), microbatches)]

    def samples_before(self, k: int) -> int:
        """Return the number of samples in minibatches 0 to k - 1."""
        epochs, within = divmod(k, self.minibatches_per_epoch)
        return epochs * self.num_samples + within * self.minibatch_size

    def minibatches(self, samples: int) -> int:
        """Return how many minibatches of a run together have `samples`: the inverse of `samples_before`."""
        epochs, within = divmod(samples, self.num_samples)
        return epochs * self.minibatches_per_epoch + math.ceil(within / self.minibatch_size)

    def indices(self, k: int) -> Sequence[int]:
        """Return the samples of minibatch k."""
        epoch, within = divmod(k, self.minibatches_per_epoch)
        start = within * self.minibatch_size
        return self._permutation(epoch)[start : start + self.size(k)].tolist()

    def stream(self, k: int) -> Stream:
        """Return the stream of minibatch k: by default each minibatch starts a new one."""
        return Stream(0, starts=True)

    def _permute(self, epoch: int) -> memoryview[int]:
        """Return an epoch's order, with 8 bytes per sample; a list would take five times as much memory."""
        generator = torch.Generator().manual_seed(mix(self._seed, name_hash("epoch"), epoch))
        order = torch.randperm(self.num_samples, generator=generator)
        buckets = self._buckets()
        if buckets is not None:
            order = order[torch.as_tensor(buckets)[order].argsort(stable=True)]  # random within a bucket
            whole = self.num_samples // self.minibatch_size
            shuffled = torch.randperm(whole, generator=generator)
            end = whole * self.minibatch_size
            order = torch.cat([order[:end].view(whole, self.minibatch_size)[shuffled].flatten(), order[end:]])
        numbers: Any = order.numpy()
        return memoryview(numbers)


class InOrder(Sampler):
    """Samples in the data set's order, for evaluation."""

    def __init__(self, num_samples: int, minibatch_size: int) -> None:
        super().__init__(num_samples, minibatch_size, 0)

    def indices(self, k: int) -> range:
        """Return the samples of minibatch k."""
        start = k % self.minibatches_per_epoch * self.minibatch_size
        return range(start, start + self.size(k))


class Streams(Sampler):
    """Chunks of one text: minibatch k is the next chunk of every row of stream k mod `streams`.

    The text is cut into streams x minibatch_size rows of equally many chunks; chunk i + 1 of the text continues chunk
    i. If the replicas of a stage divide the number of streams, each stream stays with one replica, which carries its
    state.

    Args:
        num_samples: chunks of the text.
        minibatch_size: rows of a stream.
        streams: how many take turns.
        covers: whether rows are long enough for all of the text, so that the last ones run past its end. Otherwise up
            to a chunk per row is left out.
    """

    def __init__(self, num_samples: int, minibatch_size: int, streams: int, *, covers: bool = False) -> None:
        rows = streams * minibatch_size
        self.chunks_per_row = -(-num_samples // rows) if covers else num_samples // rows
        super().__init__(self.chunks_per_row * rows, minibatch_size, 0)
        self.streams: int = streams

    def indices(self, k: int) -> range:
        """Return the chunks of minibatch k, one per row."""
        chunk, stream = divmod(k % self.minibatches_per_epoch, self.streams)
        length = self.chunks_per_row
        first = stream * self.minibatch_size * length + chunk
        return range(first, first + self.minibatch_size * length, length)

    def stream(self, k: int) -> Stream:
        """Return the stream of minibatch k; every epoch starts them again."""
        within = k % self.minibatches_per_epoch
        return Stream(within % self.streams, starts=within < self.streams)


class Varying(Sampler):
    """Minibatches of which only the length is drawn, not the samples.

    `lengths` has pairs of a length and its share of all minibatches; the other arguments are `Sampler`'s.
    """

    def __init__(self, num_samples: int, minibatch_size: int, seed: int, lengths: Sequence[tuple[int, float]]) -> None:
        super().__init__(num_samples, minibatch_size, seed)
        self.lengths = tuple(lengths)
        self.varies = len(lengths) > 1
        self._up_to = [*itertools.accumulate(share for _, share in lengths)]
        self.columns = lru_cache(maxsize=_COLUMNS_CACHED)(self._columns)  # length of minibatch k, read by every unit

    def sizes(self, k: int, microbatches: int) -> list[Size]:
        """Return what the costs of each microbatch of minibatch k depend on; all have the minibatch's length."""
        columns = self.columns(k)
        return [UnitShape(size, columns) if size else 0 for size in microbatch_sizes(self.size(k), microbatches)]

    def _columns(self, k: int) -> int:
        """Return the length of minibatch k, a function of the seed and k."""
        drawn = mix(self._seed, name_hash("length"), k) / (1 << 63) * self._up_to[-1]
        return self.lengths[min(bisect(self._up_to, drawn), len(self.lengths) - 1)][0]

    def of_length(self, columns: int) -> Varying:
        """Return the same minibatches, all of one length."""
        return Varying(self.num_samples, self.minibatch_size, self._seed, [(columns, 1.0)])

    def indices(self, k: int) -> Sequence[int]:
        """Refuse: only lengths are known."""
        raise NotImplementedError("of minibatches whose lengths are drawn nothing else is known")


def microbatch_sizes(num_samples: int, microbatches: int) -> list[int]:
    """Return the sizes of a minibatch's microbatches, as even as possible; with too few samples some are 0."""
    return [num_samples // microbatches + (i < num_samples % microbatches) for i in range(microbatches)]
