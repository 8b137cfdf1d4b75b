"""Compares all tensors of a checkpoint with those of the model and its optimizer.

No part of a checkpoint is used before all of it fits. A checkpoint that doesn't fit is damaged, or the model's code has
changed; either way it is skipped, like an incomplete one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from pipebench.checkpoint.optimizers import FreshStates
from pipebench.checkpoint.share import own_names
from pipebench.checkpoint.state import CheckpointError, ModelState
from pipebench.checkpoint.tensors import Form, check_form, has_infinite, has_nan, kind_of
from pipebench.engine.setup import Setup
from pipebench.model.graph import LayerGraph, attribute, stateful_modules
from pipebench.model.precision import LOW_TYPES
from pipebench.model.sampling import microbatch_sizes
from pipebench.profile.shapes import run_without_data

_PRECISIONS = {torch.float32, *LOW_TYPES.values()}  # types that a computed tensor may have, by `train.precision`


def check_fits(state: ModelState, setup: Setup, step: int) -> ModelState:
    """Compare a checkpoint with a model, its optimizer and its data.

    Args:
        state: of the whole model, under any plan.
        setup: of the run that resumes; its graph has initial weights, or is on the meta device.
        step: minibatches done.

    Returns:
        The state to restore. Optimizer state is left out if the optimizer has none any more; the states that modules
        carry are in the types of the setup's precision.

    Raises:
        CheckpointError: names the first tensor that does not fit, found and expected.
    """
    check_weights(state, setup.graph)
    own = _own_tensors(setup.graph)
    optimizer = _fitting_optimizer(state, setup, own)
    for key, counter in state.counters.items():
        replica, _, name = key.partition("/")
        if not replica.isdecimal() or int(replica) < 1 or name not in own or own[name].is_floating_point():
            raise CheckpointError(f"counter {key!r}: found one that the model has not, as REPLICA/BUFFER")
        check_form(f"counter {key}", counter, Form.of(own[name]))
    carried = fitting_carried(state.carried, setup, step)
    for name, change in state.mean_change.items():
        _check_trained(f"the mean change of {name}", own.get(name))
        check_form(f"the mean change of {name}", change, Form.of(own[name]))
        if has_nan(change) and not _began_with(has_nan, own[name]):
            raise CheckpointError(f"the mean change of {name}: found an element that isn't a number (NaN)")
    for name, scale in state.loss_scale.items():
        _check_trained(f"the loss scale of {name}", own.get(name))
        check_form(f"the loss scale of {name}", scale, Form(torch.Size([3]), torch.float64))
        if not bool((scale.isfinite() & (scale >= 0)).all()) or scale[0] == 0:
            raise CheckpointError(
                f"the loss scale of {name}: found {scale.tolist()}, expected are a scale and two counts"
            )
    return replace(state, optimizer=optimizer, carried=carried)


def check_weights(state: ModelState, graph: LayerGraph) -> None:
    """Compare a checkpoint's parameters and buffers with a model's.

    Raises:
        CheckpointError: names the first that is missing, unknown, or of another shape or type.
    """
    own, held = _own_tensors(graph), set(_held(graph))
    parameters = {name for name, tensor in own.items() if isinstance(tensor, nn.Parameter)}
    for what, found, names in (
        ("parameter", state.parameters, parameters), ("buffer", state.buffers, own.keys() - parameters),
    ):  # fmt: skip
        for name in sorted(found.keys() - names):
            raise CheckpointError(f"{what} {name}: is in the checkpoint, but not in the model")
        for name in sorted((names & held) - found.keys()):
            raise CheckpointError(f"{what} {name}: is in the model, but not in the checkpoint")
        for name, tensor in found.items():
            check_form(f"{what} {name}", tensor, Form.of(own[name]))
            if what == "parameter" and has_nan(tensor) and not _began_with(has_nan, own[name]):
                raise CheckpointError(f"parameter {name}: found an element that isn't a number (NaN)")
            # Training would end in NaN. A diverging run ends at its first such loss, so its last checkpoint is finite.
            if what == "parameter" and has_infinite(tensor) and not _began_with(has_infinite, own[name]):
                raise CheckpointError(f"parameter {name}: found an infinite element, expected are finite numbers")
    for name in _variances(graph):
        found_least = state.buffers[name].min().item() if name in state.buffers else 0.0
        if found_least < 0:
            raise CheckpointError(f"buffer {name}: found a variance of {found_least:g}, expected is at least 0")


def _fitting_optimizer(state: ModelState, setup: Setup, own: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    fresh, taken = FreshStates(setup.make_optimizer), {}
    for name, found in state.optimizer.items():
        parameter = own.get(name)
        _check_trained(f"the optimizer's state of {name}", parameter)
        assert parameter is not None
        if fresh.check(name, found, Form.of(parameter), may_be_nan=_began_with(has_nan, parameter)):
            taken[name] = found
    return taken


def _check_trained(what: str, parameter: torch.Tensor | None) -> None:
    if not isinstance(parameter, nn.Parameter) or not parameter.requires_grad:
        raise CheckpointError(f"{what}: is in the checkpoint, but the model doesn't train it")


def _own_tensors(graph: LayerGraph) -> dict[str, torch.Tensor]:
    """Return every tensor of a layer graph by the model's own name; those divided into slices whole."""
    root = graph.root
    tensors = {
        **dict(root.named_buffers(remove_duplicate=False)),
        **dict(root.named_parameters(remove_duplicate=False)),
    }
    tensors |= {name: attribute(graph.model, name) for name in (graph.slices.cuts if graph.slices else ())}
    return {own: tensors[name] for name, own in own_names(graph).items()}


