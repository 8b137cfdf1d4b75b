"""Shards: which elements of a stage's parameters each of its replicas steps on (ZeRO, Rajbhandari et al., SC'20).

Every bucket of gradients is divided among all replicas, so that all send and receive equal parts of it. If the
optimizer steps element by element, a border may lie in a parameter, at a multiple of `ROW` elements: kernels and norms
then add and round the same runs of numbers as they would in the whole. Other optimizers get whole parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pipebench.engine.clipping import ROW


class Piece(NamedTuple):
    """Elements [start, stop) of a flat parameter."""

    place: int  # the parameter's position in the stage's order
    start: int
    stop: int

    def shape(self, whole: torch.Tensor) -> Sequence[int]:
        """Return the shape of the piece of a tensor, whose memory may be freed."""
        return whole.shape if self.stop - self.start == whole.numel() else (self.stop - self.start,)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the piece of a tensor: [elements] or, if the piece is the whole, of the tensor's shape."""
        whole = tensor.detach()
        return whole if self.stop - self.start == whole.numel() else whole.view(-1)[self.start : self.stop]

    def of_state(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the piece's optimizer state, given the whole parameter's."""
        return {
            key: self.of(value) if isinstance(value, torch.Tensor) and value.shape == parameter.shape else value
            for key, value in state.items()
        }


class Sharding(NamedTuple):
    """How a stage's parameters are divided among its replicas."""

    buckets: tuple[tuple[tuple[Piece, ...], ...], ...]  # by bucket and replica; all pieces of a bucket have one dtype
    replica: int  # index of the replica whose sharding this is
    keeps_all: bool = True  # replicas keep all parameters; otherwise they gather them for a pass and free them after it

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

    Args:
        indices: positions of the bucket's parameters in the stage's order, in the bucket's order.
        sizes: elements of every parameter of the stage.
        num_replicas: among which the bucket is divided.
        whole: whether parameters stay whole.
    """
    total = sum(sizes[index] for index in indices)
    runs: list[list[Piece]] = [[] for _ in range(num_replicas)]
    replica = 0  # whose run is being filled
    before = 0  # elements of earlier parameters
    for index in indices:
        start, size = 0, sizes[index]
        while start < size:
            border = total * (replica + 1) // num_replicas - before  # where the run should end, in this parameter
            is_last = replica == num_replicas - 1
            stop = size if is_last or border >= size else _rounded(border, size, whole=whole)
            if stop > start:
                runs[replica].append(Piece(index, start, stop))
                start = stop
            if start < size:
                replica += 1
        before += size
        if replica < num_replicas - 1 and before >= total * (replica + 1) // num_replicas:
            replica += 1
    return [tuple(run) for run in runs]


def _rounded(border: int, size: int, *, whole: bool) -> int:
    """Return the nearest allowed border in a parameter."""
    step = size if whole else ROW
    return max(0, min(size, round(border / step) * step))
