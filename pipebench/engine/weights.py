"""The weight versions of one stage replica (PipeDream's weight stashing), shared by reference.

A minibatch in flight refers to the version of its forward. An update writes the next version into unused buffers, or in
place if nothing refers to the newest.

Where replicas are sharded, the optimizer steps on this replica's pieces of the parameters. If every replica keeps all
parameters, pieces are views of the newest version. Otherwise they are tensors of their own, and the version has memory
only while its weights are gathered.

In mixed precision, versions are 16-bit copies. The optimizer then steps on one separate version in the model's own
types, the masters, which every update rounds into the newest version.
"""

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from pipebench.engine.shards import Divide, Piece
from pipebench.engine.stage_optimizer import StageOptimizer
from pipebench.engine.version import Like, Version, fill, grouped, places_in, recurrent_in, separate_version
from pipebench.model.memory_format import laid_out_as
from pipebench.model.optimizer import MakeOptimizer, average_in
from pipebench.schedule.version_ledger import VersionLedger


class Weights:
    """All live versions of a stage replica's trained parameters, and the optimizer that makes the next one.

    Args:
        module: the stage; its parameters are replaced by views of the newest version.
        make_optimizer: makes a torch.optim optimizer for a list of parameters.
        overwrite: update in place even with minibatches in flight: the naive pipeline, whose backward sees newer
            weights than its forward.
        also: other modules that have some of the parameters.
        divide: returns which pieces of the parameters the optimizer steps on; None: all parameters, whole.
        masters: in mixed precision, the parameters before rounding, by name; None: the optimizer steps on the
            versions themselves.
    """

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: MakeOptimizer,
        *,
        overwrite: bool = False,
        also: Sequence[nn.Module] = (),
        divide: Divide | None = None,
        masters: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        parameters = [*named.values()]
        self.names = tuple(named)
        self._overwrite = overwrite
        self._places = places_in([module, *also], parameters)
        self._recurrent = list(recurrent_in(module, parameters))
        self._likes = [Like.of(p) for p in parameters]
        self._attributes = [dict(vars(p)) for p in parameters]  # a model's own, which its optimizer may read
        self._groups = grouped([order for _, order in self._recurrent], self._likes)
        self.sharding = sharding = None if divide is None else divide(named)
        self._pieces = None if sharding is None else sharding.own
        self.newest = self.new_version()  # the version of the most updates
        self.version_bytes = self.newest.num_bytes  # of one version
        fill(self.newest, parameters)
        exact = [(masters or {}).get(name, p) for name, p in named.items()]
        self._masters = None if masters is None else self._described(separate_version(self._own(exact)))
        # This replica's pieces in the parameters' types, where no replica keeps all; the version is freed after use
        keeps_all = sharding is None or sharding.keeps_all
        self._shard = None if keeps_all else self._described(separate_version(self.newest.stepped))
        self._alive = [self.newest]
        self._free: list[Version] = []  # buffers for the next versions
        self._averages: Version | None = None  # copy of the optimizer's averages, for evaluations
        self._bound: Version | None = None  # the version that the module computes with
        self._lock = threading.RLock()  # the thread of a parameter server applies pushes while its replica computes
        self.versions = VersionLedger(in_place=overwrite or not named)  # says which are alive
        self._optimizer = StageOptimizer(make_optimizer(self._stepped)) if self._stepped else None
        self.bind(self.newest)
        self.is_gathered = True  # whether the newest version has its memory
        self.free()

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer; None without trained parameters, and once retired."""
        return None if self._optimizer is None else self._optimizer.optimizer

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state, as of the latest update."""
        return 0 if self._optimizer is None else self._optimizer.state_bytes

    @property
    def stepped_names(self) -> tuple[str, ...]:
        """Names of the parameters that the optimizer steps on, or on pieces of."""
        return self.names if self._pieces is None else tuple(self.names[piece.place] for piece in self._pieces)

    @property
    def live_bytes(self) -> int:
        """Bytes of all live versions, or of this replica's shard where no replica keeps all."""
        return self.num_alive * self.version_bytes if self._shard is None else self._shard.num_bytes

    @property
    def master_bytes(self) -> int:
        """Bytes of the masters, or 0."""
        return 0 if self._masters is None else self._masters.num_bytes

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the weights that are gathered for now."""
        return self.version_bytes if self._shard is not None and self.is_gathered else 0

    @property
    def whole_sizes(self) -> Sequence[int] | None:
        """For every own piece, the elements of its whole parameter; None without pieces."""
        return None if self._pieces is None else [self._likes[piece.place].shape.numel() for piece in self._pieces]

    def places_of_pieces(self) -> dict[str, torch.Tensor]:
        """Return every own piece's place, by name: [first element in the flat whole, *shape of the whole] int64."""
        places = ((piece, self._likes[piece.place].shape) for piece in self._pieces or ())
        return {self.names[piece.place]: torch.tensor([piece.start, *shape]) for piece, shape in places}

    def own_pieces(self) -> list[torch.Tensor]:
        """Return the newest values of what the replica steps on: its pieces, which other replicas gather, or all."""
        return self.newest.stepped if self._shard is None else self._shard.parameters

    def allocate(self) -> None:
        """Give the newest version its memory again, to gather weights in."""
        if not self.is_gathered:
            self.is_gathered = True
            for flat in self.newest.flats:
                flat.untyped_storage().resize_(flat.nbytes)

    def free(self) -> None:
        """Free the newest version's memory, if its weights can be gathered again."""
        if self._shard is not None and self.is_gathered:
            self.is_gathered = False
            for flat in self.newest.flats:
                flat.untyped_storage().resize_(0)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Keep the newest version in the host's memory, so that a GPU has room for others; nothing may use it.

        What processes share is in the host's memory already, and can't be freed.
        """
        flats = [flat for flat in self.newest.flats if self.is_gathered and flat.untyped_storage().resizable()]
        on_host = [flat.to("cpu", copy=True) for flat in flats]
        for flat in flats:
            flat.untyped_storage().resize_(0)
        yield
        for flat, values in zip(flats, on_host, strict=True):
            flat.untyped_storage().resize_(values.nbytes)
            flat.copy_(values)

    def gathered(self, pieces: Sequence[Piece], values: Sequence[torch.Tensor]) -> None:
        """Take the newest values of pieces from the replica that has stepped on them."""
        newest = self.newest
        # Between a forward and its backward the memory is freed, then it gets the same numbers again: no change to
        # autograd.
        with torch.no_grad(), _unsafe_preserve_version_counter((*newest.flats, *newest.parameters)):
            for piece, value in zip(pieces, values, strict=True):
                piece.of(newest.parameters[piece.place]).copy_(value)

    @property
    def num_alive(self) -> int:
        """Number of live versions, the newest included."""
        return len(self._alive)

    @property
    def most_alive(self) -> int:
        """Largest number of live versions so far."""
        return self.versions.most_alive

    def retire(self) -> None:
        """Make no more versions, and keep only those of minibatches in flight."""
        with self._lock:
            self._optimizer = self._masters = self._averages = None
            self.versions.retire()
            self._collect()

    def use(self, number: int) -> Version:
        """Return a live version by number, for a minibatch in flight."""
        with self._lock:
            self.versions.use(number)
            if self._optimizer is None and self._pieces is None:  # nothing is trained: one version stands for all
                return self.newest
            return next(version for version in self._alive if version.number == number)

    @property
    def evaluated(self) -> Version:
        """The weights for evaluations: the newest, or their averages if the optimizer keeps some, as ASGD does.

        Averages are copied into buffers in the modules' layout, which live until the next update.
        """
        if self._averages is not None:
            return self._averages
        states = {} if self.optimizer is None else self.optimizer.state
        stepped = self._stepped
        averages = [average_in(states.get(parameter, {})) for parameter in stepped]
        if all(average is None for average in averages):
            return self.newest
        self._averages = self.new_version()
        fill(self._averages, [p if average is None else average for p, average in zip(stepped, averages, strict=True)])
        return self._averages

    def take_averages(self, averages: Sequence[torch.Tensor]) -> None:
        """Evaluate with averages from elsewhere, until the next update or `take`."""
        self._averages = self.new_version()
        fill(self._averages, averages)

    def bind(self, version: Version) -> None:
        """Make the module compute with a version."""
        if self._bound is not version:
            for parameters, key, index in self._places:
                parameters[key] = version.parameters[index]  # type: ignore[assignment]
            for module, _ in self._recurrent:
                # What a recurrent module does when its weights change, except for `flatten_parameters`, which on a GPU
                # would copy them out of this version's buffer.
                weights = [getattr(module, name) for name in module._flat_weights_names]
                module._flat_weights = weights
                module._flat_weight_refs = [weakref.ref(weight) for weight in weights]
            self._bound = version

    def release(self, number: int) -> None:
        """Drop a minibatch's reference to a version."""
        with self._lock:
            if self.versions.release(number):
                self._collect()

    def hold(self) -> int:
        """Keep the newest version alive through later updates, in place of the one held before; return its number."""
        with self._lock:
            number = self.versions.hold()
            self._collect()
            return number

    def renumber(self, number: int) -> None:
        """Set the number of the only version; nothing may be in flight."""
        self.newest.number = number
        self.versions.restart(number)

    def take(self, number: int, parameters: Sequence[torch.Tensor]) -> None:
        """Overwrite the only version with a copy of another; nothing may be in flight."""
        self._averages = None
        fill(self.newest, parameters)
        self.renumber(number)

    def update(self, gradients: Sequence[torch.Tensor | None], lr: float, *, keep_from: int) -> None:
        """Make the next version by an optimizer step from the newest.

        Args:
            gradients: of what the optimizer steps on, in order; None leaves a parameter unchanged.
            lr: the update's learning rate.
            keep_from: the oldest version that a forward may still request, see `VersionLedger.step`.
        """
        with self._lock:
            self._averages = None
            target = self._next(keep_from)
            if self._optimizer is None:
                return
            stepped = self._stepped
            if any(like.last for like in self._likes):
                # Fused optimizers walk through parameters and gradients as they lie in memory.
                gradients = laid_out_as(gradients, stepped)
            # In the naive pipeline, graphs in flight use the overwritten weights on purpose: autograd must not refuse
            # it.
            unnoticed = (*target.flats, *target.parameters) if self._overwrite and self.versions.in_use else ()
            with _unsafe_preserve_version_counter(unnoticed):
                self._optimizer.step(stepped, gradients, lr)
                self._round()

    def skip(self, *, keep_from: int) -> None:
        """Make a next version equal to the newest: an update without a step, which the schedule counts all the same."""
        before = self.newest
        if self._next(keep_from) is not before:
            self._round()

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's state of every updated parameter, by name: references, not copies."""
        state = {} if self.optimizer is None else self.optimizer.state
        return {name: dict(state[p]) for name, p in self.trained().items() if state.get(p)}

    def as_stepped(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return gradients in the types of what the optimizer steps on."""
        if self._masters is None:
            return list(gradients)
        return [None if g is None else g.to(p.dtype) for g, p in zip(gradients, self._stepped, strict=True)]

    def trained(self) -> dict[str, torch.Tensor]:
        """Return what the optimizer steps on, by name: the newest parameters or their masters, whole or own pieces."""
        return dict(zip(self.stepped_names, self._stepped, strict=True))

    def restore(self, parameters: Mapping[str, torch.Tensor], optimizer: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the newest weights and the optimizer's state, by name, both whole; nothing may be in flight."""
        self._averages = None
        whole = [parameters[name] for name in self.names]
        if self._shard is None:
            fill(self.newest, whole)
        with torch.no_grad():
            for parameter, value in zip(self._stepped, self._own(whole), strict=True):
                parameter.copy_(value)
        self._round()
        if self._optimizer is None:
            return
        if self._pieces is not None:
            named = {self.names[piece.place]: piece for piece in self._pieces}
            optimizer = {
                name: piece.of_state(parameters[name], optimizer[name])
                for name, piece in named.items() if name in optimizer
            }  # fmt: skip
        self._optimizer.restore(self.trained(), optimizer)

    @property
    def _stepped(self) -> list[torch.Tensor]:
        """What the optimizer steps on: masters if there are any, whole parameters or own pieces."""
        return self._masters.parameters if self._masters is not None else self.own_pieces()

    def _own(self, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the own pieces of values of all parameters; without pieces, the values."""
        return values if self._pieces is None else [piece.of(values[piece.place]) for piece in self._pieces]

    def _round(self) -> None:
        """Round the masters, if there are any, into the newest version."""
        if self._masters is not None and self._masters.parameters:
            with torch.no_grad():
                torch._foreach_copy_(self.own_pieces(), self._masters.parameters)

    def new_version(self) -> Version:
        """Return a version's buffers, all zeros."""
        return self._described(Version(self._likes, self._groups, self._pieces))

    def _described(self, version: Version) -> Version:
        """Give the tensors that the optimizer steps on the attributes of the model's parameters; return the version."""
        places = range(len(version.stepped)) if self._pieces is None else [piece.place for piece in self._pieces]
        for tensor, place in zip(version.stepped, places, strict=True):
            vars(tensor).update(self._attributes[place])
        return version

    def _next(self, keep_from: int) -> Version:
        """Return the buffers for an update, holding the newest parameters."""
        newest = self.newest
        in_place = self.versions.step(keep_from)
        if in_place:
            newest.number = self.versions.newest
        self._collect()
        if in_place:
            return newest
        target = self._free.pop() if self._free else self.new_version()
        if self._masters is None:  # otherwise the update rounds the masters into it, and the optimizer stays with them
            with torch.no_grad():
                torch._foreach_copy_(target.flats, newest.flats)
            if self._optimizer is not None:
                self._optimizer.move(newest.stepped, target.stepped)
        target.number = self.versions.newest
        self.newest = target
        self._alive.append(target)
        return target

    def _collect(self) -> None:
        """Reuse the buffers of versions that are no longer alive for the next ones; drop them if none follow."""
        gone = [version for version in self._alive if version.number not in self.versions.alive]
        self._alive = [version for version in self._alive if version not in gone]
        is_retired = self._optimizer is None and self._pieces is None
        self._free = [] if is_retired else [*self._free, *gone]