def _held(graph: LayerGraph) -> Iterator[str]:
    """Yield the own names of the layers' tensors: under every plan some stage has them."""
    own = own_names(graph)
    for node in (*graph.graph.nodes, *(layer.node for layer in graph.layers if layer.idle)):
        if node.op == "get_attr" and node.users and str(node.target) in own:
            yield own[str(node.target)]
        if node.op == "call_module":
            module, path = graph.root.get_submodule(str(node.target)), str(node.target)
            for named in (module.named_parameters(path), module.named_buffers(path)):
                yield from (own[name] for name, _ in named)


def _variances(graph: LayerGraph) -> Iterator[str]:
    own = own_names(graph)
    for path, module in graph.root.named_modules():
        if isinstance(module, _NormBase) and module.running_var is not None:
            yield own[f"{path}.running_var" if path else "running_var"]


def _began_with(has: Callable[[torch.Tensor], bool], tensor: torch.Tensor) -> bool:
    """Return whether a tensor has such elements initially: infinite ones, as in masks, or NaN, as in unused rows."""
    return tensor.device.type != "meta" and has(tensor)


def fitting_carried(carried: Mapping[str, Any], setup: Setup, step: int) -> dict[str, Any]:
    """Compare carried states with those after a minibatch of this size; return them in the setup's precision.

    There must be one for every stream that has begun by minibatch `step`, every microbatch and every module.
    """
    streams = range(min(setup.sampler.streams or 0, step))
    modules = stateful_modules(setup.graph.root, setup.graph.layers) if streams else ()
    num_samples = setup.sampler.size(0)
    numbers = [key.split("/", 2)[1] for key in carried if key.count("/") >= 2]
    last = max((int(number) for number in numbers if number.isdecimal() and len(number) < 10), default=0)
    sizes = microbatch_sizes(num_samples, min(last + 1, num_samples))
    expected = {
        f"{s}/{m}/{module}": (size, module) for s in streams for m, size in enumerate(sizes) for module in modules
    }
    for key in sorted(carried.keys() - expected.keys()):
        raise CheckpointError(
            f"state {key!r}: is in the checkpoint, but no module carries it (as STREAM/MICROBATCH/MODULE)"
        )
    for key in sorted(expected.keys() - carried.keys()):
        raise CheckpointError(f"state {key!r}: is carried from minibatch to minibatch, but not in the checkpoint")
    forms = {size: _carried_forms(setup, modules, size) for size, _ in set(expected.values())}
    fitting = {}
    for key, (size, module) in expected.items():
        fitting[key] = _fitting_leaves(f"what module {module} carries ({key})", carried[key], forms[size][module])
    return fitting


def _carried_forms(setup: Setup, modules: Sequence[str], num_samples: int) -> dict[str, Any]:
    """Return the states after `num_samples` samples, as tensors without data, by module."""
    root, _ = run_without_data(setup.graph, setup.dataset, num_samples)
    return {module: root.get_submodule(module).carried_state for module in modules}


def _fitting_leaves(what: str, found: Any, expected: Any) -> Any:
    """Compare nested containers tensor by tensor; return `found` in the expected precision."""
    leaves, structure = pytree.tree_flatten(found)
    wanted, wanted_structure = pytree.tree_flatten(expected)
    if structure != wanted_structure:
        raise CheckpointError(
            f"{what}: found {kind_of(found)} of {len(leaves)} leaves, expected is {kind_of(expected)} of {len(wanted)}"
        )
    for index, (leaf, like) in enumerate(zip(leaves, wanted, strict=True)):
        if isinstance(like, torch.Tensor):
            if isinstance(leaf, torch.Tensor) and {leaf.dtype, like.dtype} <= _PRECISIONS:
                leaves[index] = leaf = leaf.to(like.dtype)
            check_form(f"{what}, tensor {index}", leaf, Form.of(like))
        elif type(leaf) is not type(like):
            raise CheckpointError(f"{what}, item {index}: found {kind_of(leaf)}, expected is {kind_of(like)}")
    return pytree.tree_unflatten(leaves, structure)
