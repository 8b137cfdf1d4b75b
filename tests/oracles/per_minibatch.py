"""Training in any mode as one loop over minibatches in plain torch; shares no code with the package.

There are no workers, no schedule and no clock. A stage is a set of parameters with a list of versions. Minibatches run
through the whole model one after another, each at the versions that the weight policy's formula names, and a stage is
updated after the last minibatch of its round. Versions are numbered from 0 at every drain.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.oracles.draws import augmentation, layer_seed, parts
from tests.oracles.meaning import Meaning
from tests.oracles.rates import scale_of
from tests.oracles.staleness import depths

Tensors = dict[str, torch.Tensor]


class Outcome(NamedTuple):
    """The result of a run."""

    tensors: Tensors  # parameters and running statistics
    points: list[tuple[int, dict[str, float]]]  # samples seen and metrics of every evaluation
    samples: dict[int, list[int]]  # of every minibatch, by its draw


@dataclass
class _Stage:
    """A stage."""

    parameters: dict[str, nn.Parameter]  # the newest
    optimizer: torch.optim.Optimizer | None  # None without parameters
    depth: int  # units in flight per replica
    predicts: bool  # whether the weight policy predicts weights
    change: Tensors  # PipeMare's delta, the moving average of the updates
    versions: list[Tensors] = field(default_factory=list)  # since the last drain
    directions: list[Tensors] = field(default_factory=list)  # of the optimizer's next step, after every version
    pending: dict[str, torch.Tensor] = field(default_factory=dict)  # gradients of the round so far
    round_read: tuple[int, int] = (-1, 0)  # a round, and the version that its first forward read

    def append_version(self) -> None:
        """Append the newest parameters to the versions, with the direction of the optimizer's next step."""
        self.versions.append({name: p.detach().clone() for name, p in self.parameters.items()})
        if self.predicts and self.optimizer is not None:
            states, settings = self.optimizer.state, self.optimizer.defaults
            found = {name: _direction(states.get(p, {}), settings) for name, p in self.parameters.items()}
            self.directions.append({name: each for name, each in found.items() if each is not None})

    def drained(self) -> None:
        """Begin to number versions from 0."""
        self.versions, self.directions, self.round_read = [], [], (-1, 0)
        self.append_version()


