"""Everything random, as a pure function of the seed and of what it is for.

Minibatch k is a function of (seed, k), a random layer's draw one of (seed, minibatch, microbatch, layer name): no
engine, plan or order of work changes either.
"""

import hashlib
import math
from functools import lru_cache

import torch

_MASK = (1 << 64) - 1


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


class Sampler:
    """Which samples make up minibatch k: a fresh permutation every epoch, the last minibatch of it may be short."""

    def __init__(self, num_samples: int, minibatch_size: int, seed: int) -> None:
        self.num_samples = num_samples
        self.minibatch_size = minibatch_size
        self.minibatches_per_epoch = math.ceil(num_samples / minibatch_size)
        self._seed = seed
        self._permutation = lru_cache(maxsize=3)(self._permute)

    def size(self, k: int) -> int:
        """Return the number of samples of minibatch k."""
        last = self.minibatches_per_epoch - 1
        return self.num_samples - last * self.minibatch_size if k % (last + 1) == last else self.minibatch_size

    def samples_before(self, k: int) -> int:
        """Return the number of samples in minibatches 0 to k - 1."""
        epochs, within = divmod(k, self.minibatches_per_epoch)
        return epochs * self.num_samples + within * self.minibatch_size

    def indices(self, k: int) -> list[int]:
        """Return the samples of minibatch k."""
        epoch, within = divmod(k, self.minibatches_per_epoch)
        start = within * self.minibatch_size
        return self._permutation(epoch)[start : start + self.size(k)]

    def _permute(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(mix(self._seed, name_hash("epoch"), epoch))
        order: list[int] = torch.randperm(self.num_samples, generator=generator).tolist()
        return order


def microbatch_sizes(num_samples: int, microbatches: int) -> list[int]:
    """Return the sizes a minibatch is cut into, as even as can be; some are 0 when there are too few samples."""
    return [num_samples // microbatches + (i < num_samples % microbatches) for i in range(microbatches)]
