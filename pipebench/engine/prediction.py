"""Weights that are no version: predicted some updates ahead, or taken back by some, for one pass at a time.

Papers: SpecTrain (Chen et al. 2018) predicts with momentum SGD's smoothed gradient, XPipe (Guan et al. 2019) with
Adam's: w(t + s) = w(t) - s lr d, where d is what the optimizer's averages, as they are, would make of the next step.
PipeMare (Yang et al., MLSys'21) takes a backward's weights back along the mean change of the last updates:
w(t) - tau delta, delta(t + 1) = gamma delta(t) + (1 - gamma) (w(t + 1) - w(t)).

Nothing is stashed: all minibatches in flight share one set of buffers, their graphs refer to it, and every pass has it
filled with what the schedule says before it begins.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from pipebench.engine.weights import Version, Weights

Group = Mapping[str, Any]  # of an optimizer's parameters: its settings


class Displacement(NamedTuple):
    """How far from a version the weights of a pass are.

    Attributes:
        ahead: updates; negative where they are taken back.
        lr: learning rate of the first of them.
    """

    ahead: int
    lr: float


AS_IT_IS = Displacement(0, 0.0)


def _momentum(state: Mapping[str, Any], group: Group) -> torch.Tensor | None:
    buffer: torch.Tensor | None = state.get("momentum_buffer")
    return buffer


def _adam(state: Mapping[str, Any], group: Group) -> torch.Tensor:
    """Return m_hat / (sqrt(v_hat) + eps); the decay that AdamW takes off the weights isn't part of it."""
    (b1, b2), steps = group["betas"], state["step"].double()  # it counts in float32, too coarse for 1 - b2^steps
    mean = state["exp_avg"] / (1 - b1**steps)
    squares = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    direction: torch.Tensor = mean.div_((squares / (1 - b2**steps)).sqrt_().add_(group["eps"]))
    return direction


# By torch.optim class, to what its state says of the next step; `recipe.rules_training` names those with a name.
DIRECTIONS: Final[dict[type, Callable[[Mapping[str, Any], Group], torch.Tensor | None]]] = {
    torch.optim.SGD: _momentum,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
}


class MovedWeights:
    """The weights that all passes of a stage replica compute with.

    Args:
        weights: the versions that they are moved from, of which the newest is all there is.
        gamma: share of the mean change that an update leaves as it is; None keeps no mean change.
    """

    def __init__(self, weights: Weights, gamma: float | None) -> None:
        self._weights = weights
        self._working = weights.new_version()
        self._gamma = gamma
        self._mean_change = None if gamma is None else weights.new_version()
        self._content: tuple[int, Displacement] | None = None  # the version in `_working`, moved how
        self._forward: tuple[int, Displacement] | None = None  # likewise, of the last forward
        self._held: list[torch.Tensor] | None = None  # what that forward had, once an update has been made

    @property
    def num_bytes(self) -> int:
        """Bytes of what is kept here."""
        copies = 1 + (self._mean_change is not None) + (self._held is not None)
        return copies * self._weights.version_bytes

    @property
    def mean_change(self) -> dict[str, torch.Tensor]:
        """What parameters change by per update, by name, if that is kept: references, not copies."""
        if self._mean_change is None:
            return {}
        return {n: t.detach() for n, t in zip(self._weights.names, self._mean_change.parameters, strict=True)}

    def restore(self, mean_change: Mapping[str, torch.Tensor]) -> None:
        """Take over the mean change, by name; nothing may be in flight. What has none hasn't changed."""
        self._content = self._forward = self._held = None
        with torch.no_grad():
            for name, mine in self.mean_change.items():
                mine.copy_(mean_change[name]) if name in mean_change else mine.zero_()

    def for_forward(self, number: int, move: Displacement) -> Version:
        """Return the weights of a forward: of the newest version moved, or the same as the last forward's."""
        asked = number, move
        if asked != self._forward:
            self._forward, self._held = asked, None
        if self._held is None:
            self._fill(number, move)
        else:
            with self._unnoticed():
                _copy(self._working.flats, self._held)
            self._content = asked
        return self._working

    def for_backward(self, move: Displacement) -> None:
        """Let graphs in flight refer to the newest version, moved."""
        self._fill(self._weights.newest.number, move)

    def update(self, gradients: Sequence[torch.Tensor | None], lr: float, *, keep_from: int) -> None:
        """Make the next version in place of the newest.

        Args:
            gradients: see `Weights.update`.
            lr: learning rate.
            keep_from: the oldest version that a forward may still ask for.
        """
        newest = self._weights.newest
        if keep_from <= newest.number and self._forward is not None and self._held is None:
            self._fill(*self._forward)
            self._held = [flat.clone() for flat in self._working.flats]
        self._content = None
        if self._mean_change is not None:
            with self._unnoticed():
                _copy(self._working.flats, newest.flats)
        self._weights.update(gradients, lr, keep_from=newest.number + 1)
        if self._mean_change is not None and self._gamma is not None:
            with self._unnoticed():
                for mean, old, new in zip(self._mean_change.flats, self._working.flats, newest.flats, strict=True):
                    mean.lerp_(old.neg_().add_(new), 1 - self._gamma)

    def _fill(self, number: int, move: Displacement) -> None:
        """Compute weights from the newest version, unless they are there already."""
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
        """Write into buffers that graphs in flight refer to: they are meant to go on with what is there then."""
        buffers = (*self._working.flats, *self._working.parameters)
        with torch.no_grad(), _unsafe_preserve_version_counter(buffers):
            yield


def _copy(into: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
    for mine, theirs in zip(into, source, strict=True):
        mine.copy_(theirs)
