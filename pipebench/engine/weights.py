"""Weight versions of one stage replica, shared by reference.

A minibatch in flight refers to the version of its forward; an update writes the next version into unused buffers, or in
place if nothing refers to the newest.

Where replicas are sharded, the optimizer steps on pieces of parameters: views of the newest version or, where no
replica keeps all, tensors of their own; the version then has memory only while its weights are gathered.

In mixed precision versions are 16-bit copies. The optimizer then steps on a single separate version in the model's own
types, the masters.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_map_only

from pipebench.engine.shards import Divide, Piece
from pipebench.engine.version import Like, Version, apart, fill, grouped, places_in, recurrent_in
from pipebench.errors import UserCodeError
from pipebench.model.memory_format import laid_out_as
from pipebench.model.optimizer import GroupRates, MakeOptimizer, average_in, is_known
from pipebench.schedule.version_ledger import VersionLedger

P = ParamSpec("P")
R = TypeVar("R")


def _one_at_a_time(method: Callable[Concatenate["Weights", P], R]) -> Callable[Concatenate["Weights", P], R]:
    """Lock a method: a server applies pushes while its replica computes."""

    @functools.wraps(method)
    def locked(self: "Weights", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


class Weights:
    """All live versions of a stage replica's parameters, and the optimizer that makes the next one.

    Args:
        module: the stage; its parameters are replaced by views of the newest version.
        make_optimizer: makes a torch.optim optimizer for a list of parameters.
        overwrite: update in place even with minibatches in flight: the naive pipeline, whose backward sees newer
            weights than its forward.
        also: other modules with some of the parameters.
        divide: returns which pieces of the parameters the optimizer steps on; None: all.
        masters: mixed precision: the rounded parameters before rounding, by name. None: the optimizer steps on the
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
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.names = tuple(name for name, _ in named)
        self._overwrite = overwrite
        self._places = places_in([module, *also], [p for _, p in named])
        self._recurrent = list(recurrent_in(module, [p for _, p in named]))
        self._likes = [Like.of(p) for _, p in named]
        self._attributes = [dict(vars(p)) for _, p in named]  # a model's own, which its optimizer may read
        self._groups = grouped([order for _, order in self._recurrent], self._likes)
        self.version_bytes = sum(like.nbytes for like in self._likes)  # of one version
        self.sharding = sharding = None if divide is None else divide(dict(named))
        self._pieces = None if sharding is None else sharding.own
        self.newest = self.new_version()  # with the most updates
        fill(self.newest, [p for _, p in named])
        exact = [(masters or {}).get(name, p) for name, p in named]
        self._masters = None if masters is None else self._described(apart(self._own(exact)))
        # Own pieces in the parameters' types, where no replica keeps all; the version is freed after use
        is_sharded = sharding is not None and not sharding.keeps_all
        self._shard = self._described(apart(self.newest.stepped)) if is_sharded else None
        self._alive = [self.newest]
        self._free: list[Version] = []
        self._averages: Version | None = None
        self._bound: Version | None = None
        self._lock = threading.RLock()
        # Live versions; a single one if nothing is trained
        self.versions = VersionLedger(in_place=overwrite or not named)
        self._use(make_optimizer(self._stepped) if self._stepped else None)
        self.bind(self.newest)
        self.is_gathered = True  # whether the newest version has its memory
        self.free()

    def _use(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Step with an optimizer; a user's parameter groups keep the ratios of their rates."""
        self.optimizer = optimizer
        self.state_bytes = 0  # of the optimizer's state, as of the latest update
        self._some_are_fresh = False
        self._rates = None if optimizer is None else GroupRates(optimizer)

    @property
    def stepped_names(self) -> tuple[str, ...]:
        """Names of what the optimizer steps on."""
        return self.names if self._pieces is None else tuple(self.names[piece.place] for piece in self._pieces)

    @property
    def live_bytes(self) -> int:
        """Bytes of all live versions."""
        return self.num_alive * self.version_bytes if self._shard is None else self._shard_bytes

    @functools.cached_property
    def _shard_bytes(self) -> int:
        return 0 if self._shard is None else sum(p.nbytes for p in self._shard.parameters)

    @functools.cached_property
    def master_bytes(self) -> int:
        """Bytes of the masters, or 0."""
        return sum(p.nbytes for p in self._masters.parameters) if self._masters else 0

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the weights that are gathered for now."""
        return self.version_bytes if self._shard is not None and self.is_gathered else 0

    @property
    def whole_sizes(self) -> Sequence[int] | None:
        """Elements of the whole parameter of every own piece; None without pieces."""
        return None if self._pieces is None else [self._likes[piece.place].shape.numel() for piece in self._pieces]

    def places_of_pieces(self) -> dict[str, torch.Tensor]:
        """Return the first element, flat, and the whole's shape of every own piece, by name; empty without pieces."""
        places = ((piece, self._likes[piece.place].shape) for piece in self._pieces or ())
        return {self.names[piece.place]: torch.tensor([piece.start, *shape]) for piece, shape in places}

    def own_pieces(self) -> list[torch.Tensor]:
        """Return the newest values of the own pieces, which other replicas gather."""
        return self.newest.stepped if self._shard is None else self._shard.parameters

    def allocate(self) -> None:
        """Give the newest version its memory back, to gather weights in."""
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
        """Keep the newest version in the host's memory, so that a GPU has room for others; nothing may use it."""
        flats = self.newest.flats if self.is_gathered else []
        on_host = [flat.to("cpu", copy=True) for flat in flats]
        for flat in flats:
            flat.untyped_storage().resize_(0)
        yield
        for flat, values in zip(flats, on_host, strict=True):
            flat.untyped_storage().resize_(values.nbytes)
            flat.copy_(values)

    def gathered(self, pieces: Sequence[Piece], values: Sequence[torch.Tensor]) -> None:
        """Take pieces of the newest weights from the replica that has stepped on them."""
        newest = self.newest
        # A backward meets the same numbers as its forward, in memory that was freed in between.
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

    @_one_at_a_time
    def retire(self) -> None:
        """Make no more versions, and keep only those of minibatches in flight."""
        self.optimizer, self._masters, self._averages = None, None, None
        self.master_bytes = self.state_bytes = 0
        self.versions.retire()
        self._collect()

    @_one_at_a_time
    def use(self, number: int) -> Version:
        """Return a live version by number for a minibatch in flight; without parameters one stands for all."""
        self.versions.use(number)
        if self.optimizer is None and self._pieces is None:
            return self.newest
        return next(version for version in self._alive if version.number == number)

    @property
    def evaluated(self) -> Version:
        """The weights for evaluations: the newest, or their averages if the optimizer keeps some.

        Averages are copied into a buffer of their own, in the modules' layout, until the next update.
        """
        if self._averages is not None:
            return self._averages
        states = self.optimizer.state if self.optimizer else {}
        stepped = self._stepped
        averages = [average_in(states.get(parameter, {})) for parameter in stepped]
        if all(average is None for average in averages):
            return self.newest
        self._averages = self.new_version()
        fill(self._averages, [p if average is None else average for p, average in zip(stepped, averages, strict=True)])
        return self._averages

    def take_averages(self, averages: Sequence[torch.Tensor]) -> None:
        """Use averages from elsewhere in evaluations, until the next update or copy."""
        self._averages = self.new_version()
        fill(self._averages, averages)

    def bind(self, version: Version) -> None:
        """Make the module compute with a version."""
        if self._bound is not version:
            for parameters, key, index in self._places:
                parameters[key] = version.parameters[index]  # type: ignore[assignment]
            for module, _ in self._recurrent:
                # As a recurrent module does at its next call, but without flattening its weights, which on a GPU
                # would move them out of this version's buffer.
                weights = [getattr(module, name) for name in module._flat_weights_names]
                module._flat_weights = weights
                module._flat_weight_refs = [weakref.ref(weight) for weight in weights]
            self._bound = version

    @_one_at_a_time
    def release(self, number: int) -> None:
        """Drop a minibatch's reference to a version."""
        if self.versions.release(number):
            self._collect()

    @_one_at_a_time
    def hold(self) -> int:
        """Keep the newest version alive through later updates, instead of the one held before; return its number."""
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

    @_one_at_a_time
    def update(self, gradients: Sequence[torch.Tensor | None], lr: float, *, keep_from: int) -> None:
        """Make the next version by an optimizer step from the newest.

        A gradient of None leaves its parameter unchanged; `keep_from` is the oldest version that a forward may still
        request, see `VersionLedger`.
        """
        self._averages = None
        target = self._next(keep_from)
        if self.optimizer is None:
            return
        stepped = self._stepped
        if any(like.last for like in self._likes):
            # Fused optimizers walk through parameters and gradients as they lie in memory.
            gradients = laid_out_as(gradients, stepped)
        # Replicas in one process share a sum, which a user's own step may change.
        takes_copies = not is_known(self.optimizer)
        for parameter, gradient in zip(stepped, gradients, strict=True):
            parameter.grad = gradient.clone() if takes_copies and gradient is not None else gradient
        assert self._rates is not None
        self._rates.set(lr)
        # The naive pipeline: its graphs in flight use the overwritten weights, on purpose.
        unnoticed = (*target.flats, *target.parameters) if self._overwrite and self.versions.in_use else ()
        with _unsafe_preserve_version_counter(unnoticed):
            (self._step_apart if self._some_are_fresh else self.optimizer.step)()
            self._round()
        if self._rates.have_changed():
            raise UserCodeError(
                "its step changes the rates of its parameter groups, which every update sets anew: leave them to "
                "train.schedule, where a target can be of your own",
                "train.optimizer.target",
            )
        for parameter in stepped:
            parameter.grad = None
        self._count_state()

    def _step_apart(self) -> None:
        """Step first on parameters that the optimizer has never stepped on, then on the others.

        torch's fused SGD requires that all parameters have momentum, or none.
        """
        assert self.optimizer is not None
        gradients = [(p, p.grad) for p in self._stepped if p.grad is not None]
        fresh = {id(p) for p, _ in gradients if not self.optimizer.state.get(p)}
        for turn in (True, False):
            for parameter, gradient in gradients:
                parameter.grad = gradient if (id(parameter) in fresh) is turn else None
            self.optimizer.step()
        self._some_are_fresh = any(not self.optimizer.state.get(p) for p in self._stepped)

    def skip(self, *, keep_from: int) -> None:
        """Make a new version without changes, since the schedule counts it."""
        self._next(keep_from)
        self._round()

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's state of every updated parameter, by name: references, not copies."""
        state = self.optimizer.state if self.optimizer else {}
        return {name: dict(state[p]) for name, p in self.trained().items() if state.get(p)}

    def as_stepped(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return gradients in the types the optimizer steps on."""
        if self._masters is None:
            return list(gradients)
        return [None if g is None else g.to(p.dtype) for g, p in zip(gradients, self._stepped, strict=True)]

    def trained(self) -> dict[str, torch.Tensor]:
        """Return the newest parameters, or pieces, as the optimizer steps on them, by name: the masters if any."""
        return dict(zip(self.stepped_names, self._stepped, strict=True))

    def restore(self, parameters: Mapping[str, torch.Tensor], optimizer: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the newest weights and the optimizer's state, by name; nothing may be in flight."""
        self._averages = None
        whole = [parameters[name] for name in self.names]
        if self._shard is None:
            fill(self.newest, whole)
        with torch.no_grad():
            for parameter, value in zip(self._stepped, self._own(whole), strict=True):
                parameter.copy_(value)
        self._round()
        if self.optimizer is None:
            return
        if self._pieces is not None:
            optimizer = {
                self.names[p.place]: p.of_state(parameters[self.names[p.place]], optimizer[self.names[p.place]])
                for p in self._pieces if self.names[p.place] in optimizer
            }  # fmt: skip
        names = {id(p): name for name, p in self.trained().items()}
        order = [p for group in self.optimizer.param_groups for p in group["params"]]  # the optimizer's order
        given = {i: optimizer[names[id(p)]] for i, p in enumerate(order) if names[id(p)] in optimizer}
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": given})
        # The optimizer chooses devices, but would also round its state to the parameter's type, and leaves a number of
        # steps where it is.
        on_cpu = not any(self.optimizer.defaults.get(name) for name in ("fused", "capturable"))
        for index, state in given.items():
            taken = self.optimizer.state[order[index]]
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    own = value.to("cpu" if key == "step" and on_cpu else taken[key].device, copy=True)
                    whole = own.shape == order[index].shape
                    (taken[key],) = laid_out_as([own], [order[index]]) if whole else [own]
                else:  # replicas in one process are restored from the same tensors
                    copy = functools.partial(torch.Tensor.to, device=order[index].device, copy=True)
                    taken[key] = tree_map_only(torch.Tensor, copy, value)
        self._some_are_fresh = isinstance(self.optimizer, torch.optim.SGD) and 0 < len(given) < len(order)
        self._count_state()

    @property
    def _stepped(self) -> list[torch.Tensor]:
        """What the optimizer steps on."""
        return self._masters.parameters if self._masters is not None else self.own_pieces()

    def _own(self, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return, of values of all parameters, what belongs to what the optimizer steps on."""
        return values if self._pieces is None else [piece.of(values[piece.place]) for piece in self._pieces]

    def _round(self) -> None:
        """Round the masters, if any, to the newest version."""
        if self._masters is not None and self._masters.parameters:
            with torch.no_grad():
                torch._foreach_copy_(self.own_pieces(), self._masters.parameters)

    def new_version(self) -> Version:
        """Return a version's buffers, all zeros."""
        return self._described(Version(self._likes, self._groups, self._pieces))

    def _described(self, version: Version) -> Version:
        """Give what the optimizer steps on the attributes of its parameters."""
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
        if self._masters is None:  # else filled from them; the optimizer keeps them
            with torch.no_grad():
                for theirs, mine in zip(target.flats, newest.flats, strict=True):
                    theirs.copy_(mine)
            if self.optimizer is not None:
                self._move_optimizer(newest, target)
        target.number = self.versions.newest
        self.newest = target
        self._alive.append(target)
        return target

    def _move_optimizer(self, old: Version, new: Version) -> None:
        assert self.optimizer is not None
        state = self.optimizer.state
        for before, after in zip(old.stepped, new.stepped, strict=True):
            if before in state:
                state[after] = state.pop(before)
        moved = {id(before): after for before, after in zip(old.stepped, new.stepped, strict=True)}
        for group in self.optimizer.param_groups:
            group["params"] = [moved[id(parameter)] for parameter in group["params"]]

    def _count_state(self) -> None:
        states = self.optimizer.state.values() if self.optimizer else ()
        self.state_bytes = sum(v.nbytes for state in states for v in state.values() if isinstance(v, torch.Tensor))

    def _collect(self) -> None:
        """Free the buffers of dead versions for the next ones."""
        gone = [version for version in self._alive if version.number not in self.versions.alive]
        self._alive = [version for version in self._alive if version not in gone]
        is_retired = self.optimizer is None and self._pieces is None
        self._free = [] if is_retired else [*self._free, *gone]  # none follow a retirement
