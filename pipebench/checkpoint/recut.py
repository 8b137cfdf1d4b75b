"""Recuts the states that modules carry for other microbatches than those they were written under."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pipebench.checkpoint.state import CheckpointError
from pipebench.model.sampling import microbatch_sizes


def carried_states(
    carried: Mapping[str, Any], modules: Sequence[str], sizes: Sequence[int]
) -> dict[tuple[int, int], list[Any]]:
    """Return carried states by (stream, microbatch), in the order of `modules`, the qualified names wanted.

    `carried` maps `stream/microbatch/module` to the state, of the whole model; `sizes` are each microbatch's samples.

    Raises:
        CheckpointError: the state can't be cut into these microbatches; names the module.
    """
    found: dict[int, dict[str, dict[int, Any]]] = {}
    for key, state in carried.items():
        place = key.split("/", 2)
        found.setdefault(int(place[0]), {}).setdefault(place[2], {})[int(place[1])] = state
    wanted = [microbatch for microbatch, size in enumerate(sizes) if size > 0]
    states: dict[tuple[int, int], list[Any]] = {}
    for stream, of_modules in found.items():
        if modules and not of_modules.keys() >= set(modules):
            missing = next(name for name in modules if name not in of_modules)
            raise CheckpointError(f"the checkpoint has no state of module {missing} for stream {stream}")
        columns = [_recut(name, of_modules[name], sizes) for name in modules]
        for microbatch in wanted if modules else ():
            states[stream, microbatch] = [column[microbatch] for column in columns]
    return states


def _recut(module: str, parts: Mapping[int, Any], sizes: Sequence[int]) -> Mapping[int, Any]:
    """Return a module's state of one stream by microbatch."""
    wanted = [microbatch for microbatch, size in enumerate(sizes) if size > 0]
    if sorted(parts) == wanted:
        return parts
    old = [size for size in microbatch_sizes(sum(sizes), len(parts)) if size > 0]
    new = [sizes[microbatch] for microbatch in wanted]
    flat = [pytree.tree_flatten(parts[microbatch]) for microbatch in sorted(parts)]
    columns = [_recut_leaf(module, leaves, old, new) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)]
    return {
        microbatch: pytree.tree_unflatten([column[index] for column in columns], flat[0][1])
        for index, microbatch in enumerate(wanted)
    }


def _recut_leaf(module: str, parts: Sequence[Any], old: Sequence[int], new: Sequence[int]) -> Sequence[Any]:
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return [parts[0]] * len(new)
    dims = [d for d in range(parts[0].dim()) if [part.shape[d] for part in parts] == list(old)]
    if 1 in dims and parts[0].dim() == 3:
        dims = [1]  # torch's recurrent modules: [layers, samples, features]
    if len(dims) != 1:
        shape = list(parts[0].shape)
        raise CheckpointError(
            f"the state of module {module} was written for microbatches of {old[0]} samples and can't be cut into such "
            f"of {new[0]}: {len(dims)} of its dimensions {shape} have that size; keep parallelism.microbatches"
        )
    return torch.split(torch.cat(list(parts), dims[0]), list(new), dims[0])
