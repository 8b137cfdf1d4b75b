"""Weight updates of PipeDream-2BW, written from the paper's formula; shares no code with the engine.

Paper: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training (ICML'21) section 3.1:
w(t+1) = w(t) - lr * grad f(w(t-1)), where f is the mean loss of the samples of update t.
"""

from collections.abc import Callable

import torch
from torch.func import functional_call

from tests.oracles.staleness import Parameters, Step


def train(
    model: torch.nn.Module,
    loss_sum: Callable[[torch.Tensor, int], torch.Tensor],
    inputs: Callable[[int], torch.Tensor],
    weight: Callable[[int], float],
    num_minibatches: int,
    per_update: int,
    step: Step,
    lr: float,
) -> list[Parameters]:
    """Return the parameters after 0, 1, 2, ... updates, each of the next `per_update` minibatches.

    For the other arguments see `tests.oracles.staleness.train`.
    """
    versions = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in versions[0]}
    for first in range(0, num_minibatches, per_update):
        members = range(first, min(first + per_update, num_minibatches))
        stale = versions[max(0, len(versions) - 2)]
        parameters = {name: p.clone().requires_grad_() for name, p in stale.items()}
        outputs = [loss_sum(functional_call(model, parameters, (inputs(k),)), k) for k in members]
        mean = sum(outputs[1:], outputs[0]) / sum(weight(k) for k in members)
        gradients = dict(zip(parameters, torch.autograd.grad(mean, list(parameters.values())), strict=True))
        made: Parameters = {}
        for name, w in versions[-1].items():
            made[name], states[name] = step(w, gradients[name], states[name], lr, len(versions))
        versions.append(made)
    return versions
