"""Training with predicted or corrected weights, written from the papers' formulas; shares no code with the engine.

SpecTrain (Chen et al. 2018), momentum SGD, worker `rank` of N, one minibatch per update: weights are predicted as
w - s lr u, with s = floor(rank / 2) + N - rank - 1 in the forward and s = floor(rank / 2) in the backward.

XPipe (Guan et al. 2019), the same for minibatches of T microbatches and Adam, w - s lr m_hat / (sqrt(v_hat) + eps): in
the backward s = floor((T + floor(rank / 2) - 1) / T). The first microbatch of a minibatch, the bellwether, predicts;
the others use its weights.

PipeMare (Yang et al., MLSys'21): forwards use weights that are tau updates old when their gradient is applied,
backwards w(t) - tau delta(t) with delta(t + 1) = gamma delta(t) + (1 - gamma) (w(t + 1) - w(t)), gamma = D^(1 / tau).

While the pipeline fills, a forward's version is fewer than N - rank - 1 updates old: as many as there have been.

Forward and backward of a layer then use different weights, which autograd doesn't support; so this is a network of
linear layers and tanh with hand-written derivatives.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from tests.oracles.staleness import Parameters, Step, depths

Rate = Callable[[int, int], float]  # stage, first minibatch of the update


class Rules(NamedTuple):
    """How staleness is compensated."""

    decay: float | None = None  # PipeMare's D; None: weights are predicted
    microbatches: int = 1  # T
    recompute: bool = False  # whether a backward recomputes its stage's forward, with the backward's weights


def momentum_direction(state: Parameters, t: int) -> torch.Tensor:
    """Return momentum SGD's smoothed gradient after t updates."""
    return state["u"]


def adam_direction(state: Parameters, t: int) -> torch.Tensor:
    m_hat, v_hat = state["m"] / (1 - 0.9**t), state["v"] / (1 - 0.999**t)
    return m_hat / (v_hat.sqrt() + 1e-8)


class _Stage:
    """One stage: its weight versions, and the optimizer's state and PipeMare's delta of each."""

    def __init__(self, modules: Sequence[int], body: nn.Sequential) -> None:
        self.modules = list(modules)
        self.is_linear = {i: isinstance(body[i], nn.Linear) for i in modules}
        start = {n: p.detach().clone() for i in modules for n, p in body[i].named_parameters(prefix=str(i))}
        self.versions = [start]
        self.states: list[dict[str, Parameters]] = [{name: {} for name in start}]
        self.deltas = [{name: torch.zeros_like(p) for name, p in start.items()}]
        self.pending = {name: torch.zeros_like(p) for name, p in start.items()}

    def forward(self, w: Parameters, x: torch.Tensor) -> list[torch.Tensor]:
        values = [x]
        for i in self.modules:
            x = values[-1]
            values.append(x @ w[f"{i}.weight"].T + w[f"{i}.bias"] if self.is_linear[i] else x.tanh())
        return values

    def backward(self, w: Parameters, values: list[torch.Tensor], g: torch.Tensor) -> torch.Tensor:
        """Add to the gradients of the parameters; return that of the input."""
        for place in reversed(range(len(self.modules))):
            i, x, y = self.modules[place], values[place], values[place + 1]
            if self.is_linear[i]:
                self.pending[f"{i}.weight"] += g.T @ x
                self.pending[f"{i}.bias"] += g.sum(0)
                g = g @ w[f"{i}.weight"]
            else:
                g = g * (1 - y * y)
        return g