class Loop:
    """Trains a model in any mode.

    Args:
        model: a `tests.random_recipes.nets.Net` with its initial weights.
        dataset: of its samples.
        meaning: everything else about the run.
    """

    def __init__(self, model: Any, dataset: Any, meaning: Meaning) -> None:
        self.model, self.dataset, self.meaning = model, dataset, meaning
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.live = dict(trained)  # the parameters that passes compute with, by name
        d = depths(meaning.replicas, meaning.depth)
        self.stages = []
        for s in range(len(meaning.replicas)):
            own = {n: nn.Parameter(p.detach().clone()) for n, p in trained.items() if meaning.stage_of[n] == s}
            optimizer = meaning.make_optimizer([*own.values()]) if own else None
            self.stages.append(
                _Stage(
                    own, optimizer, d[s], meaning.policy == "predict", {n: torch.zeros_like(p) for n, p in own.items()}
                )
            )
        self.buffers = [  # of every replica of every stage
            [{n: b.clone() for n, b in model.named_buffers() if meaning.stage_of[n] == s} for _ in range(r)]
            for s, r in enumerate(meaning.replicas)
        ]
        self.draw = (0, 0)
        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_pre_hook(self._seeding(name))
        self.loss_sum = self.weight_sum = 0.0

    def run(self) -> Outcome:
        meaning, points, done = self.meaning, [], 0
        segments = iter(meaning.pushes)
        while done < meaning.total:
            drain = min(meaning.total, *((done // period + 1) * period for period in meaning.periods))
            for stage in self.stages:
                stage.drained()
            if meaning.asynchronous:
                self._push(done, next(segments))
            else:
                self._segment(done, drain - done)
            self._average_buffers()
            done = drain
            if done % meaning.periods[0] == 0 or done == meaning.total:
                points.append((meaning.order.before(done), self._evaluate()))
        tensors = {n: p.detach() for stage in self.stages for n, p in stage.parameters.items()}
        tensors |= {n: b for own in self.buffers for n, b in own[0].items()}
        seen = {augmentation(meaning.seed, k): meaning.order.samples(k) for k in range(meaning.total)}
        return Outcome(tensors, points, seen)

    def _segment(self, first: int, count: int) -> None:
        meaning, every = self.meaning, range(len(self.stages))
        left = [_lengths(meaning.round_size(s), count, meaning.microbatches) for s in every]
        for k, part in meaning.units(count):
            rounds = [k // meaning.round_size(s) for s in every]
            weights = None
            if meaning.flushes:
                size = meaning.round_size(0)
                weights = self._weight(first, range(rounds[0] * size, min((rounds[0] + 1) * size, count)))
            self._unit(first, k, part, [self._forward_weights(s, first, k, part) for s in every], weights)
            for s, j in enumerate(rounds):
                left[s][j] -= 1
            ended = [s for s, j in enumerate(rounds) if left[s][j] == 0]
            self._update(ended, first, count, rounds)

    def _unit(self, first: int, k: int, part: int, forward: Sequence[Tensors], divisor: float | None) -> None:
        """Run a microbatch forward and backward, and add its gradients to those of the stages' rounds.

        `forward` are the weights of every stage's forward; the loss is divided by `divisor`, if given.
        """
        samples = parts(self.meaning.order.samples(first + k), self.meaning.microbatches)[part]
        if not samples:
            return
        self._load(forward)
        fresh = self._take_buffers(k)
        loss = self._loss("train", samples, (first + k, part))
        self._keep_buffers(fresh, k)
        self.weight_sum += self._weight_of(samples, first + k)
        self.loss_sum += loss.item()
        self._load([self._backward_weights(s, first, k, forward[s]) for s in range(len(self.stages))])
        target = loss if divisor is None else loss / divisor
        found = torch.autograd.grad(target, [*self.live.values()], allow_unused=True)
        for name, gradient in zip(self.live, found, strict=True):
            pending = self.stages[self.meaning.stage_of[name]].pending
            if gradient is not None:
                pending[name] = pending[name] + gradient if name in pending else gradient

    def _update(self, ended: Sequence[int], first: int, count: int, rounds: Sequence[int]) -> None:
        """Clip gradients and update the stages `ended`, whose rounds have ended."""
        meaning = self.meaning
        if not meaning.flushes:
            for s in ended:
                size, stage = meaning.round_size(s), self.stages[s]
                weight = self._weight(first, range(rounds[s] * size, min((rounds[s] + 1) * size, count)))
                stage.pending = {name: gradient / weight for name, gradient in stage.pending.items()}
        if meaning.flushes:
            _clip([self.stages[s].pending for s in ended], meaning.clip_norm)
        for pending in (self.stages[s].pending for s in ended if not meaning.flushes):
            alone = [{name: pending[name]} for name in meaning.tied & pending.keys()]
            for part in ({name: g for name, g in pending.items() if name not in meaning.tied}, *alone):
                _clip([part], meaning.clip_norm)
                pending |= part
        for s in ended:
            size = meaning.round_size(s)
            members = range(rounds[s] * size, min((rounds[s] + 1) * size, count))
            self._step(s, self._rate(s, first, members))

    def _rate(self, s: int, first: int, members: range) -> float:
        own = sum(len(self.meaning.order.samples(first + k)) for k in members)
        return self._rate_at(s, self.meaning.order.before(first + members.start), own)

    def _rate_at(self, s: int, before: int, own: int) -> float:
        scale = scale_of(self.meaning.scaling, self.meaning.round_size(s), self.meaning.round_size(0))
        return self.meaning.rates.rate(scale, self._tau(s), before, own)

    def _tau(self, s: int) -> float:
        return (self.stages[s].depth - 1) / (self.meaning.microbatches * self.meaning.accumulate)

    def _step(self, s: int, rate: float) -> None:
        stage = self.stages[s]
        if stage.optimizer is not None:
            before = stage.versions[-1]
            for group in stage.optimizer.param_groups:
                group["lr"] = rate
            for name, parameter in stage.parameters.items():
                parameter.grad = stage.pending.get(name)
            stage.optimizer.step()
            if self.meaning.policy == "correct" and stage.depth > 1:
                gamma = self.meaning.decay ** (1 / self._tau(s))
                for name, p in stage.parameters.items():
                    stage.change[name] = gamma * stage.change[name] + (1 - gamma) * (p.detach() - before[name])
        stage.pending = {}
        stage.append_version()

    # Which weights.

    def _version_read(self, s: int, k: int, part: int) -> int:
        """Return the version that the forward of a microbatch reads, by the weight policy's formula."""
        meaning, r = self.meaning, self.meaning.replicas[s]
        if meaning.flushes:
            return k // meaning.round_size(s)
        if meaning.policy == "double-buffer":
            return max(0, k // meaning.round_size(s) - 1)
        if meaning.policy == "stash-vertical-sync":
            r0 = meaning.replicas[0]
            return max(0, k // r0 - self.stages[0].depth + 1) * r0 // r
        before = k // r * meaning.microbatches + part  # units that the replica has run forward
        return max(0, before - self.stages[s].depth + 1) // (meaning.microbatches * meaning.accumulate)

    def _ahead(self, s: int) -> int:
        """Return the number of updates by which a backward's prediction is ahead of its round's weights."""
        meaning = self.meaning
        units, r = meaning.microbatches * meaning.accumulate, meaning.replicas
        in_flight_besides = (self.stages[0].depth - 1) * r[0] // r[s]
        return (units - 1 + min(sum(r[:s]) // (2 * r[s]), in_flight_besides)) // units

    def _forward_weights(self, s: int, first: int, k: int, part: int) -> Tensors:
        stage, j = self.stages[s], k // self.meaning.round_size(s)
        version = self._version_read(s, k, part)
        if self.meaning.policy != "predict":
            return stage.versions[version]
        if stage.round_read[0] != j:
            stage.round_read = j, version
        version = stage.round_read[1]
        return self._predicted(s, first, version, j + self._ahead(s) - version)

    def _backward_weights(self, s: int, first: int, k: int, forward: Tensors) -> Tensors:
        stage, j = self.stages[s], k // self.meaning.round_size(s)
        if self.meaning.policy == "none":
            return stage.versions[j]
        if self.meaning.policy == "predict":
            return self._predicted(s, first, j, self._ahead(s))
        if self.meaning.policy == "correct":
            steps = j - self._version_read(s, k, 0)
            return {name: w - steps * stage.change[name] for name, w in stage.versions[j].items()}
        return forward

    def _predicted(self, s: int, first: int, version: int, steps: int) -> Tensors:
        stage, size = self.stages[s], self.meaning.round_size(s)
        if steps == 0:
            return stage.versions[version]
        members = range(version * size, version * size + size)
        length = steps * self._rate(s, first, members)
        return {
            name: w - length * stage.directions[version][name] if name in stage.directions[version] else w
            for name, w in stage.versions[version].items()
        }

    def _load(self, weights: Sequence[Tensors]) -> None:
        """Set the parameters that passes compute with, hidden from autograd: also for backwards of existing graphs."""
        for name, tensor in ((n, t) for own in weights for n, t in own.items()):
            self.live[name].data.copy_(tensor)

    # Losses and buffers.

    def _loss(self, split: str, samples: Sequence[int], draw: tuple[int, int]) -> torch.Tensor:
        fields = [*self.dataset.inputs, *self.dataset.targets]
        given = self.dataset.fetch(split, samples, fields, augmentation(self.meaning.seed, draw[0]))
        self.draw = draw
        arguments = [given[name] for name in self.dataset.inputs]
        if self.meaning.recompute and self.meaning.policy in ("none", "predict", "correct"):
            return self._staged(arguments, given)
        return self.dataset.loss(self.model(*arguments), given)

    def _staged(self, arguments: Sequence[torch.Tensor], targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of a net of steps whose stages are recomputed in the backward."""
        x, *rest = arguments
        names = [name for name, kind in (("second", "second"), ("embed", "embed")) if name in self._kinds]
        others = dict(zip(names, rest, strict=True))
        ends = [*self.meaning.starts, len(self.model.steps)]
        runs = [range(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]
        values = [x]
        for run in runs:
            is_last = run is runs[-1]

            def through(*known: torch.Tensor, own: Any = run, last: bool = is_last) -> tuple[torch.Tensor, ...]:
                made = [*known]
                for index in own:
                    kind, *given = self.model.steps[index]
                    made.append(self.model.step(index, kind, given, made, others))
                return (self.dataset.loss(self.model.head(made[-1]), targets),) if last else tuple(made[len(known) :])

            values += checkpoint(through, *values, use_reentrant=False, preserve_rng_state=False)
        return values[-1]

    @property
    def _kinds(self) -> set[str]:
        return {step[0] for step in self.model.steps}

    def _take_buffers(self, k: int) -> Tensors:
        """Load the buffers of the replicas that run a minibatch; return the model's buffers."""
        mine = dict(self.model.named_buffers())
        for s, own in enumerate(self.buffers):
            for name, buffer in own[k % self.meaning.replicas[s]].items():
                mine[name].copy_(buffer)
        return mine

    def _keep_buffers(self, mine: Tensors, k: int) -> None:
        for s, own in enumerate(self.buffers):
            for buffer_name, buffer in own[k % self.meaning.replicas[s]].items():
                buffer.copy_(mine[buffer_name])

    def _average_buffers(self) -> None:
        for own in self.buffers:
            for name, buffer in own[0].items():
                if buffer.is_floating_point():
                    mean = torch.stack([each[name] for each in own]).mean(0)
                    for each in own:
                        each[name].copy_(mean)

    def _seeding(self, name: str) -> Callable[..., None]:
        def seed(module: nn.Module, arguments: Any) -> None:
            torch.default_generator.manual_seed(layer_seed(self.meaning.seed, *self.draw, name))

        return seed

    def _weight(self, first: int, members: range) -> float:
        return sum(self._weight_of(self.meaning.order.samples(first + k), first + k) for k in members)

    def _weight_of(self, samples: Sequence[int], k: int) -> float:
        """Return the weight of samples of minibatch k of the run."""
        if not self.dataset.weighs_targets:
            return float(self.dataset.weight("train", samples))
        drawn = self.dataset.fetch("train", samples, ["weight"], augmentation(self.meaning.seed, k))
        return float(drawn["weight"].sum())

    def _evaluate(self) -> dict[str, float]:
        meaning = self.meaning
        with torch.no_grad():
            for stage in self.stages:
                states = {} if stage.optimizer is None else stage.optimizer.state
                self._load([{n: states.get(p, {}).get("ax", p) for n, p in stage.parameters.items()}])
            self._take_buffers(0)
            self.model.eval()
            sums = {"eval_loss": 0.0, "top1": 0.0}
            weight, size = 0.0, meaning.order.size
            for start in range(0, self.dataset.num_eval, size):
                samples = range(start, min(start + size, self.dataset.num_eval))
                given = self.dataset.fetch("eval", samples, [*self.dataset.inputs, *self.dataset.targets])
                output = self.model(*(given[name] for name in self.dataset.inputs))
                sums["eval_loss"] += float(self.dataset.loss(output, given))
                sums["top1"] += float(self.dataset.score(output, given)["top1"])
                weight += self.dataset.weight("eval", samples)
            self.model.train()
        mean = self.loss_sum / self.weight_sum
        self.loss_sum = self.weight_sum = 0.0
        return {"train_loss": mean, **{name: total / weight for name, total in sums.items()}}

    # Asynchronous data parallelism.

    def _push(self, first: int, order: Sequence[int]) -> None:
        """Apply gradients in the order of their pushes, each computed at its worker's copy of the weights."""
        (stage,), (workers,) = self.stages, self.meaning.replicas
        copies, samples = [stage.versions[0]] * workers, self.meaning.order.before(first)
        for k in order:
            members = self.meaning.order.samples(first + k)
            self._unit(first, k, 0, [copies[k % workers]], self._weight_of(members, first + k))
            _clip([stage.pending], self.meaning.clip_norm)
            self._step(0, self._rate_at(0, samples, len(members)))
            samples += len(members)
            copies[k % workers] = stage.versions[-1]


def _lengths(size: int, count: int, microbatches: int) -> list[int]:
    """Return the number of microbatches of every round of a segment; the last may be short."""
    return [min(size, count - start) * microbatches for start in range(0, count, size)]


def _clip(groups: Sequence[dict[str, torch.Tensor]], largest: float | None) -> None:
    """Scale gradients so that their common norm is at most `largest`, as torch.nn.utils.clip_grad_norm_ does."""
    found = [gradient for group in groups for gradient in group.values()]
    if largest is None or not found:
        return
    norm = math.sqrt(sum(float((gradient.double() ** 2).sum()) for gradient in found))
    factor = min(1.0, largest / (norm + 1e-6))
    for group in groups:
        for name in group:
            group[name] = group[name] * factor


def _direction(state: Mapping[str, Any], settings: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the direction of an optimizer's next step: SGD's momentum, Adam's corrected averages; None if unknown."""
    if "exp_avg" not in state:
        momentum: torch.Tensor | None = state.get("momentum_buffer")
        return None if momentum is None else momentum.clone()
    (b1, b2), t, squares = settings["betas"], float(state["step"]), state.get("max_exp_avg_sq", state["exp_avg_sq"])
    mean = state["exp_avg"] / (1 - b1**t)
    return torch.as_tensor(mean / ((squares / (1 - b2**t)).sqrt() + settings["eps"]))
