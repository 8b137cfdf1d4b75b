"""One worker: the instructions of its list that compute, on its replica.

It knows no clock and no transport: what arrives is given to it, what leaves is asked of it. The virtual engine has as
many as the plan has workers, a process of the distributed engine has one; the arithmetic is the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pipebench.checkpoint.state import ModelState
from pipebench.engine.feed import Feed
from pipebench.engine.replica import LossFunction, OnGradient, Replica, Values
from pipebench.engine.setup import Setup, loss_divisors, minibatch_weight, share_of
from pipebench.engine.structure import CrossingError, flatten
from pipebench.model.stage import cut_stage
from pipebench.schedule.modes import NONE, VERTICAL_SYNC

Gradients = dict[int, list[torch.Tensor]]  # layer index to the gradients of its output's tensors


class UnitLoss(NamedTuple):
    """The loss of one unit.

    Attributes:
        total: summed over its samples, a scalar on the worker's device.
        samples: how many.
        weight: what a mean loss divides it by.
    """

    total: torch.Tensor
    samples: int
    weight: float


class Worker:
    """Executes what one worker computes.

    Args:
        setup: what is run.
        index: which worker.

    Attributes:
        replica: its replica of its stage.
        peak_bytes: the most bytes the replica has held.
    """

    def __init__(self, setup: Setup, index: int) -> None:
        self.setup = setup
        self.index = index
        self.stage_index, self.replica_index = setup.pipeline.places[index]
        self.replica = Replica(
            cut_stage(setup.graph, setup.plan, self.stage_index),
            setup.make_optimizer,
            device=setup.device,
            seed=setup.seed,
            recompute=setup.plan.stages[self.stage_index].recomputes,
            overwrite=setup.weights == NONE,
        )
        self.peak_bytes = self.replica.live_bytes()
        self._share = share_of(setup, index)

    def open_data(self) -> None:
        """Fetch a minibatch of what this worker reads: a data set may open files only now, and no clock runs yet."""
        fields = dict(zip(self.setup.graph.inputs, self.setup.dataset.inputs, strict=True))
        wanted = [fields[name] for name in self.replica.stage.inputs]
        wanted += self.setup.dataset.targets if self.replica.stage.is_last else []
        if wanted:
            self.setup.dataset.fetch("train", self.setup.sampler.indices(0), wanted)

    def begin(self, feed: Feed, first: int, num_minibatches: int) -> None:
        """Start a segment of training or an evaluation, with nothing in flight.

        Args:
            feed: the segment's data.
            first: the minibatch that the segment begins with.
            num_minibatches: its length; `end_early` may lower it.
        """
        self._feed = feed
        stage = self.replica.stage
        assert stage.evaluation is not None
        self._stage = stage if feed.split == "train" else stage.evaluation
        self._first = first
        self._num_minibatches = num_minibatches
        self._inputs: dict[int, list[torch.Tensor]] = {}
        self._received: dict[int, Values] = {}
        self._outgoing: dict[int, Values] = {}
        self._can_cross: set[int] = set()
        self._arriving: dict[int, list[Gradients]] = {}
        self._returning: dict[int, Gradients] = {}

    def begin_training(self, feed: Feed, first: int, num_minibatches: int, divisors: list[float] | None) -> None:
        """Start a segment of training; `divisors` are `loss_divisors` of it."""
        self.begin(feed, first, num_minibatches)
        self._divisors = divisors
        self._drained_version = self.replica.weights.newest.number
        if self.setup.weights == VERTICAL_SYNC:
            self.replica.weights.keep_from = self._drained_version

    def end_early(self, num_minibatches: int) -> None:
        """Let the segment be shorter, by whole rounds of minibatches that haven't begun here."""
        self._num_minibatches = num_minibatches

    def load(self, unit: int) -> None:
        """Take a unit's inputs from the data."""
        self._inputs[unit] = self._feed.inputs(self.index, unit, self._stage.inputs)

    def take_activation(self, unit: int, values: Values) -> None:
        """Receive values from another stage, by layer."""
        self._received.setdefault(unit, {}).update(values)

    def forward(self, unit: int) -> UnitLoss | None:
        """Run a unit forward; return its loss in the last stage. A unit without samples does nothing."""
        if self._feed.size(unit) == 0:  # a short minibatch with fewer samples than microbatches
            return None
        replica, minibatch = self.replica, self.setup.pipeline.minibatch(unit)[0]
        self._outgoing[unit], loss = replica.forward(
            unit,
            self._feed.minibatch(unit),
            self._inputs.pop(unit, []),
            self._in_order(self._received.pop(unit, {})),
            self._feed.place(unit),
            version=self._synchronised_version(minibatch) if self.setup.weights == VERTICAL_SYNC else None,
            loss=self._loss_function(unit) if replica.stage.is_last else None,
        )
        self._note_memory()
        if loss is None:
            return None
        total = loss if self._divisors is None else loss * self._divisors[minibatch]
        return UnitLoss(total, self._feed.size(unit), self._feed.weight(unit))

    def evaluate(self, unit: int) -> Any:
        """Run a unit forward with the newest weights; return the model's output in the last stage."""
        inputs = self._feed.inputs(self.index, unit, self._stage.inputs)
        received = self._in_order(self._received.pop(unit, {}))
        place, draw = self._feed.place(unit), self._feed.minibatch(unit)
        self._outgoing[unit], output = self.replica.evaluate(draw, inputs, received, place)
        return output

    def activation_for(self, unit: int, target: int) -> Values:
        """Return the values of a unit that stage `target` reads; asked for once, in order of targets.

        Raises:
            CrossingError: one of them can't be handed to another stage, in processes or not; names its layer.
        """
        outgoing = self._outgoing.get(unit, {})
        values = {layer: outgoing[layer] for layer in self._stage.sends[target] if layer in outgoing}
        if values and target not in self._can_cross:  # the first unit shows what the others will be
            self._check_crossing(values)
            self._can_cross.add(target)
        if target == max(self._stage.sends):
            self._outgoing.pop(unit, None)
        return values

    def take_gradient(self, unit: int, gradients: Gradients) -> None:
        """Receive the gradients of values that left, from one of the stages that read them."""
        self._arriving.setdefault(unit, []).append(gradients)

    def backward(self, unit: int, on_gradient: OnGradient | None = None) -> None:
        """Run a unit backward; `on_gradient` takes each parameter's gradient of the round as soon as it is whole."""
        if self._feed.size(unit) > 0:
            heads = self._heads(self._arriving.pop(unit, []))
            returning = {
                layer: found for layer, found in self.replica.backward(unit, heads, on_gradient).items() if found
            }
            if returning:
                self._returning[unit] = returning
            self._note_memory()

    def gradient_for(self, unit: int, source: int) -> Gradients:
        """Return the gradients of the values that came from stage `source`; asked for once."""
        returning = self._returning.get(unit, {})
        layers = self.replica.stage.receives[source]
        gradients = {layer: returning.pop(layer) for layer in layers if layer in returning}
        if not returning:
            self._returning.pop(unit, None)
        return gradients

    def update(self, round_index: int, norm: torch.Tensor | None = None) -> None:
        """Apply one update; `norm` is the gradient's over all stages, where they share one to clip by."""
        setup, replica = self.setup, self.replica
        minibatches = setup.pipeline.round_minibatches(self.stage_index, round_index, self._num_minibatches)
        first = self._first + minibatches.start
        samples = sum(setup.sampler.size(self._first + k) for k in minibatches)
        gradients: Sequence[torch.Tensor | None] = replica.gradients
        if self._divisors is None:
            weight = sum(minibatch_weight(setup, self._first + k) for k in minibatches)
            gradients = [None if g is None else g / weight for g in gradients]
        if setup.clip_norm is not None:
            gradients = _clipped(gradients, gradient_norm(gradients) if norm is None else norm, setup.clip_norm)
        replica.update(gradients, setup.lr(self.stage_index, setup.sampler.samples_before(first), samples))
        self._note_memory()

    def squared_norm(self) -> torch.Tensor:
        """Return the squared norm of the round's gradients, one float32: what a norm shared by all stages sums."""
        return gradient_norm(self.replica.gradients).square().float().reshape(1).to(self.setup.device)

    def buffers(self) -> list[torch.Tensor]:
        """Return the stage's running statistics, which a drain averages over its replicas."""
        return [buffer for buffer in self.replica.module.buffers() if buffer.is_floating_point()]

    def part(self) -> tuple[str, ModelState]:
        """Return what this worker contributes to a checkpoint, by name."""
        return f"stage-{self.stage_index}-replica-{self.replica_index}", self.replica.state(self._share)

    def restore(self, state: ModelState) -> None:
        """Go on from a checkpoint of the whole model, taken under any plan."""
        self.replica.restore(state, self._share)

    def _check_crossing(self, values: Values) -> None:
        graph = self.setup.graph if self._stage.evaluation is not None else self.setup.graph.evaluated
        for layer, value in values.items():
            try:
                flatten(value)
            except CrossingError as error:
                raise CrossingError(f"layer {graph.layers[layer].name}: {error}") from None

    def _in_order(self, received: Values) -> Values:
        return {layer: received[layer] for layers in self._stage.receives.values() for layer in layers}

    def _heads(self, arriving: Sequence[Mapping[int, list[torch.Tensor]]]) -> list[torch.Tensor]:
        """Add gradients that meet, in order of arrival in the program: last reader first."""
        total: Gradients = {}
        for gradients in arriving:
            for layer, tensors in gradients.items():
                known = total.get(layer)
                total[layer] = tensors if known is None else [a + b for a, b in zip(known, tensors, strict=True)]
        return [tensor for layer in self.replica.stage.returns for tensor in total.get(layer, ())]

    def _loss_function(self, unit: int) -> LossFunction:
        targets = self._feed.targets(unit)
        divisor = None if self._divisors is None else self._divisors[self.setup.pipeline.minibatch(unit)[0]]

        def loss(output: Any) -> torch.Tensor:
            value = self.setup.dataset.loss(output, targets)
            return value if divisor is None else value / divisor

        return loss

    def _synchronised_version(self, minibatch: int) -> int:
        """Return the version of this stage that has seen what the input stage's version of this minibatch has seen.

        Versions count from the drain here; a stage's store counts from the start of the run.
        """
        pipeline = self.setup.pipeline

        def version(k: int) -> int:
            seen = max(0, k // pipeline.replicas[0] - pipeline.depth + 1) * pipeline.replicas[0]
            return self._drained_version + seen // pipeline.replicas[self.stage_index]

        next_here = minibatch + pipeline.replicas[self.stage_index]
        more = next_here < self._num_minibatches
        self.replica.weights.keep_from = version(next_here) if more else None
        return version(minibatch)

    def _note_memory(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.replica.live_bytes())


def training_feed(setup: Setup, first: int, num_minibatches: int) -> tuple[Feed, list[float] | None]:
    """Return the data of a segment of training, and what its losses are divided by."""
    return Feed(setup, "train", first, num_minibatches), loss_divisors(setup, first, num_minibatches)


def gradient_norm(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return the Euclidean norm of all gradients together."""
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients if gradient is not None]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def _clipped(gradients: Sequence[torch.Tensor | None], norm: torch.Tensor, largest: float) -> list[torch.Tensor | None]:
    """Scale gradients down to a norm, by the factor torch.nn.utils.clip_grad_norm_ uses."""
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    return [None if gradient is None else gradient * factor.to(gradient.dtype) for gradient in gradients]
