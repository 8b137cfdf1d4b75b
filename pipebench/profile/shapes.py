"""Shapes and bytes of layers' outputs, by running a model on torch's meta device, whose tensors have no values."""

from typing import Any

import torch
from torch import fx, nn

from pipebench.errors import ProfileError
from pipebench.model.copies import copied_to
from pipebench.model.graph import LayerGraph, forget_states, run_node
from pipebench.model.precision import lower
from pipebench.model.values import bytes_in, tensors_in
from pipebench.zoo.registry import Dataset


def without_data(root: nn.Module) -> nn.Module:
    """Return a copy of a module on the meta device; shared tensors stay shared."""
    return copied_to(root, torch.device("meta"))


def output_bytes(graph: LayerGraph, dataset: Dataset, num_samples: int) -> dict[int, int]:
    """Return layer index to the bytes of its output, integers included; idle layers are left out.

    Raises:
        ProfileError: a layer can't be run without data; names it.
    """
    _, values = run_without_data(graph, dataset, num_samples)
    return {layer.index: bytes_in(values[layer.node]) for layer in graph.layers if not layer.idle}


def output_forms(graph: LayerGraph, dataset: Dataset, num_samples: int) -> dict[str, tuple[str, ...]]:
    """Return node name to the types and shapes of its output's tensors, for model inputs and layers.

    Raises:
        ProfileError: a layer can't be run without data; names it.
    """
    _, values = run_without_data(graph, dataset, num_samples)
    return {node.name: tuple(map(_form, tensors_in(value))) for node, value in values.items()}


def run_without_data(graph: LayerGraph, dataset: Dataset, num_samples: int) -> tuple[nn.Module, dict[fx.Node, Any]]:
    """Run a model without data; return its copy on the meta device, and every node's output.

    Raises:
        ProfileError: a layer can't be run without data; names it.
    """
    root = without_data(graph.root)
    lower([root], graph.rounding)
    forget_states(root)
    example = dataset.example(num_samples)
    placeholders = graph.graph.find_nodes(op="placeholder")
    env: dict[fx.Node, Any] = {node: example[name] for node, name in zip(placeholders, dataset.inputs, strict=True)}
    with torch.no_grad():
        for layer in (each for each in graph.layers if not each.idle):
            try:
                env[layer.node] = run_node(root, layer.node, env)
            except Exception as error:  # a user's module may raise anything
                reason = str(error).strip().split("\n")[0]
                raise ProfileError(
                    f"layer {layer.name} ({layer.kind}) can't be run without data, to know the size of what it puts "
                    f"out: {type(error).__name__}: {reason}"
                ) from error
    return root, env


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
