"""Computes a model in its own types, or in 16-bit types beside fp32 masters (mixed precision).

Micikevicius et al., "Mixed Precision Training" (ICLR 2018), as in NVIDIA's Apex at level O2 and Megatron: every fp32
parameter and constant of the model is rounded to the 16-bit type, except parameters and statistics of normalisation
layers. The loss is computed in fp32, and the optimizer steps on fp32 masters. torch.autocast keeps fp32 parameters and
rounds them at every use, so that weight versions, messages and stashes would be no smaller. Here types follow from the
operations, so that a pass on the meta device gives all bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from pipebench.model.graph import LayerGraph, Rounding
from pipebench.model.in_place import MADE, overwritten_buffer

LOW_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # by `train.precision`; `fp32` keeps the model's types

_BATCH_NORM = nn.modules.batchnorm._BatchNorm
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def precision_of(rounding: Rounding) -> str:
    """Return the value of `train.precision` that asks for a rounding."""
    return next(name for name, low_type in LOW_TYPES.items() if low_type is rounding.low_type)


def in_precision(graph: LayerGraph, precision: str) -> LayerGraph:
    """Return the layer graph with the `Rounding` of a precision; the model itself isn't changed."""
    low_type = LOW_TYPES.get(precision)
    if low_type is None:
        return graph
    graphs = (graph, graph.evaluated)
    read, written = set[str](), set[str]()
    for each in graphs:
        buffers = dict(each.root.named_buffers(remove_duplicate=False))
        named = (str(node.target) for node in each.graph.find_nodes(op="get_attr"))
        read |= {name for name in named if name in buffers and not name.split(".")[-1].startswith(MADE)}
        written |= {name for layer in each.layers if (name := overwritten_buffer(each.root, layer.node)) is not None}
    rounding = Rounding(low_type, frozenset(read - written))
    return replace(graph, rounding=rounding, evaluation=replace(graph.evaluated, rounding=rounding))


def lower(modules: Sequence[nn.Module], rounding: Rounding | None) -> dict[str, torch.Tensor]:
    """Let modules compute in a 16-bit type; return the fp32 tensors that were rounded, by qualified name.

    A module that holds rounded parameters rounds its fp32 arguments as well. A normalisation layer computes in fp32 and
    rounds its output, except batch normalisation: torch's takes 16-bit arguments beside fp32 parameters on every
    device. The modules may share parts, parameters and buffers, under the same names. A `rounding` of None changes
    nothing.
    """
    before: dict[str, torch.Tensor] = {}
    if rounding is None:
        return before
    rounded: dict[int, torch.Tensor] = {}  # by the id of the fp32 tensor, which `before` keeps alive
    parts = {part: path for module in modules for path, part in module.named_modules()}
    for part, path in parts.items():
        if isinstance(part, _NORMS):
            if not isinstance(part, _BATCH_NORM):
                _cast_arguments(part, rounding.low_type, torch.float32)
                part.register_forward_hook(partial(_round_output, rounding.low_type))
            continue
        for table, name, tensor in _rounded_tensors(part, path, rounding):
            before.setdefault(name, tensor.detach())
            if id(tensor) not in rounded:
                rounded[id(tensor)] = _in_type(tensor, rounding.low_type)
                vars(rounded[id(tensor)]).update(vars(tensor))
            table[name.rpartition(".")[2]] = rounded[id(tensor)]
        is_low = any(p is not None and p.dtype is rounding.low_type for p in part._parameters.values())
        if is_low and not isinstance(part, fx.GraphModule):  # a graph passes its own parameters to layers as arguments
            _cast_arguments(part, torch.float32, rounding.low_type)
    return before


def _rounded_tensors(
    part: nn.Module, path: str, rounding: Rounding
) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Yield the fp32 tensors to round of a module without its children: the table that has it, its name and itself."""
    prefix = f"{path}." if path else ""
    for table in (part._parameters, part._buffers):
        for key, tensor in list(table.items()):
            name = prefix + key
            wanted = table is part._parameters or name in rounding.constants
            if wanted and tensor is not None and tensor.dtype is torch.float32:
                yield table, name, tensor


def _in_type(tensor: torch.Tensor, low_type: torch.dtype) -> torch.Tensor:
    low = tensor.detach().to(low_type)
    return nn.Parameter(low, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else low


def _cast_arguments(module: nn.Module, given: torch.dtype, wanted: torch.dtype) -> None:
    module.register_forward_pre_hook(partial(_cast, given, wanted), with_kwargs=True)


def _cast(given: torch.dtype, wanted: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(wanted) if tensor.dtype is given else tensor

    return pytree.tree_map_only(torch.Tensor, cast, (args, kwargs))


def _round_output(low_type: torch.dtype, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.to(low_type) if output.dtype is torch.float32 else output
