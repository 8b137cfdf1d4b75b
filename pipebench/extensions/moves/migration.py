"""A stage while layers leave or join it: one replica to its worker, several inside (see `stage_parts`).

Paper: vPipe (TPDS'21), section 4.3. Differs: the block's inputs are sent in place of its saved activations.
A block that is about to leave runs forwards, but saves nothing for the backward. Instead its inputs, with the weights,
buffers and states that the forward read, are sent to the new stage. That stage recomputes the forward before the
backward, in a separate replica of the block, a guest, whose running statistics are discarded.

Gradients are keyed by the model's own names, so that the next update applies them in whichever replica has the
parameter by then.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from pipebench.checkpoint.share import Share
from pipebench.checkpoint.state import ModelState
from pipebench.engine.accumulation import OnGradient
from pipebench.engine.gradients import Gradients, add
from pipebench.engine.loss_scale import LossScale
from pipebench.engine.prediction import AS_IT_IS, Displacement
from pipebench.engine.replica import LiveBytes, Replica, UnitInput, Values
from pipebench.engine.replica_state import restore, state_of
from pipebench.engine.streams import StreamSlot
from pipebench.extensions.moves.repartition_plan import BlockTransfer
from pipebench.extensions.moves.segment import MovingSegment
from pipebench.extensions.moves.stage_parts import StagePart, StageParts
from pipebench.model.slice_modules import Divided
from pipebench.model.stage import Stage
from pipebench.model.values import bytes_in


@dataclass(frozen=True)
class TransferredUnit:
    """The data of a unit that runs forward through a block on one stage, and backward on another."""

    version: int  # of the block's weights: number of updates since the run began
    state: ModelState  # before the forward: parameters of that version, buffers, carried states
    inputs: list[torch.Tensor]  # model inputs that the block reads, in its stage's order
    received: Values  # outputs of layers outside the block that it reads, by layer

    def to_plain(self) -> dict[str, Any]:
        """Return dictionaries and lists of tensors and numbers, for sending."""
        return {**vars(self), "state": vars(self.state)}

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> "TransferredUnit":
        """Inverse of `to_plain`."""
        return cls(**{**data, "state": ModelState(**data["state"])})


class MigratingReplica:
    """A stage some of whose layers move.

    Args:
        replica: runs the stage before the move.
        bounds: its first layer, and the layer after its last.
        share: the worker's share of the model's state.
        phases: the segment's cuts.
        make_replica: makes a replica of some layers.
        measure_memory: called at moments of peak memory within an operation.
    """

    scale: LossScale | None = None  # losses aren't scaled if layers move
    tied_positions: frozenset[int] = frozenset()  # nor are weights tied over stages
    divided: Divided | None = None  # nor are layers divided among processes

    def __init__(
        self,
        replica: Replica,
        bounds: tuple[int, int],
        share: Share,
        phases: MovingSegment,
        make_replica: Callable[[Stage], Replica],
        measure_memory: Callable[[], None],
    ) -> None:
        self.recomputed_bytes = 0  # see `Replica`
        self._share = share
        self._phases = phases
        self._make_replica = make_replica
        self._measure_memory = measure_memory
        self._retiring: Replica | None = None  # still in memory beside its successors
        self._parts = StageParts(StagePart(replica, *bounds), replica.in_flight)
        self._pending_transfers: dict[tuple[int, int], TransferredUnit] = {}  # by unit and target stage
        self._gradients: dict[str, torch.Tensor] = {}  # by the model's own name, until applied
        self._collect_gradients(replica)
        self._most_alive = 0
        self._note_versions()

    # Methods of every replica.

    @property
    def inputs(self) -> tuple[str, ...]:
        """The model inputs that the next forward reads."""
        return tuple(dict.fromkeys(name for part in self._parts for name in part.replica.stage.inputs))

    @property
    def is_last(self) -> bool:
        """Whether the stage computes the model's output."""
        return any(part.replica.stage.is_last for part in self._parts)

    def forward(self, given: UnitInput) -> tuple[Values, torch.Tensor | None]:
        """Run a unit forward; see `Replica.forward`. Returns all known values, those of other stages too."""
        fields, values, result = dict(zip(self.inputs, given.inputs, strict=True)), dict(given.received), None
        for part in self._parts.begin(given.unit):
            replica, stage = part.replica, part.replica.stage
            reads, own = {layer: values[layer] for layer in stage.reads}, [fields[name] for name in stage.inputs]
            if part.leaves_to is not None:
                before = self._state_before(replica, given.place)
                transferred = TransferredUnit(given.version, before, own, reads)
                self._pending_transfers[given.unit, part.leaves_to] = transferred
            head = given.loss if stage.is_last else None
            found, result = replica.forward(given._replace(inputs=own, received=reads, loss=head))
            values |= found
            if part.leaves_to is not None:
                self._measure_memory()
                replica.drop_unit(given.unit)
        self._note_versions()
        return values, result

    def backward(
        self, unit: int, arrived: Gradients, on_gradient: OnGradient | None = None, move: Displacement = AS_IT_IS
    ) -> Gradients:
        """Run a unit backward through all replicas that ran it forward here; see `Replica.backward`.

        Returns gradients for other stages' layers, too. `on_gradient` and `move` are unused: a stage whose layers move
        isn't replicated, and stashes its versions.
        """
        total, self.recomputed_bytes = {layer: list(found) for layer, found in arrived.items()}, 0
        for replica in self._parts.end(unit):
            heads = {layer: total.pop(layer, []) for layer in replica.stage.returns}
            add(total, replica.backward(unit, heads))
            self._collect_gradients(replica)
            # Replicas recompute one after the other.
            self.recomputed_bytes = max(self.recomputed_bytes, replica.recomputed_bytes)
        return total

    def stepped(self) -> list[torch.Tensor | None]:
        """Return the gradients of the stage's current layers, in the dtypes that the optimizer steps on."""
        found: list[torch.Tensor | None] = []
        for part in self._parts:
            weights = part.replica.weights
            own = [self._gradients.pop(self._share.names[name], None) for name in weights.names]
            part.replica.gradients = weights.as_stepped(own)
            found += part.replica.gradients
        return found

    def update(self, gradients: Sequence[torch.Tensor | None], lr: float, *, keep_from: int) -> None:
        """Apply one update to the stage's current layers."""
        given = iter(gradients)
        for part in self._parts:
            own = [next(given) for _ in part.replica.weights.names]
            part.replica.update(own, lr, keep_from=keep_from)
        self._note_versions()

    def skip_update(self, *, keep_from: int) -> None:
        """Drop the gradients instead of applying them."""
        for part in self._parts:
            part.replica.skip_update(keep_from=keep_from)
        self._note_versions()

    def swap_out(self, unit: int) -> int:
        """Copy a unit's saved activations of swapped layers to the host; return the bytes."""
        return sum(replica.swap_out(unit) for replica in self._parts.ran_here(unit))

    def swap_in(self, unit: int) -> int:
        """Begin to copy them back; return the bytes."""
        return sum(replica.swap_in(unit) for replica in self._parts.ran_here(unit))

    def host_bytes(self) -> int:
        """Return the host bytes of minibatches in flight."""
        return sum(each.host_bytes() for each in self._all_replicas())

    def live_by_kind(self) -> LiveBytes:
        """Return the bytes of all replicas here and of units waiting to be transferred."""
        waiting = sum(
            bytes_in([vars(each.state), each.inputs, each.received]) for each in self._pending_transfers.values()
        )
        own = LiveBytes(0, 0, 0, bytes_in(self._gradients), waiting)
        rows = zip(own, *(each.live_by_kind() for each in self._all_replicas()), strict=True)
        return LiveBytes(*map(sum, rows))

    # State transfer.

    def cut_off(self, block: BlockTransfer) -> None:
        """Separate a block that is about to leave: units that it now runs forward run backward on its next stage."""
        self._retire(self._parts.cut_off(block, self._copy)[0])

    def renew(self, at: int) -> None:
        """Rebuild the stage, whose memory policies change with minibatch `at`."""
        self._retire(self._parts.renew(at, self._copy)[0])

    def give_unit(self, unit: int, target: int) -> TransferredUnit:
        """Return the data that stage `target` needs to run a unit backward through the block that it takes."""
        return self._pending_transfers.pop((unit, target))

    def give(self, target: int) -> ModelState:
        """Remove the block that stage `target` takes; return its state."""
        return state_of(self._parts.leave(target), self._share)

    def forward_again(
        self, block: BlockTransfer, unit: int, given: TransferredUnit, draw: tuple[int, ...], place: StreamSlot
    ) -> None:
        """Recompute a unit's forward through a block that another stage ran first, for the backward here."""
        guest = self._parts.guest(block, unit, self._make)
        restore(guest, given.state, self._share)
        guest.weights.renumber(given.version)
        guest.forward(UnitInput(unit, draw, given.inputs, given.received, given.version, place))

    def take(self, block: BlockTransfer, state: ModelState) -> None:
        """Add a block, which runs as one with the adjacent layers from the next forward on."""
        self._retire(self._parts.join(block, partial(self._copy, came=state))[0])

    @property
    def whole(self) -> StagePart[Replica] | None:
        """The stage's only replica once all transfers and all backwards of retired replicas are over, else None."""
        last = self._parts.whole
        if last is None:
            return None
        weights = last.replica.weights
        names = [self._share.names[name] for name in weights.names]
        if not self._gradients.keys() <= {*names}:  # a guest's, of layers that have yet to arrive
            return None
        last.replica.gradients = [self._gradients.get(name) for name in names]
        weights.versions.most_alive = max(weights.most_alive, self._most_alive)
        return last

    def _retire(self, replica: Replica) -> None:
        """Retire a replica; its successors already have copies of its weights, so memory is highest now."""
        self._retiring = replica
        self._measure_memory()
        self._retiring = None
        replica.retire()

    def _collect_gradients(self, replica: Replica) -> None:
        """Collect a replica's gradients; a parameter gets at most one per update."""
        names, computed = replica.weights.names, replica.gradients
        self._gradients |= {self._share.names[n]: g for n, g in zip(names, computed, strict=True) if g is not None}
        replica.gradients = [None] * len(names)

    def _make(self, start: int, stop: int, minibatch: int) -> Replica:
        """Return a replica of layers [start, stop), with a minibatch's policies."""
        return self._make_replica(self._phases.cut(start, stop, self._phases.policies(minibatch)))

    def _copy(self, old: Replica, start: int, stop: int, minibatch: int, came: ModelState | None = None) -> Replica:
        """Return a replica of layers [start, stop) with the state of `old` and, if layers arrived, theirs (`came`)."""
        made, state = self._make(start, stop, minibatch), state_of(old, self._share)
        restore(made, state if came is None else ModelState.merge([state, came]), self._share)
        made.weights.renumber(old.weights.newest.number)
        return made

    def _state_before(self, replica: Replica, place: StreamSlot) -> ModelState:
        """Return copies of the state that a unit's forward reads, since it may be overwritten before it is sent."""
        state, at = state_of(replica, self._share), f"{place.stream}/{place.microbatch}/"
        carried = {key: value for key, value in state.carried.items() if key.startswith(at)}
        read = replace(state, optimizer={}, carried=carried)
        return ModelState(**tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), vars(read)))

    def _all_replicas(self) -> Iterator[Replica]:
        """Yield every replica that holds memory here, once."""
        guests = (guest.replica for guest in self._parts.guests.values())
        retiring = [] if self._retiring is None else [self._retiring]
        yield from dict.fromkeys([*self._parts.owners(), *guests, *retiring])

    def _note_versions(self) -> None:
        """Count the live versions of the stage's own layers over all replicas."""
        alive = {number for replica in self._parts.owners() for number in replica.weights.versions.alive}
        self._most_alive = max(self._most_alive, len(alive))
