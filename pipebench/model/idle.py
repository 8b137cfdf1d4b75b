"""Idle layers: those that keep their index, and their weights, while they compute nothing."""

import copy
from collections.abc import Iterator

import torch
from torch import fx, nn

from pipebench.model.graph import LayerGraph, attribute


def idle_tensors(graph: LayerGraph, start: int, stop: int) -> dict[str, torch.Tensor]:
    """Return copies of the parameters and buffers that only idle layers use, of layers `start` to `stop`, excluded."""
    layers = graph.layers[start:stop]
    there = {id(tensor) for layer in layers if not layer.idle for _, tensor in _tensors(graph.root, layer.node)}
    idle = {name: tensor for layer in layers if layer.idle for name, tensor in _tensors(graph.root, layer.node)}
    return {name: copy.deepcopy(tensor) for name, tensor in idle.items() if id(tensor) not in there}


def _tensors(root: nn.Module, node: fx.Node) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers that a layer uses, by qualified name."""
    if node.op == "call_module":
        path = str(node.target)
        yield from root.get_submodule(path).named_parameters(path)
        yield from root.get_submodule(path).named_buffers(path)
    for read in node.all_input_nodes:
        if read.op == "get_attr" and isinstance(value := attribute(root, str(read.target)), torch.Tensor):
            yield str(read.target), value
