"""A stage while layers leave or join it. To its worker it is a replica like any other; inside it is several.

Which they are, `stage_parts` says. Gradients are told apart by the model's own names: whoever computed one, it is the
new owner's update that takes it.

The forwards of a block that is about to leave keep nothing for a backward. What their layers read, and the weights,
buffers and states they read it with, are handed to the new owner, who computes them again before its backward. That
happens in a replica of the block's own, a guest, whose running statistics nobody reads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from pipebench.checkpoint.share import Share
from pipebench.checkpoint.state import ModelState, same_type_map
from pipebench.engine.accumulation import OnGradient
from pipebench.engine.in_flight import num_bytes
from pipebench.engine.loss_scale import LossScale
from pipebench.engine.prediction import AS_IT_IS, Displacement
from pipebench.engine.replica import LiveBytes, Replica, Values
from pipebench.engine.replica_state import restore, state_of
from pipebench.engine.segment_cuts import SegmentCuts
from pipebench.engine.stage_parts import StagePart, StageParts
from pipebench.engine.streams import StreamSlot
from pipebench.model.stage import LossFunction, Stage
from pipebench.schedule.moves import BlockTransfer


@dataclass(frozen=True)
class TransferredUnit:
    """A unit that ran forward through a block at its old owner and runs backward at its new one.

    Attributes:
        version: of the block's weights: updates since the run began.
        state: what the block's layers had before the forward: parameters of that version, buffers, carried states.
        inputs: model inputs that they read, in their stage's order.
        received: values that they read of other layers, by layer.
    """

    version: int
    state: ModelState
    inputs: list[torch.Tensor]
    received: Values

    def to_plain(self) -> dict[str, Any]:
        """Return it as dictionaries and lists of tensors and numbers, which travel."""
        return {**vars(self), "state": vars(self.state)}

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> "TransferredUnit":
        """Return what `to_plain` was called on."""
        return cls(**{**data, "state": ModelState(**data["state"])})


class MigratingReplica:
    """A stage some of whose layers move.

    Args:
        replica: what has run it up to now.
        bounds: its first layer, and the one after its last.
        share: its share of the model's state.
        phases: the cuts.
        make_replica: makes a replica of layers that are cut out.
        note_memory: is called where more is held than before or after what is done.

    Attributes:
        scale: none: losses aren't scaled where layers move.
        again_bytes: see `Replica`.
    """

    scale: LossScale | None = None

    def __init__(
        self,
        replica: Replica,
        bounds: tuple[int, int],
        share: Share,
        phases: SegmentCuts,
        make_replica: Callable[[Stage], Replica],
        note_memory: Callable[[], None],
    ) -> None:
        self._share, self._note_memory = share, note_memory
        self.again_bytes = 0
        self._retiring: Replica | None = None
        self._phases = phases
        self._make_replica = make_replica
        self._parts = StageParts(StagePart(replica, *bounds), replica.in_flight)
        self._pending_transfers: dict[tuple[int, int], TransferredUnit] = {}  # by unit and the stage that takes it
        self._gradients: dict[str, torch.Tensor] = {}  # by the model's own name, until they are applied
        self._collect_gradients(replica)
        self._most_alive = 0
        self._note_versions()

    # What its worker asks of every replica.

    @property
    def inputs(self) -> tuple[str, ...]:
        """The model inputs that the next forward reads."""
        return tuple(dict.fromkeys(name for part in self._parts for name in part.replica.stage.inputs))

    @property
    def is_last(self) -> bool:
        """Whether the model's output is computed here."""
        return any(part.replica.stage.is_last for part in self._parts)

    def forward(
        self,
        unit: int,
        draw: tuple[int, ...],
        inputs: Sequence[torch.Tensor],
        received: Values,
        place: StreamSlot,
        *,
        version: int,
        move: Displacement = AS_IT_IS,
        loss: LossFunction | None = None,
    ) -> tuple[Values, torch.Tensor | None]:
        """Run a unit forward; see `Replica.forward`. Returned are all values that are known by then, of others, too."""
        fields, values, result = dict(zip(self.inputs, inputs, strict=True)), dict(received), None
        for part in self._parts.begin(unit):
            replica, stage = part.replica, part.replica.stage
            reads, own = {layer: values[layer] for layer in stage.reads}, [fields[name] for name in stage.inputs]
            if part.leaves_to is not None:
                before = self._state_before(replica, place)
                self._pending_transfers[unit, part.leaves_to] = TransferredUnit(version, before, own, reads)
            head = loss if stage.is_last else None
            found, result = replica.forward(unit, draw, own, reads, place, version=version, loss=head)
            values |= found
            if part.leaves_to is not None:
                self._note_memory()
                replica.let_go(unit)
        self._note_versions()
        return values, result

    def backward(
        self,
        unit: int,
        arrived: Mapping[int, Sequence[torch.Tensor]],
        on_gradient: OnGradient | None = None,
        move: Displacement = AS_IT_IS,
    ) -> dict[int, list[torch.Tensor]]:
        """Run a unit backward through all that it ran forward through here; see `Replica.backward`.

        Returned are also gradients that came for layers of others. Those of parameters nobody takes one by one, and no
        weights are moved: a stage whose layers move has one replica, which stashes its versions.
        """
        total, self.again_bytes = {layer: list(found) for layer, found in arrived.items()}, 0
        for replica in self._parts.end(unit):
            heads = {layer: total.pop(layer, []) for layer in replica.stage.returns}
            for layer, found in replica.backward(unit, heads).items():
                known = total.get(layer)
                total[layer] = [a + b for a, b in zip(known, found, strict=True)] if known else found
            self._collect_gradients(replica)
            self.again_bytes = max(self.again_bytes, replica.again_bytes)  # one after the other they compute again
        return total

    def stepped(self) -> list[torch.Tensor | None]:
        """Return the gradients of the layers that are the stage's now, in the types of what the optimizer steps on."""
        found: list[torch.Tensor | None] = []
        for part in self._parts:
            weights = part.replica.weights
            own = [self._gradients.pop(self._share.names[name], None) for name in weights.names]
            part.replica.gradients = weights.as_stepped(own)
            found += part.replica.gradients
        return found

    def update(self, gradients: Sequence[torch.Tensor | None], lr: float, *, keep_from: int) -> None:
        """Apply one update to the layers that are the stage's now."""
        given = iter(gradients)
        for part in self._parts:
            own = [next(given) for _ in part.replica.weights.names]
            part.replica.update(own, lr, keep_from=keep_from)
        self._note_versions()

    def skip_update(self, *, keep_from: int) -> None:
        """Forget the gradients instead of applying them."""
        for part in self._parts:
            part.replica.skip_update(keep_from=keep_from)
        self._note_versions()

    def swap_out(self, unit: int) -> int:
        """Copy what swapped layers saved of a unit to the host; return the bytes."""
        return sum(replica.swap_out(unit) for replica in self._parts.ran_here(unit))

    def swap_in(self, unit: int) -> int:
        """Begin to copy that back; return the bytes."""
        return sum(replica.swap_in(unit) for replica in self._parts.ran_here(unit))

    def host_bytes(self) -> int:
        """Return the bytes of minibatches in flight that are on the host."""
        return sum(each.host_bytes() for each in self._everybody())

    def live_by_kind(self) -> LiveBytes:
        """Return the bytes that all that run here hold, and what waits to be handed over."""
        waiting = sum(
            num_bytes([vars(each.state), each.inputs, each.received]) for each in self._pending_transfers.values()
        )
        own = (0, 0, 0, num_bytes(self._gradients), waiting)
        rows = zip(own, *(each.live_by_kind() for each in self._everybody()), strict=True)
        return LiveBytes(*map(sum, rows))

    # Handing over.

    def part(self, block: BlockTransfer) -> None:
        """Cut a block apart that is about to leave: its next forwards run backward elsewhere."""
        self._retire(self._parts.part(block, self._copy)[0])

    def renew(self, at: int) -> None:
        """Cut what there is anew, for layers that do something else with the activations of forwards from `at` on."""
        self._retire(self._parts.renew(at, self._copy)[0])

    def give_unit(self, unit: int, target: int) -> TransferredUnit:
        """Return what another stage needs to run a unit backward through a block that it takes."""
        return self._pending_transfers.pop((unit, target))

    def give(self, target: int) -> ModelState:
        """Return a block's state; it is not here any more."""
        return state_of(self._parts.leave(target), self._share)

    def forward_again(
        self, block: BlockTransfer, unit: int, given: TransferredUnit, draw: tuple[int, ...], place: StreamSlot
    ) -> None:
        """Run a unit forward through a block that ran it at its old owner, so that it can run backward here."""
        guest = self._parts.guest(block, unit, self._make)
        restore(guest, given.state, self._share)
        guest.weights.renumber(given.version)
        guest.forward(unit, draw, given.inputs, given.received, place, version=given.version)

    def take(self, block: BlockTransfer, state: ModelState) -> None:
        """Take a block over: from the next forward on it runs with the layers beside it as one."""
        self._retire(self._parts.join(block, partial(self._copy, came=state))[0])

    @property
    def whole(self) -> StagePart[Replica] | None:
        """The one replica that runs all of the stage again, when everything is handed over and nobody is retired."""
        last = self._parts.whole
        if last is None:
            return None
        weights = last.replica.weights
        names = [self._share.names[name] for name in weights.names]
        if not self._gradients.keys() <= {*names}:  # of layers that are still to come
            return None
        last.replica.gradients = [self._gradients.get(name) for name in names]
        weights.versions.most_alive = max(weights.most_alive, self._most_alive)
        return last

    def _retire(self, replica: Replica) -> None:
        """Let a replica retire, in whose place others are, with copies of its weights."""
        self._retiring = replica
        self._note_memory()
        self._retiring = None
        replica.retire()

    def _collect_gradients(self, replica: Replica) -> None:
        """Take over what a replica has computed, one gradient for every update."""
        names, computed = replica.weights.names, replica.gradients
        self._gradients |= {self._share.names[n]: g for n, g in zip(names, computed, strict=True) if g is not None}
        replica.gradients = [None] * len(names)

    def _make(self, start: int, stop: int, minibatch: int) -> Replica:
        """Return a replica of layers, with the policies of a minibatch."""
        return self._make_replica(self._phases.cut(start, stop, self._phases.policies(minibatch)))

    def _copy(self, old: Replica, start: int, stop: int, minibatch: int, came: ModelState | None = None) -> Replica:
        """Return one that goes on from what another has of these layers, and from what has come of them."""
        made, state = self._make(start, stop, minibatch), state_of(old, self._share)
        restore(made, state if came is None else ModelState.merge([state, came]), self._share)
        made.weights.renumber(old.weights.newest.number)
        return made

    def _state_before(self, replica: Replica, place: StreamSlot) -> ModelState:
        """Return what a forward of a unit reads besides values, in copies: others write there before they are read."""
        state, at = state_of(replica, self._share), f"{place.stream}/{place.microbatch}/"
        carried = {key: value for key, value in state.carried.items() if key.startswith(at)}
        read = replace(state, optimizer={}, carried=carried)
        return ModelState(**same_type_map(vars(read), lambda tensor: tensor.detach().clone()))

    def _everybody(self) -> Iterator[Replica]:
        """Yield everyone who holds something here, once."""
        guests = (guest.replica for guest in self._parts.guests.values())
        retiring = [] if self._retiring is None else [self._retiring]
        yield from dict.fromkeys([*self._parts.owners(), *guests, *retiring])

    def _note_versions(self) -> None:
        """Count the versions of the stage's own layers that are alive, whoever holds them."""
        alive = {number for replica in self._parts.owners() for number in replica.weights.versions.alive}
        self._most_alive = max(self._most_alive, len(alive))
