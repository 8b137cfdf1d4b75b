"""One weight version of a stage: flat buffers, and a view of them per parameter.

Every buffer has a storage of its own. Slices of one storage share autograd's version counter, so that writing one
weight version would look like overwriting all. There is a buffer per dtype, and one per recurrent module, laid out as
cuDNN requires; otherwise cuDNN would copy the weights at every call.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from pipebench.engine.shards import Piece
from pipebench.model.memory_format import is_channels_last, shaped

_ALIGNED_BYTES = 256  # cudaMalloc's alignment: kernels read as fast as from separate tensors


class Like(NamedTuple):
    """A parameter's shape, dtype, device and order in memory."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    last: bool  # whether its channels are last in memory

    @staticmethod
    def of(tensor: torch.Tensor) -> "Like":
        """Return a tensor's."""
        return Like(tensor.shape, tensor.dtype, tensor.device, is_channels_last(tensor))

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter."""
        return self.shape.numel() * self.dtype.itemsize


class ParameterGroup(NamedTuple):
    """Parameters of one dtype that share a buffer."""

    indices: Sequence[int]  # positions in the stage's order, in buffer order
    packed: bool  # whether there are no gaps between them


class Version:
    """The parameters of a stage after some number of updates, initially zeros; those of a group share a buffer."""

    __slots__ = ("__weakref__", "flats", "num_bytes", "number", "parameters", "stepped")

    def __init__(
        self, likes: Sequence[Like], groups: Sequence[ParameterGroup], pieces: Sequence[Piece] | None = None
    ) -> None:
        self.number = 0  # updates since the start of the run
        self.num_bytes = sum(like.nbytes for like in likes)  # of the parameters, without gaps
        self.flats: list[torch.Tensor] = []  # one-dimensional, one per group
        views: dict[int, torch.Tensor] = {}
        for group in groups:
            starts, total = _places_in_buffer([likes[index] for index in group.indices], packed=group.packed)
            first = likes[group.indices[0]]
            flat = torch.zeros(total, dtype=first.dtype, device=first.device)
            self.flats.append(flat)
            for index, start in zip(group.indices, starts, strict=True):
                shape, run = likes[index].shape, flat[start : start + likes[index].shape.numel()]
                views[index] = shaped(run, shape, last=likes[index].last).detach().requires_grad_()
        self.parameters = [views[index] for index in range(len(likes))]  # leaf views, in the stage's order
        # What an optimizer steps on: all parameters, or views of these pieces of them
        self.stepped = self.parameters if pieces is None else [p.of(self.parameters[p.place]) for p in pieces]


def _places_in_buffer(likes: Sequence[Like], *, packed: bool) -> tuple[list[int], int]:
    """Return each parameter's offset in a buffer, and the buffer's length, in elements."""
    starts, end = [], 0
    for like in likes:
        starts.append(end)
        step = 1 if packed else max(1, _ALIGNED_BYTES // like.dtype.itemsize)
        end += -(-like.shape.numel() // step) * step
    return starts, end


def apart(values: Sequence[torch.Tensor]) -> Version:
    """Return copies of parameters that only the optimizer uses, so that none is laid out for a module."""
    likes = [Like.of(value) for value in values]
    made = Version(likes, grouped([], likes))
    fill(made, values)
    return made


def fill(version: Version, values: Sequence[torch.Tensor]) -> None:
    """Set a version's parameters, rounded to their types."""
    if values:
        with torch.no_grad():
            torch._foreach_copy_(version.parameters, list(values))


def recurrent_in(module: nn.Module, parameters: Sequence[torch.Tensor]) -> Iterator[tuple[nn.RNNBase, list[int]]]:
    """Yield every recurrent module whose weights cuDNN can use in place, with the positions of its parameters in order.

    In cuDNN's buffer all matrices come first, layer by layer, then all biases; PyTorch expects them from the start of
    the storage. Modules with projections, or with frozen or shared parameters, are left to PyTorch.
    """
    index = {id(parameter): i for i, parameter in enumerate(parameters)}
    taken: set[int] = set()
    for part in module.modules():
        if not isinstance(part, nn.RNNBase) or part.proj_size > 0:
            continue
        names = sorted(part._flat_weights_names, key=lambda name: name.startswith("bias"))  # stable
        order = [index.get(id(getattr(part, name)), -1) for name in names]
        is_own = -1 not in order and len({*order}) == len(order) and taken.isdisjoint(order)
        if is_own and len({parameters[index].dtype for index in order}) == 1:
            taken.update(order)
            yield part, order


def grouped(recurrent: Sequence[Sequence[int]], likes: Sequence[Like]) -> list[ParameterGroup]:
    """Return which parameters share a buffer: those of each recurrent module, and the others by dtype."""
    apart = {index for order in recurrent for index in order}
    by_type: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, like in enumerate(likes):
        if index not in apart:
            by_type.setdefault((like.dtype, like.device), []).append(index)
    rest = [ParameterGroup(indices, packed=False) for indices in by_type.values()]
    return [*rest, *(ParameterGroup(order, packed=True) for order in recurrent)]


def places_in(
    modules: Iterable[nn.Module], parameters: Iterable[torch.Tensor]
) -> list[tuple[dict[str, nn.Parameter | None], str, int]]:
    """Return where modules hold parameters, tied ones several times: a module's table, the key, the position."""
    index = {id(parameter): i for i, parameter in enumerate(parameters)}
    parts = dict.fromkeys(part for module in modules for part in module.modules())
    return [
        (part._parameters, key, index[id(parameter)])
        for part in parts
        for key, parameter in part._parameters.items()
        if id(parameter) in index
    ]
