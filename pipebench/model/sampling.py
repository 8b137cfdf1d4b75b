"""Everything random, as a pure function of the seed and of what it is for.

Minibatch k is a function of (seed, k), a random layer's draw one of (seed, minibatch, microbatch, layer name): no
engine, plan or order of work changes either.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from bisect import bisect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from zoo.late import torch

_MASK = (1 << 64) - 1
_COLUMNS_KEPT = 1 << 16


def mix(*numbers: int) -> int:
    """Return 63 well-mixed bits of some integers (splitmix64's finaliser, chained)."""
    state = 0
    for number in numbers:
        state = (state + 0x9E3779B97F4A7C15 + number) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def name_hash(name: str) -> int:
    """Return 63 bits of a name; unlike `hash`, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def seed_default_generator(device: torch.device, seed: int) -> None:
    """Seed the generator that random layers on a device draw from.

    Not `torch.manual_seed`, which seeds every device there is and costs 98 us a call (this: 1 us).
    """
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        torch.cuda.default_generators[index].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


class Stream(NamedTuple):
    """Where in a sequential data set a minibatch is.

    Attributes:
        number: the stream that the minibatch is the next piece of; 0 where samples don't follow each other.
        starts: whether nothing comes before it, so that what modules carry starts anew.
    """

    number: int
    starts: bool


class UnitShape(NamedTuple):
    """What the costs of a unit depend on where lengths vary.

    Attributes:
        num_samples: its samples, at least 1.
        columns: how wide they are.
    """

    num_samples: int
    columns: int


Size = (
    int | UnitShape
)  # what the costs of a unit depend on: how many samples it has, and their length where that varies


class Sampler:
    """Which samples make up minibatch k: a fresh permutation every epoch, the last minibatch of it may be short.

    Args:
        num_samples: samples of an epoch.
        minibatch_size: samples of a minibatch, but the last of an epoch.
        seed: of the permutations.
        buckets: called when the first permutation is made; returns a bucket per sample, or None. Minibatches are then
            made of samples of one bucket, but for those where one bucket ends and the next begins.
    """

    streams: int | None = None  # where samples follow each other: how many take turns
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
        """Return what the costs of the microbatches of minibatch k depend on."""
        return [*microbatch_sizes(self.size(k), microbatches)]

    def samples_before(self, k: int) -> int:
        """Return the number of samples in minibatches 0 to k - 1."""
        epochs, within = divmod(k, self.minibatches_per_epoch)
        return epochs * self.num_samples + within * self.minibatch_size

    def indices(self, k: int) -> Sequence[int]:
        """Return the samples of minibatch k."""
        epoch, within = divmod(k, self.minibatches_per_epoch)
        start = within * self.minibatch_size
        return self._permutation(epoch)[start : start + self.size(k)]

    def stream(self, k: int) -> Stream:
        """Return which stream minibatch k is of: none that goes on."""
        return Stream(0, starts=True)

    def _permute(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(mix(self._seed, name_hash("epoch"), epoch))
        order: list[int] = torch.randperm(self.num_samples, generator=generator).tolist()
        buckets = self._buckets()
        if buckets is None:
            return order
        order.sort(key=buckets.__getitem__)  # stable: random within a bucket
        whole = self.num_samples // self.minibatch_size
        shuffled: list[int] = torch.randperm(whole, generator=generator).tolist()
        size = self.minibatch_size
        return [i for k in shuffled for i in order[k * size : (k + 1) * size]] + order[whole * size :]


class InOrder(Sampler):
    """Samples in their own order: for evaluation."""

    def __init__(self, num_samples: int, minibatch_size: int) -> None:
        super().__init__(num_samples, minibatch_size, 0)

    def indices(self, k: int) -> range:
        """Return the samples of minibatch k."""
        start = k % self.minibatches_per_epoch * self.minibatch_size
        return range(start, start + self.size(k))


class Streams(Sampler):
    """Chunks of one text: minibatch k is the next chunk of every row of stream k mod `streams`.

    The text is cut into streams x minibatch_size rows of equally many chunks; chunk i + 1 of the text continues
    chunk i. Streams let replicas take turns: with a number of streams that a stage's replicas divide, a stream is
    always that of the same replica, which carries its state on.

    Args:
        num_samples: chunks of the text.
        minibatch_size: rows of a stream.
        streams: at least 1.
        covers: whether rows are long enough for all of the text, the last ones then running past its end, instead of
            leaving out up to a chunk per row.
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
        """Return which stream minibatch k is of; every epoch starts anew."""
        within = k % self.minibatches_per_epoch
        return Stream(within % self.streams, starts=within < self.streams)


class Varying(Sampler):
    """Minibatches whose lengths are drawn: how many samples they have and how wide, not which.

    Args:
        num_samples: samples of an epoch.
        minibatch_size: samples of a minibatch, but the last of an epoch.
        seed: of the draws.
        lengths: how wide minibatches are, and the share of them that is.

    Attributes:
        columns: returns how wide minibatch k is.
    """

    def __init__(self, num_samples: int, minibatch_size: int, seed: int, lengths: Sequence[tuple[int, float]]) -> None:
        super().__init__(num_samples, minibatch_size, seed)
        self.lengths = tuple(lengths)
        self.varies = len(lengths) > 1
        self._up_to = [*itertools.accumulate(share for _, share in lengths)]
        self.columns = lru_cache(maxsize=_COLUMNS_KEPT)(self._drawn_columns)  # asked for again and again of a few

    def sizes(self, k: int, microbatches: int) -> list[Size]:
        """See `Sampler`: microbatches are as wide as their minibatch."""
        columns = self.columns(k)
        return [UnitShape(size, columns) if size else 0 for size in microbatch_sizes(self.size(k), microbatches)]

    def _drawn_columns(self, k: int) -> int:
        """Return how wide minibatch k is: its own draw, whoever asks."""
        drawn = mix(self._seed, name_hash("length"), k) / (1 << 63) * self._up_to[-1]
        return self.lengths[min(bisect(self._up_to, drawn), len(self.lengths) - 1)][0]

    def of_length(self, columns: int) -> Varying:
        """Return the same minibatches, all as wide."""
        return Varying(self.num_samples, self.minibatch_size, self._seed, [(columns, 1.0)])

    def indices(self, k: int) -> Sequence[int]:
        """Refuse: only lengths are known."""
        raise NotImplementedError("of minibatches whose lengths are drawn nothing else is known")


def microbatch_sizes(num_samples: int, microbatches: int) -> list[int]:
    """Return the sizes a minibatch is cut into, as even as can be; some are 0 when there are too few samples."""
    return [num_samples // microbatches + (i < num_samples % microbatches) for i in range(microbatches)]
