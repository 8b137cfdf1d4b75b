"""A replica's share of a checkpoint: what it writes, and how it is restored."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipebench.checkpoint.share import Share
from pipebench.checkpoint.state import CheckpointError, ModelState
from pipebench.engine.replica import Replica
from pipebench.engine.streams import TRAIN
from pipebench.model.sampling import microbatch_sizes


def state_of(replica: Replica, share: Share) -> ModelState:
    """Return the state at a drain that this replica writes to a checkpoint: references, not copies.

    The first replica of a stage, and the first of the processes among which its layers are divided, writes what all of
    them hold; the others write only what is theirs alone.
    """
    held = held_by(replica, share)
    for section in (held.parameters, held.optimizer, held.mean_change, held.loss_scale, held.pieces):
        for name in share.elsewhere & section.keys():
            section.pop(name)
    if share.replica > 0:
        own = {name: buffer for name, buffer in held.buffers.items() if not buffer.is_floating_point()}
        held = ModelState(
            parameters={name: held.parameters[name] for name in held.pieces},
            optimizer={name: state for name, state in held.optimizer.items() if name in held.pieces},
            counters={f"{share.replica}/{n}": b for n, b in own.items()},
            carried=held.carried,
            pieces=held.pieces,
        )
    slices = {
        name: torch.tensor([cut.dimension, cut.start, *cut.shape])
        for name, cut in share.cuts.items() if name in held.parameters
    }  # fmt: skip
    if share.slice_index == 0:
        return replace(held, slices=slices)
    return ModelState(
        parameters={name: held.parameters[name] for name in slices},
        optimizer={name: state for name, state in held.optimizer.items() if name in slices},
        mean_change={name: change for name, change in held.mean_change.items() if name in slices},
        pieces={name: place for name, place in held.pieces.items() if name in slices},
        slices=slices,
    )


def held_by(replica: Replica, share: Share) -> ModelState:
    """Return all state at a drain that this replica holds, under the model's names: references, not copies."""
    carried = {
        f"{stream}/{microbatch}/{path}": carried
        for (split, stream, microbatch), state in replica.states.items()
        if split == TRAIN and share.holds(stream)
        for path, carried in zip(replica.stage.stateful, state, strict=True)
    }
    buffers = {share.names[name]: replica.exact.get(name, buffer) for name, buffer in replica.module.named_buffers()}
    mean_change = {} if replica.moved is None else replica.moved.mean_change
    scales = {} if replica.scale is None else {share.names[n]: replica.scale.state() for n in replica.weights.names}
    own = ModelState(
        parameters={share.names[name]: parameter.detach() for name, parameter in _parameters(replica).items()},
        optimizer={share.names[name]: state for name, state in replica.weights.optimizer_state().items()},
        buffers=buffers,
        carried=carried,
        loss_scale=scales,
        mean_change={share.names[name]: change for name, change in mean_change.items()},
        pieces={share.names[name]: place for name, place in replica.weights.places_of_pieces().items()},
    )
    return ModelState.merge([own, replica.idle_state or _as_cut(replica, share)])


