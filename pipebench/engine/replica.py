"""One replica of one stage: the forward and backward passes of its units, and its updates.

It knows no schedule, clock, transport or mode. Callers choose the order of the passes, and each unit's weight version.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from pipebench.checkpoint.state import ModelState
from pipebench.engine.accumulation import Accumulation, OnGradient
from pipebench.engine.compiled import compiled
from pipebench.engine.gradients import Gradients, flows, gradient_of
from pipebench.engine.in_flight import InFlight, Recomputation, record_saved
from pipebench.engine.loss_scale import LossScale
from pipebench.engine.prediction import AS_IT_IS, Displacement, MovedWeights
from pipebench.engine.shards import Divide
from pipebench.engine.split import SplitBackward, backward_weight, saved_bytes
from pipebench.engine.streams import ALONE, StreamSlot, StreamStates
from pipebench.engine.swap import Saved, Swap
from pipebench.engine.weights import Weights
from pipebench.errors import GraphError
from pipebench.model.large_batch import Adapted
from pipebench.model.memory_format import channels_last, lay_out
from pipebench.model.optimizer import MakeOptimizer
from pipebench.model.precision import lower
from pipebench.model.sampling import name_hash
from pipebench.model.slice_modules import Divided, Slices
from pipebench.model.stage import LossFunction, Stage
from pipebench.model.values import bytes_in, detached, differentiable, tensors_in
from pipebench.recipe.schema import LossScaleRecipe

Values = dict[int, Any]  # layer index to the layer's output, a pytree of tensors

_EVALUATION = name_hash("evaluation")  # added to the key of random layers: evaluations draw other numbers than training


class UnitInput(NamedTuple):
    """Arguments of a unit's forward through a stage."""

    unit: int  # its number, by which its backward finds what the forward has saved
    draw: tuple[int, ...]  # key of random layers: (minibatch, microbatch)
    inputs: Sequence[torch.Tensor]  # the model inputs that the stage reads, in its order
    received: Values  # values from other stages, by layer
    version: int  # number of the weight version to use
    place: StreamSlot = ALONE  # the stream whose state stateful modules continue
    move: Displacement = AS_IT_IS  # of the weights from that version
    loss: LossFunction | None = None  # in the last stage: maps the model's output to the loss to differentiate


class LiveBytes(NamedTuple):
    """A replica's live bytes on its device, by kind."""

    weights: int  # all versions, or this replica's shard of one; frozen parameters and buffers
    moved: int  # displaced copies of the weights
    stepped: int  # full-precision masters and the optimizer's state
    gradients: int  # accumulated for the next update
    in_flight: int  # saved for the backwards of units in flight, and states of streams
    gathered: int = 0  # whole weights, gathered for a pass where replicas keep shards only


class _Saves(NamedTuple):
    """What a forward saves for its backward; the same for all forwards of equal shapes, so measured once."""

    saved_bytes: int  # that stay on the device
    staying: frozenset[int]  # indices of swapped layers' saved tensors that stay, see `Swap.saved_with`


class ReplicaRules(NamedTuple):
    """What a training mode requires of a replica."""

    split: bool = False  # backwards come in two parts: gradients of inputs, then of weights
    overwrite: bool = False  # updates overwrite the weights of units in flight, see `Weights`
    moves: bool = False  # passes use weights displaced from the newest version
    gamma: float | None = None  # decay of the mean change of weights, see `MovedWeights`
    loss_scale: LossScaleRecipe | None = None  # None: no scaling
    divide: Divide | None = None  # chooses this replica's shard of the parameters; None: all of them
    compiled: bool = False  # layers are compiled for training
    channels_last: bool = False  # images and weights of convolutions are laid out channels last
    slices: Slices | None = None  # the layers' slices, where layers are divided among processes


_PLAIN = ReplicaRules()


