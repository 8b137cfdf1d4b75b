"""Shards: which elements of a stage's parameters each of its replicas steps on.

Every bucket of gradients is divided among all replicas, so that each receives and sends as much of every bucket. Where
optimizers step element by element, a border lies anywhere in a parameter at a multiple of `_ROW` elements: kernels and
norms then add and round the same runs of numbers as they would in the whole. Other optimizers get whole parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

_ROW = 512  # of `clipping`


class Piece(NamedTuple):
    """Elements [start, stop) of a parameter, flat; `place` is its position in the stage's order."""

    place: int
    start: int
    stop: int

    def shape(self, whole: torch.Tensor) -> Sequence[int]:
        """Return the shape of the piece of a tensor, which may have no memory for now."""
        return whole.shape if self.stop - self.start == whole.numel() else (self.stop - self.start,)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the piece: [elements] or, of a whole tensor, its own shape."""
        whole = tensor.detach()
        return whole if self.stop - self.start == whole.numel() else whole.view(-1)[self.start : self.stop]

    def of_state(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the piece's optimizer state, given the whole parameter's."""
        return {
            key: self.of(value) if isinstance(value, torch.Tensor) and value.shape == parameter.shape else value
            for key, value in state.items()
        }


class Sharding(NamedTuple):
    """How a stage's parameters are divided, and the replica that holds it."""

    buckets: tuple[tuple[tuple[Piece, ...], ...], ...]  # by bucket and replica; all pieces of a bucket have one type
    replica: int
    keeps_all: bool = True  # whether replicas keep all parameters; else they gather them and free them

    @property
    def own(self) -> tuple[Piece, ...]:
        """The replica's pieces, in the stage's order."""
        return self.of(self.replica)

    def of(self, replica: int) -> tuple[Piece, ...]:
        """Return a replica's pieces, in the stage's order."""
        return tuple(sorted(piece for bucket in self.buckets for piece in bucket[replica]))


Divide = Callable[[Mapping[str, torch.Tensor]], Sharding]  # given a stage's trained parameters, in its order


def divided(indices: Sequence[int], sizes: Sequence[int], num_replicas: int, *, whole: bool) -> list[tuple[Piece, ...]]:
    """Divide a bucket into contiguous runs of about equal length; return each replica's pieces.

    `indices` are positions of the bucket's parameters, in its order, `sizes` the elements of every parameter of the
    stage; `whole`: whether parameters stay whole.
    """
    total = sum(sizes[index] for index in indices)
    runs: list[list[Piece]] = [[] for _ in range(num_replicas)]
    replica, before = 0, 0
    for index in indices:
        start, size = 0, sizes[index]
        while start < size:
            border = total * (replica + 1) // num_replicas - before
            at = size if replica == num_replicas - 1 or border >= size else _rounded(border, size, whole=whole)
            if at > start:
                runs[replica].append(Piece(index, start, at))
                start = at
            if start < size:
                replica += 1
        before += size
        if replica < num_replicas - 1 and before >= total * (replica + 1) // num_replicas:
            replica += 1
    return [tuple(run) for run in runs]


def _rounded(border: int, size: int, *, whole: bool) -> int:
    """Return the nearest allowed border in a parameter."""
    step = size if whole else _ROW
    return max(0, min(size, round(border / step) * step))
