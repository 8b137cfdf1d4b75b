"""LARS and LAMB, tensor by tensor in NumPy, written from the papers' algorithms; shares no code with the package.

LARS: You, Gitman and Ginsburg (2017), Algorithm 1 with the trust coefficient of equation 6. LAMB: You et al. (2020),
Algorithm 2 with phi(z) = z. A layer is a tensor. `exclude_vectors` leaves tensors of at most one dimension out of
adaptation and weight decay.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Array = Any
State = dict[str, Array]
Rule = Callable[[Array, Array, State, float, int], tuple[Array, State]]


def lars(momentum: float = 0.9, decay: float = 0.0, eta: float = 0.001, *, exclude_vectors: bool = True) -> Rule:
    """Return LARS's step, a function of (weights, gradient, state, learning rate, number of the step from 1)."""

    def step(w: Array, g: Array, state: State, lr: float, t: int) -> tuple[Array, State]:
        ratio, penalty = 1.0, decay
        if exclude_vectors and w.ndim < 2:
            penalty = 0.0
        elif length(w) > 0 and length(g) > 0:
            ratio = eta * length(w) / (length(g) + decay * length(w))
        v = momentum * state.get("v", np.zeros_like(w)) + lr * ratio * (g + penalty * w)
        return w - v, {"v": v}

    return step


def lamb(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-6, decay: float = 0.01, *, exclude_vectors: bool = True
) -> Rule:
    def step(w: Array, g: Array, state: State, lr: float, t: int) -> tuple[Array, State]:
        m = b1 * state.get("m", np.zeros_like(w)) + (1 - b1) * g
        v = b2 * state.get("v", np.zeros_like(w)) + (1 - b2) * g**2
        r = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        if exclude_vectors and w.ndim < 2:
            return w - lr * r, {"m": m, "v": v}
        u = r + decay * w
        ratio = length(w) / length(u) if length(w) > 0 and length(u) > 0 else 1.0
        return w - lr * ratio * u, {"m": m, "v": v}

    return step


def length(a: Array) -> float:
    return math.sqrt(sum(float(x) ** 2 for x in a.reshape(-1)))


def of_tensors(rule: Rule) -> Callable[..., Any]:
    """Return a rule for NumPy's arrays as one for tensors, a `Step` of `tests.oracles.staleness`."""

    def step(w: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor], lr: float, t: int) -> Any:
        arrays = {key: value.numpy() for key, value in state.items()}
        made, kept = rule(w.detach().numpy(), g.numpy(), arrays, lr, t)
        return torch.from_numpy(np.asarray(made)), {key: torch.from_numpy(value) for key, value in kept.items()}

    return step