class Replica:
    """Runs one stage on one device.

    Args:
        stage: its modules must be this replica's alone; they are moved to the device.
        make_optimizer: makes the optimizer of the stage's parameters.
        device: where it computes.
        seed: the run's, for random layers.
        rules: what the training mode requires.
    """

    def __init__(
        self,
        stage: Stage,
        make_optimizer: MakeOptimizer,
        *,
        device: torch.device,
        seed: int,
        rules: ReplicaRules = _PLAIN,
    ) -> None:
        self.stage, self.device, self._channels_last = stage, device, rules.channels_last
        self.module = lay_out(stage.module.to(device)) if rules.channels_last else stage.module.to(device)
        self._evaluation = stage.evaluation_on(device)
        exact = lower([self.module, self._evaluation.module], stage.rounding)
        self.weights = Weights(
            self.module, make_optimizer, overwrite=rules.overwrite, also=[self._evaluation.module],
            divide=rules.divide, masters=exact if stage.rounding else None,
        )  # fmt: skip
        # In mixed precision, the exact values of rounded tensors that aren't trained, for checkpoints. `Weights` has
        # those of trained parameters, the masters.
        self.exact = {name: tensor.to("cpu") for name, tensor in exact.items() if name not in self.weights.names}
        untrained = [*(each for each in self.module.parameters() if not each.requires_grad), *self.module.buffers()]
        self._untrained_bytes = sum(tensor.nbytes for tensor in untrained)
        self.divided = _divided(self.weights, rules.slices)
        moves = rules.moves and self.weights.optimizer is not None
        self.moved = MovedWeights(self.weights, rules.gamma) if moves else None
        self.scale = None if rules.loss_scale is None else LossScale(rules.loss_scale)  # None: gradients aren't scaled
        # State of the layers that an architecture search leaves out for now, on the host; None: the initial one
        self.idle_state: ModelState | None = None
        self._split = SplitBackward(self.stage, device) if rules.split else None
        self._in_flight: dict[int, InFlight] = {}  # by unit
        self._saves: dict[tuple[torch.Size, ...], _Saves] = {}
        self._recomputation = Recomputation(stage.recomputed)
        self.recomputed_bytes = 0  # that the last backward recomputed, and has freed
        self._fixed_storages = {each.untyped_storage().data_ptr() for each in untrained} | self._recomputation.storages
        self.states = StreamStates([self.module.get_submodule(path) for path in stage.stateful])
        self.accumulation = Accumulation(len(self.weights.names))
        stage.seeder.seed, stage.seeder.device = seed, device
        stage.enter()
        self._call: Callable[..., Any] = compiled(stage) if rules.compiled else self.module

    def forward(self, given: UnitInput) -> tuple[Values, torch.Tensor | None]:
        """Run a unit forward.

        Returns:
            The values that leave the stage, detached, by layer; and in the last stage the loss, else None.
        """
        unit, draw, inputs, received, version, place, move, loss = given
        weights = self.weights.use(version) if self.moved is None else self.moved.for_forward(version, move)
        received = {layer: detached(received[layer]) for layer in self.stage.reads}
        self.weights.bind(weights)
        item = self._in_flight[unit] = InFlight(version, weights, received, draw, loss, self.states.load(place))
        self.stage.seeder.draw, self.stage.loss.function = draw, loss
        outputs = self._run(item, [*self._laid_out(inputs), *received.values()])
        self.states.store(place)
        leaving = outputs[: len(self.stage.returns)]
        values = {layer: detached(value) for layer, value in zip(self.stage.returns, leaving, strict=True)}
        item.results = {layer: _edges(value) for layer, value in zip(self.stage.returns, leaving, strict=True)}
        if loss is not None:
            item.of_loss, item.loss_type = _edges(outputs[-1]), outputs[-1].dtype
        return values, None if loss is None else outputs[-1].detach()

    def backward(
        self, unit: int, arrived: Gradients, on_gradient: OnGradient | None = None, move: Displacement = AS_IT_IS
    ) -> Gradients:
        """Run a unit's whole backward and add to `gradients` of the parameters.

        Args:
            unit: a unit that has run forward.
            arrived: gradients of the values that left the stage, by layer: one per tensor that requires grad.
            on_gradient: called with every parameter's gradient, summed with those of earlier units, as soon as it is
                complete; it takes the gradient in place of `gradients`.
            move: displacement of the weights from the newest version.

        Returns:
            Gradients of the received values, by layer: one per tensor that requires grad, see `engine/gradients.py`.
        """
        returning = self._backward(self._in_flight[unit], arrived, on_gradient, move)
        self.drop_unit(unit)
        return returning

    def backward_input(self, unit: int, arrived: Gradients, move: Displacement = AS_IT_IS) -> Gradients:
        """Run the input part of a unit's backward: all gradients but those of split layers' weights; see `backward`."""
        item = self._in_flight[unit]
        returning = self._backward(item, arrived, None, move)
        item.received, item.carried, item.loss, item.saved_bytes = {}, [], None, saved_bytes(item.rests)
        return returning

    def backward_weight(self, unit: int, on_gradient: OnGradient | None = None) -> None:
        """Run the weight part of a unit's backward, after its input part; see `backward`.

        It reads no weights, so it may run after later updates. `on_gradient` gets the gradients of this part only.
        """
        item = self._in_flight[unit]
        with self.accumulation.add(item.version, on_gradient):
            backward_weight(item.rests, item.version.parameters)
        self.drop_unit(unit)

    def stepped(self) -> list[torch.Tensor | None]:
        """Return the accumulated gradients in the types of what the optimizer steps on."""
        self.gradients = self.weights.as_stepped(self.gradients)
        return self.gradients

    def swap_out(self, unit: int) -> int:
        """Copy the activations that swapped layers saved for a unit to the host, and free them; return the bytes."""
        swap = self._in_flight[unit].swap
        return 0 if swap is None else swap.copy_out()

    def swap_in(self, unit: int) -> int:
        """Begin to copy a unit's activations back from the host; return the bytes. Without it, its backward does so."""
        swap = self._in_flight[unit].swap
        return 0 if swap is None else swap.copy_back()

    def update(self, gradients: Sequence[torch.Tensor | None], lr: float, *, keep_from: int) -> None:
        """Apply one update and drop the accumulated gradients; see `Weights.update`."""
        (self.moved or self.weights).update(gradients, lr, keep_from=keep_from)
        self.accumulation.clear()

    def skip_update(self, *, keep_from: int) -> None:
        """Drop the accumulated gradients instead of applying them; see `Weights.skip`.

        Losses are scaled in fp16 only, where weights are not displaced (`recipe.suited`), so `moved` needs no update.
        """
        self.weights.skip(keep_from=keep_from)
        self.accumulation.clear()

    def evaluate(
        self, draw: tuple[int, ...], inputs: Sequence[torch.Tensor], received: Values, place: StreamSlot
    ) -> tuple[Values, Any]:
        """Run forward only, in evaluation mode, with the newest weights or their averages; arguments as in `UnitInput`.

        Returns:
            The values that leave the stage, by layer of the evaluation; and in the last stage the model's output.
        """
        stage = self._evaluation
        self.weights.bind(self.weights.evaluated)
        stage.enter()
        stage.seeder.draw = (_EVALUATION, *draw)
        self.states.load(place)
        with torch.no_grad():
            outputs = stage.module(*self._laid_out(inputs), *(received[layer] for layer in stage.reads))
        self.states.store(place)
        self.stage.enter()
        return dict(zip(stage.returns, outputs, strict=False)), outputs[-1] if stage.is_last else None

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The units whose backward is not complete."""
        return tuple(self._in_flight)

    def drop_unit(self, unit: int) -> None:
        """Drop what a unit's forward has saved: its backward is over, or runs in another replica."""
        item = self._in_flight.pop(unit)
        if self.moved is None:  # otherwise all units share the same buffers
            self.weights.release(item.number)

    def retire(self) -> None:
        """Make no more updates; keep only what the backwards of units in flight need."""
        self.weights.retire()
        self.states.clear()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers that evaluations use, by qualified name: references, not copies."""
        parameters = dict(zip(self.weights.names, self.weights.evaluated.parameters, strict=True))
        return {**parameters, **dict(self.module.named_buffers())}

    def live_bytes(self) -> int:
        """Return this replica's bytes on its device."""
        return sum(self.live_by_kind())

    def live_by_kind(self) -> LiveBytes:
        """Return this replica's bytes on its device, by kind."""
        in_flight = sum(item.num_bytes for item in self._in_flight.values())
        carried = bytes_in(list(self.states.values())) if self.states else 0
        moved = 0 if self.moved is None else self.moved.num_bytes
        weights = self.weights
        return LiveBytes(
            weights=self._untrained_bytes + weights.live_bytes,
            moved=moved,
            stepped=weights.master_bytes + weights.state_bytes,
            gradients=self.accumulation.num_bytes,
            in_flight=in_flight + carried,
            gathered=weights.gathered_bytes,
        )

    def host_bytes(self) -> int:
        """Return the bytes of its units in flight that are on the host."""
        return sum(item.host_bytes for item in self._in_flight.values())

    @property
    def inputs(self) -> tuple[str, ...]:
        """The model inputs that a forward reads."""
        return self.stage.inputs

    @property
    def is_last(self) -> bool:
        """Whether the stage computes the model's output."""
        return self.stage.is_last

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        """Accumulated gradients, or their sums over the replicas, in the order of the stage's parameters."""
        return self.accumulation.gradients

    @gradients.setter
    def gradients(self, found: list[torch.Tensor | None]) -> None:
        self.accumulation.gradients = found

    @property
    def tied_positions(self) -> frozenset[int]:
        """Positions of the tied weights in the stage's order."""
        return self.accumulation.tied_positions

    def _run(self, item: InFlight, arguments: Sequence[Any]) -> Any:
        """Run the module; measure what it saves for the backward at the first forward of these shapes."""
        shapes = item.shapes = tuple([tensor.shape for argument in arguments for tensor in tensors_in(argument)])
        if self.stage.swapped:
            item.swap = Swap(self.device)
            for each in self.stage.swapped:
                each.hooks = saved_tensors_hooks(item.swap.pack, Saved.checked)
        if shapes in self._saves:
            outputs = self._call(*arguments)
        else:
            saved: dict[int, torch.UntypedStorage] = {}
            with record_saved(saved, self.stage.recomputed):
                outputs = self._call(*arguments)
            own = self._own_storages(item)
            size = sum(storage.nbytes() for address, storage in saved.items() if address not in own)
            self._saves[shapes] = _Saves(size, frozenset() if item.swap is None else item.swap.saved_with(saved))
            saved.clear()  # the graph's nodes hold the hook, and with it all storages until the last node is freed
        item.saved_bytes = self._saves[shapes].saved_bytes + (bytes_in(item.carried) if self.stage.recomputed else 0)
        if item.swap is not None:
            item.swap.settle(self._saves[shapes].staying, self._own_storages(item), tensors_in(item.received))
        return outputs

    def _laid_out(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [channels_last(each) for each in inputs] if self._channels_last else inputs

    def _own_storages(self, item: InFlight) -> set[int]:
        """Return the addresses of storages that a unit doesn't save: its weights and the stage's other tensors."""
        return self._fixed_storages.union(flat.untyped_storage().data_ptr() for flat in item.version.flats)

    def _backward(
        self, item: InFlight, arrived: Gradients, on_gradient: OnGradient | None, move: Displacement
    ) -> Gradients:
        """Run a backward, or its input part, and free the stage's graph; see `backward`."""
        if self.moved is not None:
            self.moved.for_backward(move)
        if item.swap is not None:
            item.swap.wait()
        leaves = [t for value in item.received.values() for t in differentiable(value)]
        if self.stage.recomputed:
            self.weights.bind(item.version)
            self.stage.seeder.draw, self.stage.loss.function = item.draw, item.loss
            self.states.carry(item.carried)
            with self._recomputation.run(item.shapes, lambda: self._own_storages(item)):
                self._differentiate(item, leaves, arrived, on_gradient)
            self.recomputed_bytes = self._recomputation.num_bytes[item.shapes]
        else:
            self._differentiate(item, leaves, arrived, on_gradient)
        item.results.clear()
        item.of_loss.clear()
        return {layer: [*map(gradient_of, differentiable(value))] for layer, value in item.received.items()}

    def _differentiate(
        self, item: InFlight, leaves: list[torch.Tensor], arrived: Gradients, on_gradient: OnGradient | None
    ) -> None:
        """Run autograd: set the leaves' `grad`, and give parameters' gradients to `gradients` or `on_gradient`."""
        of_loss = None  # gradient of the loss; None stands for 1
        if self.scale is not None:
            of_loss = torch.full((), self.scale.value, dtype=item.loss_type, device=self.device)
        pairs = [
            (edge, gradient)
            for layer, edges in item.results.items()
            for edge, gradient in zip(edges, arrived.get(layer, ()), strict=True)
            if flows(gradient)
        ]
        results = [edge for edge, _ in pairs] + item.of_loss
        heads = [gradient for _, gradient in pairs] + [of_loss] * len(item.of_loss)
        wanted = [*leaves, *item.version.parameters]
        if not results or not wanted:
            return
        with _naming_overwriting(), self.accumulation.add(item.version, on_gradient):
            if self._split is None:
                torch.autograd.backward(results, heads, inputs=wanted)
            else:
                item.rests = self._split.backward_input(results, heads, wanted)


@contextmanager
def _naming_overwriting() -> Iterator[None]:
    """Turn torch's error about a saved tensor that was overwritten into a sentence about the model."""
    try:
        yield
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise GraphError(
            "a layer changes in place what a backward still needs, maybe of another minibatch (a buffer, say): "
            "let it compute with a copy (x * self.mean.clone())"
        ) from error


def _edges(value: Any) -> list[GradientEdge]:
    """Return the edges at which gradients of a value's tensors enter the graph that computed it.

    An edge keeps the graph alive, but not the value, which has left the stage by then.
    """
    return [get_gradient_edge(tensor) for tensor in differentiable(value)]


def _divided(weights: Weights, slices: Slices | None) -> Divided | None:
    """Return which gradients are slices of whole ones; set that in an optimizer that computes norms, too."""
    if slices is None:
        return None
    found = Divided(slices.group, torch.tensor([name in slices.cuts for name in weights.stepped_names]))
    if isinstance(weights.optimizer, Adapted):
        weights.optimizer.whole_of = found
    return found
