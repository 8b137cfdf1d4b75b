"""Weights displaced for single passes: predicted some updates ahead, or taken back by some.

Papers: SpecTrain (Chen et al. 2018) predicts with momentum SGD's smoothed gradient, XPipe (Guan et al. 2019) with
Adam's averages:
    w(t + s) = w(t) - s lr d, with the optimizer's present step direction d.
PipeMare (Yang et al., MLSys'21) takes a backward's weights back along the mean change of the last updates:
    w(t) - tau delta(t), delta(t + 1) = gamma delta(t) + (1 - gamma) (w(t + 1) - w(t)).

Nothing is stashed. All minibatches in flight share one set of buffers, to which their graphs refer, and which is filled
before each pass as the schedule says.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from pipebench.engine.version import Version
from pipebench.engine.weights import Weights

Group = Mapping[str, Any]  # settings of an optimizer's parameter group


class Displacement(NamedTuple):
    """How far a pass's weights are from a version."""

    ahead: int  # updates; negative if taken back
    lr: float  # learning rate of the first of them


AS_IT_IS = Displacement(0, 0.0)


def _adam(state: Mapping[str, Any], group: Group) -> torch.Tensor:
    """Return Adam's step direction, m_hat / (sqrt(v_hat) + eps), without AdamW's weight decay."""
    (b1, b2), steps = group["betas"], state["step"].double()  # the float32 counter is too coarse for 1 - b2^steps
    mean = state["exp_avg"] / (1 - b1**steps)
    squares = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    direction: torch.Tensor = mean.div_((squares / (1 - b2**steps)).sqrt_().add_(group["eps"]))
    return direction


# Step directions by torch.optim class, from a parameter's state; None before the first step. `recipe.rules_training`
# has the classes' names.
DIRECTIONS: Final[dict[type, Callable[[Mapping[str, Any], Group], torch.Tensor | None]]] = {
    torch.optim.SGD: lambda state, group: state.get("momentum_buffer"),
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
}


class MovedWeights:
    """The weights that all passes of a stage replica compute with, displaced from the newest version of `weights`.

    `gamma` is the decay of the mean change per update (PipeMare); with None there is no mean change.
    """

    def __init__(self, weights: Weights, gamma: float | None) -> None:
        self._weights = weights
        self._working = weights.new_version()  # the buffers that all passes use
        self._gamma = gamma
        self._mean_change = None if gamma is None else weights.new_version()
        self._content: tuple[int, Displacement] | None = None  # version and displacement that `_working` holds
        self._last_forward: tuple[int, Displacement] | None = None  # version and displacement of the last forward
        # Copy of the last forward's weights, if a later forward uses the same version after an update
        self._held: list[torch.Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the working buffers, the mean change and the copy."""
        copies = 1 + (self._mean_change is not None) + (self._held is not None)
        return copies * self._weights.version_bytes

    @property
    def mean_change(self) -> dict[str, torch.Tensor]:
        """Mean changes per update, by parameter name: references, not copies; empty without `gamma`."""
        if self._mean_change is None:
            return {}
        return {n: t.detach() for n, t in zip(self._weights.names, self._mean_change.parameters, strict=True)}

    def restore(self, mean_change: Mapping[str, torch.Tensor]) -> None:
        """Restore mean changes by name, 0 for those without; nothing may be in flight."""
        self._content = self._last_forward = self._held = None
        with torch.no_grad():
            for name, mine in self.mean_change.items():
                mine.copy_(mean_change[name]) if name in mean_change else mine.zero_()

    def for_forward(self, number: int, move: Displacement) -> Version:
        """Return a forward's weights: the newest version displaced, or the same as the last forward's."""
        wanted = number, move
        if wanted != self._last_forward:
            self._last_forward, self._held = wanted, None
        if self._held is None:
            self._fill(number, move)
        else:
            with self._unnoticed():
                _copy(self._working.flats, self._held)
            self._content = wanted
        return self._working

    def for_backward(self, move: Displacement) -> None:
        """Fill the buffers of graphs in flight with the newest version, displaced."""
        self._fill(self._weights.newest.number, move)

    def update(self, gradients: Sequence[torch.Tensor | None], lr: float, *, keep_from: int) -> None:
        """Make the next version in place of the newest; see `Weights.update`."""
        newest = self._weights.newest
        if keep_from <= newest.number and self._last_forward is not None and self._held is None:
            self._fill(*self._last_forward)
            self._held = [flat.clone() for flat in self._working.flats]
        self._content = None
        if self._mean_change is not None:  # the working buffers hold the weights before the update
            with self._unnoticed():
                _copy(self._working.flats, newest.flats)
        self._weights.update(gradients, lr, keep_from=newest.number + 1)
        if self._mean_change is not None and self._gamma is not None:
            with self._unnoticed():
                for mean, old, new in zip(self._mean_change.flats, self._working.flats, newest.flats, strict=True):
                    mean.lerp_(old.neg_().add_(new), 1 - self._gamma)

    def _fill(self, number: int, move: Displacement) -> None:
        """Fill the working buffers with the newest version, displaced, unless they hold just that."""
        if self._content == (number, move):
            return
        assert number == self._weights.newest.number, f"version {number} is gone"
        with self._unnoticed():
            _copy(self._working.flats, self._weights.newest.flats)
            if move.ahead > 0:
                self._predict(move)
            elif move.ahead < 0 and self._mean_change is not None:
                for mine, change in zip(self._working.flats, self._mean_change.flats, strict=True):
                    mine.add_(change, alpha=move.ahead)
        self._content = number, move

    def _predict(self, move: Displacement) -> None:
        """Move the working buffers along the optimizer's step directions."""
        optimizer = self._weights.optimizer
        assert optimizer is not None
        direction = DIRECTIONS[type(optimizer)]
        pairs = zip(self._weights.newest.parameters, self._working.parameters, strict=True)
        mine = {id(parameter): own for parameter, own in pairs}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                step = direction(state, group) if state else None
                if step is not None:
                    mine[id(parameter)].sub_(step, alpha=move.ahead * move.lr)

    @contextmanager
    def _unnoticed(self) -> Iterator[None]:
        """Write into buffers of graphs in flight without autograd's error: their backwards use the new values."""
        buffers = (*self._working.flats, *self._working.parameters)
        with torch.no_grad(), _unsafe_preserve_version_counter(buffers):
            yield


def _copy(into: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
    for mine, theirs in zip(into, source, strict=True):
        mine.copy_(theirs)