def train(
    body: nn.Sequential,
    modules: Sequence[Sequence[int]],
    replicas: Sequence[int],
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    num_minibatches: int,
    step: Step,
    direction: Callable[[Parameters, int], torch.Tensor],
    lr: Rate,
    rules: Rules,
) -> list[list[Parameters]]:
    """Return, per stage, its parameters after 0, 1, 2, ... updates. The loss is an update's mean cross-entropy.

    Args:
        body: linear layers and tanh.
        modules: indices of the layers of every stage.
        replicas: of every stage.
        batch: inputs and labels of a minibatch.
        num_minibatches: to train on.
        step: the optimizer.
        direction: the next step's direction by (optimizer's state, number of updates).
        lr: learning rate by (stage, first minibatch of the update).
        rules: how staleness is compensated.
    """
    stages, d, t = [_Stage(own, body) for own in modules], depths(replicas), rules.microbatches
    samples = [0] * len(stages)
    for k in range(num_minibatches):
        x, label = batch(k)
        kept: list[list[torch.Tensor]] = []
        for s, stage in enumerate(stages):
            used = _forward_weights(stage, s, k // replicas[s], replicas, d[s], direction, lr, rules)
            kept.append(stage.forward(used, x))
            x = kept[-1][-1]
        g: torch.Tensor | None = None
        for s, stage in reversed(list(enumerate(stages))):
            r, j = replicas[s], k // replicas[s]
            used, values = _backward_weights(stage, s, j, replicas, d[s], direction, lr, rules), kept[s]
            if rules.recompute:
                values = stage.forward(used, values[0])
            if g is None:
                g = values[-1].softmax(1) - nn.functional.one_hot(label, values[-1].shape[1])
            g = stage.backward(used, values, g)
            samples[s] += len(label)
            if k == min((j + 1) * r, num_minibatches) - 1:
                _update(stage, samples[s], step, lr(s, j * r), (d[s] - 1) / t, rules)
                samples[s] = 0
    return [stage.versions for stage in stages]


def _version_read(j: int, d: int, t: int) -> int:
    """Return the version that the first unit of round j reads: its replica has run d - 1 fewer backwards by then."""
    return max(0, j * t - (d - 1)) // t


def _steps_back(s: int, replicas: Sequence[int], t: int) -> int:
    """Return s of the backward: floor((T + floor(rank / 2) - 1) / T) where no stage is replicated."""
    return (t + sum(replicas[:s]) // (2 * replicas[s]) - 1) // t


def _forward_weights(
    stage: _Stage,
    s: int,
    j: int,
    replicas: Sequence[int],
    d: int,
    direction: Callable[[Parameters, int], torch.Tensor],
    lr: Rate,
    rules: Rules,
) -> Parameters:
    v = _version_read(j, d, rules.microbatches)
    if rules.decay is not None:
        return stage.versions[v]
    steps = j - v + _steps_back(s, replicas, rules.microbatches)
    return _predicted(stage, v, steps * lr(s, v * replicas[s]), direction)


def _backward_weights(
    stage: _Stage,
    s: int,
    j: int,
    replicas: Sequence[int],
    d: int,
    direction: Callable[[Parameters, int], torch.Tensor],
    lr: Rate,
    rules: Rules,
) -> Parameters:
    if rules.decay is not None:
        tau = j - _version_read(j, d, rules.microbatches)
        return {name: w - tau * stage.deltas[j][name] for name, w in stage.versions[j].items()}
    return _predicted(stage, j, _steps_back(s, replicas, rules.microbatches) * lr(s, j * replicas[s]), direction)


def _predicted(
    stage: _Stage, v: int, length: float, direction: Callable[[Parameters, int], torch.Tensor]
) -> Parameters:
    if v == 0:  # before the first update there is no direction
        return stage.versions[0]
    return {name: w - length * direction(stage.states[v][name], v) for name, w in stage.versions[v].items()}


def _update(stage: _Stage, samples: int, step: Step, lr: float, tau: float, rules: Rules) -> None:
    t = len(stage.versions)
    newest, made, states = stage.versions[-1], {}, {}
    for name, w in newest.items():
        made[name], states[name] = step(w, stage.pending[name] / samples, stage.states[-1][name], lr, t)
    if rules.decay is not None and tau > 0:
        gamma = rules.decay ** (1 / tau)
        delta = stage.deltas[-1]
        stage.deltas.append({name: gamma * delta[name] + (1 - gamma) * (made[name] - newest[name]) for name in made})
    else:
        stage.deltas.append(stage.deltas[-1])
    stage.versions.append(made)
    stage.states.append(states)
    stage.pending = {name: torch.zeros_like(p) for name, p in newest.items()}
