"""A replica's share of a checkpoint, written and restored."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from pipebench.checkpoint.recut import carried_states
from pipebench.checkpoint.share import Share
from pipebench.checkpoint.state import CheckpointError, ModelState, same_type_map
from pipebench.engine.replica import Replica
from pipebench.engine.streams import TRAIN


def state_of(replica: Replica, share: Share) -> ModelState:
    """Return the state at a drain that this replica writes to a checkpoint: references, not copies."""
    held = held_by(replica, share)
    if share.replica == 0:
        for section in (held.parameters, held.optimizer, held.mean_change, held.loss_scale):
            for name in share.elsewhere & section.keys():
                section.pop(name)
    else:
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
    """Return all state at a drain that this replica holds, whichever replica writes it: references, not copies."""
    carried = {
        f"{stream}/{microbatch}/{path}": carried
        for (split, stream, microbatch), state in replica.states.items()
        if split == TRAIN and share.holds(stream)
        for path, carried in zip(replica.stage.stateful, state, strict=True)
    }
    buffers = {share.names[name]: replica.exact.get(name, buffer) for name, buffer in replica.module.named_buffers()}
    own = ModelState(
        parameters={share.names[name]: parameter.detach() for name, parameter in _parameters(replica).items()},
        optimizer={share.names[name]: state for name, state in replica.weights.optimizer_state().items()},
        buffers=buffers,
        carried=carried,
        loss_scale={}
        if replica.scale is None
        else {share.names[n]: replica.scale.state() for n in replica.weights.names},
        mean_change={share.names[name]: change for name, change in _mean_change(replica).items()},
        pieces={share.names[name]: place for name, place in replica.weights.places_of_pieces().items()},
    )
    return ModelState.merge([own, replica.shelf or _as_cut(replica, share)])


def restore(replica: Replica, state: ModelState, share: Share) -> None:
    """Restore this replica's share of a whole model's state, by name; it is neither changed nor referenced.

    Raises:
        CheckpointError: a tensor of this stage is missing or has another shape; the replica is unchanged then.
    """
    own, state = {name: share.names[name] for name in names_in(replica)}, state.of_slice(share.cuts)
    given = {**state.buffers, **state.parameters}
    given |= {n: b for n in own.values() if (b := state.counters.get(f"{share.replica}/{n}")) is not None}
    tensors = {**_whole(replica), **dict(replica.module.named_buffers())}
    for name, tensor in tensors.items():
        _check_fits(own[name], tensor, given)
    carried = carried_states(state.carried if share.unit_sizes else {}, replica.stage.stateful, share.unit_sizes)
    replica.shelf = _shelved(replica, state, given, share)
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
        for name in tensors.keys() - {*replica.weights.names}:
            tensors[name].copy_(given[own[name]])
        for name, tensor in replica.exact.items():
            if name in own:
                tensor.copy_(given[own[name]])
    replica.states.clear()
    for place, values in carried.items():
        if share.holds(place[0]):
            replica.states[TRAIN, *place] = same_type_map(values, lambda t: t.to(replica.device, copy=True))


def names_in(replica: Replica) -> set[str]:
    """Return the stage's names of a replica's parameters and buffers."""
    return {*_whole(replica), *dict(replica.module.named_buffers()), *replica.stage.idle}


def _as_cut(replica: Replica, share: Share) -> ModelState:
    """Return the initial state of the layers that are left out."""
    idle = {share.names[name]: tensor for name, tensor in replica.stage.idle.items()}
    parameters = {name: tensor.detach() for name, tensor in idle.items() if isinstance(tensor, nn.Parameter)}
    return ModelState(parameters=parameters, buffers={n: t for n, t in idle.items() if n not in parameters})


def _shelved(replica: Replica, state: ModelState, given: Mapping[str, torch.Tensor], share: Share) -> ModelState:
    """Return copies of a state's tensors of the layers that are left out."""
    found = _as_cut(replica, share)
    for section in (found.parameters, found.buffers):
        for name, tensor in section.items():
            _check_fits(name, tensor, given)
            section[name] = _on_host(given[name])
    return replace(
        found,
        optimizer={n: same_type_map(state.optimizer[n], _on_host) for n in found.parameters if n in state.optimizer},
        mean_change={n: _on_host(state.mean_change[n]) for n in found.parameters if n in state.mean_change},
    )


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _parameters(replica: Replica) -> dict[str, torch.Tensor]:
    """Return the newest and the untrained parameters, in full precision; of sharded ones this replica's pieces."""
    trained = replica.weights.trained()
    names = {*replica.weights.names} - trained.keys()
    return {name: p for name, p in _whole(replica).items() if name not in names} | trained


def _whole(replica: Replica) -> dict[str, torch.Tensor]:
    """Return all parameters as the stage's module has them; sharded ones may have no memory for now."""
    return {name: replica.exact.get(name, p) for name, p in replica.module.named_parameters()}


def _mean_change(replica: Replica) -> dict[str, torch.Tensor]:
    return {} if replica.moved is None else replica.moved.mean_change


def _check_fits(name: str, tensor: torch.Tensor, given: Mapping[str, torch.Tensor]) -> None:
    """Raise an error if a parameter or buffer is missing or has another shape."""
    if name not in given:
        raise CheckpointError(f"the checkpoint has no {name}, which the model has")
    if given[name].shape != tensor.shape:
        shapes = f"{list(given[name].shape)} in the checkpoint and {list(tensor.shape)} in the model"
        raise CheckpointError(f"{name} has the shape {shapes}")
