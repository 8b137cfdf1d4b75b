"""Weight updates of pipelines without a flush, written from the papers' formulas; shares no code with the engine.

Paper: PipeDream (SOSP'19) section 3.3: w(t+1) = w(t) - lr * grad f(w_1(t-n+1), ..., w_n(t)); generalised to replicas:
round j of stage s is minibatches j r_s ... j r_s + r_s - 1 and gives one update; minibatch k uses version
v_s(k) = max(0, floor(k / r_s) - d_s + 1).
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch.func import functional_call

Parameters = dict[str, torch.Tensor]
Step = Callable[[torch.Tensor, torch.Tensor, Parameters, float, int], tuple[torch.Tensor, Parameters]]


def depths(replicas: Sequence[int], depth: int | None = None) -> list[int]:
    """Return d_s, the minibatches in flight per replica, of every stage: one minibatch per worker from s on.

    A `depth` beyond NOAM is treated as (depth - NOAM) r_0 additional workers just before the last stage.
    """
    usual = math.ceil(sum(replicas) / replicas[0])
    d = [depth or usual]
    row = [*replicas[:-1], max(0, d[0] - usual) * replicas[0], replicas[-1]]
    for s in range(1, len(replicas)):
        behind = row[s:] if s < len(replicas) - 1 else row[-1:]
        reach = math.ceil(sum(behind) / replicas[s])
        d.append(min([reach, *(1 + (d[t] - 1) * replicas[t] // replicas[s] for t in range(s))]))
    return d


def sgd(momentum: float = 0.0, weight_decay: float = 0.0) -> Step:
    """Return u(t+1) = mu u(t) + g + lambda w(t); w(t+1) = w(t) - lr u(t+1)."""

    def step(w: torch.Tensor, g: torch.Tensor, state: Parameters, lr: float, t: int) -> tuple[torch.Tensor, Parameters]:
        u = momentum * state.get("u", torch.zeros_like(w)) + g + weight_decay * w
        return w - lr * u, {"u": u}

    return step


def adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0) -> Step:
    """Return Kingma and Ba's update, algorithm 1, with L2 regularisation."""

    def step(w: torch.Tensor, g: torch.Tensor, state: Parameters, lr: float, t: int) -> tuple[torch.Tensor, Parameters]:
        g = g + weight_decay * w
        m = b1 * state.get("m", torch.zeros_like(w)) + (1 - b1) * g
        v = b2 * state.get("v", torch.zeros_like(w)) + (1 - b2) * g * g
        m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        return w - lr * m_hat / (v_hat.sqrt() + eps), {"m": m, "v": v}

    return step


def train(
    model: torch.nn.Module,
    stage_of: Callable[[str], int],
    replicas: Sequence[int],
    loss_sum: Callable[[torch.Tensor, int], torch.Tensor],
    inputs: Callable[[int], torch.Tensor],
    weight: Callable[[int], float],
    num_minibatches: int,
    step: Step,
    lr: float,
    *,
    depth: int | None = None,
    vertical_sync: bool = False,
) -> list[list[Parameters]]:
    """Return, per stage, its parameters after 0, 1, 2, ... updates.

    The gradient of minibatch k is computed at the stale versions that the formula names; updates change the newest
    version.

    Args:
        model: with the initial weights, which stay as they are.
        stage_of: the stage of a parameter.
        replicas: of every stage.
        loss_sum: the summed loss of (output, minibatch).
        inputs: of a minibatch.
        weight: of a minibatch; an update's gradient is divided by the sum of its minibatches' weights.
        num_minibatches: to train on.
        step: the optimizer.
        lr: learning rate.
        depth: minibatches in flight per replica of the input stage; NOAM by default.
        vertical_sync: whether all stages use the input stage's version of a minibatch.
    """
    d = depths(replicas, depth)
    num_stages = len(replicas)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    versions = [[{n: p for n, p in start.items() if stage_of(n) == s}] for s in range(num_stages)]
    states: list[dict[str, dict[str, torch.Tensor]]] = [{n: {} for n in versions[s][0]} for s in range(num_stages)]
    pending: list[dict[str, torch.Tensor]] = [{} for _ in range(num_stages)]
    for k in range(num_minibatches):
        stale = [max(0, k // replicas[s] - d[s] + 1) for s in range(num_stages)]
        if vertical_sync:
            stale = [stale[0] * replicas[0] // replicas[s] for s in range(num_stages)]
        mixed = {n: p.clone().requires_grad_() for s in range(num_stages) for n, p in versions[s][stale[s]].items()}
        loss = loss_sum(functional_call(model, mixed, (inputs(k),)), k)
        grads = dict(zip(mixed, torch.autograd.grad(loss, list(mixed.values())), strict=True))
        for s in range(num_stages):
            for name in versions[s][0]:
                pending[s][name] = pending[s].get(name, torch.zeros_like(start[name])) + grads[name]
            first = k // replicas[s] * replicas[s]
            if k == min(first + replicas[s], num_minibatches) - 1:  # the round is complete
                total = sum(weight(i) for i in range(first, k + 1))
                newest, made = versions[s][-1], {}
                for name, w in newest.items():
                    made[name], states[s][name] = step(
                        w, pending[s][name] / total, states[s][name], lr, len(versions[s])
                    )
                versions[s].append(made)
                pending[s] = {}
    return versions
