"""A model's layers in pieces that take turns on a device which can't hold all of them; the others wait on the host."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from pipebench.errors import ProfileError
from pipebench.model.graph import LayerGraph, tensors_read
from pipebench.recipe.users_code import message_of


class Pieces:
    """The layers of a graph and the loss, cut into pieces of about equally many.

    Attributes:
        root: the model, on the host except for the tensors of the piece that is on the device.
        ranges: the indices of every piece's layers; the loss has the index after the last layer's.
    """

    def __init__(self, graph: LayerGraph, root: nn.Module, device: torch.device, count: int) -> None:
        """Cut a graph into `count` pieces, or into as many as there are layers and the loss, if these are fewer."""
        self._graph, self.root, self._device = graph, root, device
        num_steps = len(graph.layers) + 1
        count = min(count, num_steps)
        self.ranges = [range(*ends) for ends in pairwise(num_steps * k // count for k in range(count + 1))]

    @contextmanager
    def on_device(self, piece: range) -> Iterator[list[torch.Tensor]]:
        """Hold a piece's parameters and buffers on the device within the context; yield them.

        They are copies: changes that layers make to them are lost.

        Raises:
            ProfileError: the device can't hold them; names the first layer.
        """
        nodes = [layer.node for layer in self._graph.layers[piece.start : piece.stop] if not layer.idle]
        nodes += self._graph.graph.find_nodes(op="output")
        used = {id(tensor): tensor for node in nodes for _, tensor in tensors_read(self.root, node)}
        modules = [self.root.get_submodule(str(node.target)) for node in nodes if node.op == "call_module"]
        tensors, on_host = [*used.values()], [tensor.data for tensor in used.values()]
        try:
            self._place(tensors, modules)
            yield tensors
        except torch.OutOfMemoryError as error:
            first = self._graph.layers[min(piece.start, len(self._graph.layers) - 1)].name
            raise ProfileError(f"from layer {first} on nothing can be profiled: {message_of(error)}", first) from error
        finally:
            for tensor, data in zip(tensors, on_host, strict=True):
                tensor.data = data

    def _place(self, tensors: list[torch.Tensor], modules: list[nn.Module]) -> None:
        """Copy tensors to the device, and repack the weights of recurrent layers there."""
        for tensor in tensors:
            tensor.data = tensor.data.to(self._device, copy=True)
        for part in (part for module in modules for part in module.modules()):
            if isinstance(part, nn.RNNBase):
                part.flatten_parameters()  # as `Module.to` does: cuDNN needs the weights in one piece of memory

    def to_host(self, value: Any) -> Any:
        """Return a layer's value with copies of its tensors on the host, without their autograd graph."""
        return _moved(value, torch.device("cpu"))

    def to_device(self, value: Any) -> Any:
        """Return a value with copies of its tensors on the device."""
        return _moved(value, self._device)


def _moved(value: Any, device: torch.device) -> Any:
    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, move, value)
