"""LARS and LAMB: optimizers for large minibatches, which adapt the rate of every parameter tensor to its norm.

Neither torch nor torchvision has them, and the libraries that have them come with models and data sets. A step on a
parameter depends on that parameter only, so a cut or a replica changes nothing.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from pipebench.model.slice_modules import Divided

_Tensors = list[torch.Tensor]


class Adapted(torch.optim.Optimizer):
    """An optimizer that steps all tensors of one type together, those with adapted rates apart from the others."""

    whole_of: Divided | None = None  # which parameters are slices, if any: steps adapt to the norms of the whole ones

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step with the gradients there are; `closure` is None."""
        with torch.no_grad():
            for group in self.param_groups:
                for places, is_adapted in _kinds(group["params"], exclude_vectors=group["exclude_vectors"]):
                    parameters = [group["params"][place] for place in places]
                    gradients = [p.grad for p in parameters if p.grad is not None]  # all of them have one
                    self._places = places
                    self._step(parameters, gradients, group, is_adapted=is_adapted)

    def _step(self, parameters: _Tensors, gradients: _Tensors, group: dict[str, Any], *, is_adapted: bool) -> None:
        raise NotImplementedError

    def _norms(self, tensors: _Tensors) -> torch.Tensor:
        """Return the norms of tensors of one type, summed in fp32 or wider, since a sum in fp16 would overflow."""
        wide = torch.promote_types(tensors[0].dtype, torch.float32)
        norms = torch.stack([norm.to(wide) for norm in torch._foreach_norm(tensors, 2.0, wide)])
        if self.whole_of is None:
            return norms
        divided = self.whole_of._replace(which=self.whole_of.which[self._places])
        return divided.whole(norms.double().square()).sqrt().to(wide)

    def _state_named(self, parameters: _Tensors, name: str) -> list[torch.Tensor]:
        """Return the state of that name of every parameter, initially zeros."""
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return [state[name] for state in states]


class LARS(Adapted):
    """Layer-wise adaptive rate scaling, with momentum.

    You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (2017), Algorithm 1, with the trust
    coefficient eta where equation 6 has it: local rate l = eta |w| / (|g| + decay |w|), velocity v = momentum v + lr l
    (g + decay w), w = w - v. The velocity includes the rate, so that lowering it doesn't slow earlier gradients.

    Every tensor counts as a layer. `exclude_vectors` steps biases and normalisation parameters (at most one dimension)
    at the plain rate and without decay, as the `skip_list` of MLPerf Training's ResNet-50 does. Differs: the paper has
    no such exception.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        eta: float = 0.001,
        exclude_vectors: bool = True,
    ) -> None:
        _check_range("momentum", momentum, 0 <= momentum < 1, "from 0 to below 1")
        _check_range("weight_decay", weight_decay, weight_decay >= 0, "of at least 0")
        _check_range("eta", eta, eta > 0, "above 0")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta}
        super().__init__(params, {**defaults, "exclude_vectors": exclude_vectors})

    def _step(self, parameters: _Tensors, gradients: _Tensors, group: dict[str, Any], *, is_adapted: bool) -> None:
        lr, momentum, decay, eta = (group[name] for name in ("lr", "momentum", "weight_decay", "eta"))
        if is_adapted:
            norms, gradient_norms = self._norms(parameters), self._norms(gradients)
            local_rates = eta * norms / (gradient_norms + decay * norms)
            ratios = torch.where((norms > 0) & (gradient_norms > 0), local_rates, 1.0)
            moves = [*torch._foreach_add(gradients, parameters, alpha=decay)]
            torch._foreach_mul_(moves, _each(lr * ratios, parameters))
        else:
            moves = [*torch._foreach_mul(gradients, lr)]
        if momentum > 0:
            velocities = self._state_named(parameters, "momentum_buffer")
            torch._foreach_mul_(velocities, momentum)
            torch._foreach_add_(velocities, moves)
            moves = velocities
        torch._foreach_sub_(parameters, moves)


class LAMB(Adapted):
    """Adam whose step is scaled to the norm of its parameter, for large minibatches.

    You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (ICLR 2020), Algorithm 2, with
    phi(z) = z: r = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps), u = r + decay w, w = w - lr |w| / |u| u. Defaults are
    those of its section on BERT.

    Every tensor counts as a layer. `exclude_vectors` steps biases and normalisation parameters (at most one dimension)
    as Adam does, without decay, as the authors' code does. Differs: the paper has no such exception.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        exclude_vectors: bool = True,
    ) -> None:
        _check_range("betas", betas, all(0 <= beta < 1 for beta in betas), "from 0 to below 1")
        _check_range("eps", eps, eps > 0, "above 0")
        _check_range("weight_decay", weight_decay, weight_decay >= 0, "of at least 0")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "exclude_vectors": exclude_vectors})

    def _step(self, parameters: _Tensors, gradients: _Tensors, group: dict[str, Any], *, is_adapted: bool) -> None:
        (beta1, beta2), eps = group["betas"], group["eps"]
        averages, squares = self._state_named(parameters, "exp_avg"), self._state_named(parameters, "exp_avg_sq")
        steps = [self._count(parameter) for parameter in parameters]
        torch._foreach_lerp_(averages, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        roots = torch._foreach_div(squares, [1 - beta2**step for step in steps])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, eps)
        moves = [*torch._foreach_div(averages, [1 - beta1**step for step in steps])]
        torch._foreach_div_(moves, roots)
        if is_adapted:
            torch._foreach_add_(moves, parameters, alpha=group["weight_decay"])
            norms, move_norms = self._norms(parameters), self._norms(moves)
            ratios = torch.where((norms > 0) & (move_norms > 0), norms / move_norms, 1.0)
            torch._foreach_mul_(moves, _each(group["lr"] * ratios, parameters))
        else:
            torch._foreach_mul_(moves, group["lr"])
        torch._foreach_sub_(parameters, moves)

    def _count(self, parameter: torch.Tensor) -> int:
        """Count another step of a parameter; return its number. It is stored as torch's optimizers store it."""
        state = self.state[parameter]
        state["step"] = state["step"] + 1 if "step" in state else torch.tensor(1.0)
        return int(state["step"])


def _kinds(parameters: _Tensors, *, exclude_vectors: bool) -> Iterator[tuple[list[int], bool]]:
    """Yield groups of parameters that have a gradient: their indices, and whether their rates are adapted.

    A group has one type and device, since norms of several types together would be rounded differently.
    """
    kinds: dict[tuple[bool, torch.dtype, torch.device], list[int]] = {}
    for place, parameter in enumerate(parameters):
        if parameter.grad is not None:
            is_adapted = parameter.dim() > 1 or not exclude_vectors
            kinds.setdefault((is_adapted, parameter.dtype, parameter.device), []).append(place)
    yield from ((found, is_adapted) for (is_adapted, _, _), found in kinds.items())


def _each(factors: torch.Tensor, tensors: _Tensors) -> list[torch.Tensor]:
    """Return one factor per tensor, in the tensors' type."""
    return list(factors.to(tensors[0].dtype).unbind())


def _check_range(name: str, value: object, is_allowed: bool, allowed: str) -> None:
    if not is_allowed:
        raise ValueError(f"{name} is {value}, allowed are numbers {allowed}")