def restore(replica: Replica, state: ModelState, share: Share) -> None:
    """Restore this replica's share of a whole model's state by copying from it.

    Raises:
        CheckpointError: a tensor of this stage is missing or has another shape; the replica is unchanged then.
    """
    own = {name: share.names[name] for name in names_in(replica)}  # the stage's name to the model's
    state = state.of_slice(share.cuts)
    counters = {name: state.counters.get(f"{share.replica}/{name}") for name in own.values()}
    given = {**state.buffers, **state.parameters}
    given |= {name: counter for name, counter in counters.items() if counter is not None}
    tensors = {**_whole(replica), **dict(replica.module.named_buffers())}
    for name, tensor in tensors.items():
        _check_fits(own[name], tensor, given)
    carried = carried_states(state.carried if share.unit_sizes else {}, replica.stage.stateful, share.unit_sizes)
    replica.idle_state = _idle_state_of(replica, state, given, share)
    parameters = {name: given[own[name]] for name in replica.weights.names}
    optimizer = {n: state.optimizer[own[n]] for n in replica.weights.names if own[n] in state.optimizer}
    replica.weights.restore(parameters, optimizer)
    if replica.scale is not None:
        named = [state.loss_scale[own[n]] for n in replica.weights.names if own[n] in state.loss_scale]
        replica.scale.restore(named or [*state.loss_scale.values()])
    if replica.moved is not None:
        replica.moved.restore(
            {n: state.mean_change[own[n]] for n in replica.weights.names if own[n] in state.mean_change}
        )
    with torch.no_grad():
        module = replica.module
        for table in (dict(module.named_parameters()), dict(module.named_buffers()), replica.exact):
            for name, tensor in table.items():
                if name in own and name not in replica.weights.names:
                    tensor.copy_(given[own[name]])
    replica.states.clear()
    for place, values in carried.items():
        if share.holds(place[0]):
            replica.states[TRAIN, *place] = pytree.tree_map_only(
                torch.Tensor, lambda t: t.to(replica.device, copy=True), values
            )


def names_in(replica: Replica) -> set[str]:
    """Return the stage's names of a replica's parameters and buffers."""
    return {*_whole(replica), *dict(replica.module.named_buffers()), *replica.stage.idle}


def _as_cut(replica: Replica, share: Share) -> ModelState:
    """Return the initial state of the layers that are left out for now (`Replica.idle_state`)."""
    idle = {share.names[name]: tensor for name, tensor in replica.stage.idle.items()}
    parameters = {name: tensor.detach() for name, tensor in idle.items() if isinstance(tensor, nn.Parameter)}
    return ModelState(parameters=parameters, buffers={n: t for n, t in idle.items() if n not in parameters})


def _idle_state_of(replica: Replica, state: ModelState, given: Mapping[str, torch.Tensor], share: Share) -> ModelState:
    """Return copies on the host of a state's tensors of the layers that are left out for now."""
    found = _as_cut(replica, share)
    for section in (found.parameters, found.buffers):
        for name, tensor in section.items():
            _check_fits(name, tensor, given)
            section[name] = _on_host(given[name])
    return replace(
        found,
        optimizer=pytree.tree_map_only(
            torch.Tensor, _on_host, {n: state.optimizer[n] for n in found.parameters if n in state.optimizer}
        ),
        mean_change={n: _on_host(state.mean_change[n]) for n in found.parameters if n in state.mean_change},
    )


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _parameters(replica: Replica) -> dict[str, torch.Tensor]:
    """Return all parameters, the newest and in full precision; of sharded ones, this replica's pieces."""
    trained = replica.weights.trained()
    names = {*replica.weights.names} - trained.keys()
    return {name: p for name, p in _whole(replica).items() if name not in names} | trained


def _whole(replica: Replica) -> dict[str, torch.Tensor]:
    """Return all parameters, whole, as the stage's module has them; those of shards may have no memory."""
    return {name: replica.exact.get(name, p) for name, p in replica.module.named_parameters()}


def _check_fits(name: str, tensor: torch.Tensor, given: Mapping[str, torch.Tensor]) -> None:
    """Raise an error if a parameter or buffer is missing or has another shape."""
    if name not in given:
        raise CheckpointError(f"the checkpoint has no {name}, which the model has")
    if given[name].shape != tensor.shape:
        shapes = f"{list(given[name].shape)} in the checkpoint and {list(tensor.shape)} in the model"
        raise CheckpointError(f"{name} has the shape {shapes}")


def carried_states(
    carried: Mapping[str, Any], modules: Sequence[str], sizes: Sequence[int]
) -> dict[tuple[int, int], list[Any]]:
    """Return carried states by (stream, microbatch), one per module.

    Args:
        carried: `stream/microbatch/module` to the state, for the whole model, in the checkpoint's microbatches.
        modules: qualified names of the modules whose states are wanted, in order.
        sizes: samples of each microbatch now.

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
    """Return a module's state of one stream by microbatch, given those of the checkpoint's microbatches."""
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
