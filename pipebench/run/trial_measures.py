"""Checks that a user's own loss or metric depends on its samples only, made by calling it again.

Minibatches reach it in several processes, in parts, and again after a resume. If it counted calls or drew random
numbers, its values would depend on that. If it had parameters of its own, no optimizer would update them.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipebench.errors import UserCodeError

# Returns the sum over the samples of an output and its targets
Summed = Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor]
_CLOSE = 1e-4  # relative: other orders of addition
_ROUNDINGS = 30


def refuse_untrained(total: torch.Tensor, model: nn.Module, key: str) -> None:
    """Refuse a loss with parameters that aren't the model's, because no optimizer gets them."""
    own = {id(parameter) for parameter in model.parameters()}
    seen, waiting = set[Any](), [total.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of a leaf
        if isinstance(leaf, nn.Parameter) and id(leaf) not in own:
            raise UserCodeError(
                f"the loss has a parameter {list(leaf.shape)} that isn't the model's, so nothing would train it: have "
                "it in the model, whose forward returns the loss (dataset.loss: model)",
                key,
            )
        waiting += [before for before, _ in node.next_functions]


def refuse_what_changes(what: str, measure: Summed, output: Any, targets: Mapping[str, torch.Tensor], key: str) -> None:
    """Refuse a measure that gives another number for the same samples after it has been called with others."""
    first, _, again = _measured(measure, output, targets)
    if not math.isnan(first) and not math.isclose(first, again, rel_tol=_CLOSE, abs_tol=1e-6):
        raise UserCodeError(
            f"{what} of the same samples is first {first:g} and then {again:g} in sum: it draws random numbers or "
            "keeps something from call to call, which others would keep in other processes and where a run goes on; in "
            "a model, draws are seeded and buffers kept (dataset.loss: model)",
            key,
        )


def is_mean(measure: Summed, output: Any, targets: Mapping[str, torch.Tensor], factor: int = 1) -> bool:
    """Return whether a measure of a minibatch is the mean of its halves'; True where these can't be measured.

    Of outputs or weights made larger by a factor, rounding may be larger, too, as in recurrent nets. As much as it
    makes of a difference between a half and the half twice over, in which all means are the same, is tolerated then.
    """
    whole, parts, _ = _measured(measure, output, targets)
    off = abs(whole - sum(parts))
    if not all(map(math.isfinite, parts)) or off <= max(_CLOSE * abs(whole), 1e-6 * factor):
        return True
    return factor > 1 and off <= _ROUNDINGS * _rounding(measure, output, targets, parts)


def _rounding(measure: Summed, output: Any, targets: Mapping[str, torch.Tensor], parts: tuple[float, float]) -> float:
    """Return by how much a measure of each half of some samples, twice over, differs from twice that of the half."""
    count = next(iter(targets.values())).shape[0]
    found = []
    with torch.no_grad():
        for part, (start, stop) in zip(parts, ((0, count // 2), (count // 2, count)), strict=True):
            both = (_twice(some(output, start, stop)), _twice(some(dict(targets), start, stop)))
            try:
                found.append(abs(float(measure(*both)) - 2 * part))
            except Exception:  # not every measure accepts any number of samples
                return math.inf
    return max(found)


def _twice(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: torch.cat([t, t]) if t.dim() else t, value)


def _measured(
    measure: Summed, output: Any, targets: Mapping[str, torch.Tensor]
) -> tuple[float, tuple[float, float], float]:
    """Return a measure's sum of all samples, of the first and the other half, and of all again.

    Where a part can't be measured, the parts are NaN.
    """
    count = next(iter(targets.values())).shape[0]

    def of(start: int, stop: int) -> float:
        return float(measure(some(output, start, stop), some(dict(targets), start, stop)))

    with torch.no_grad():
        try:
            first = of(0, count)
        except Exception:  # outputs without samples
            return math.nan, (math.nan, math.nan), math.nan
        parts = (math.nan, math.nan)
        try:
            half = of(0, count // 2)
            again = of(0, count)  # a running mean of all would be the same after both halves
            parts = half, of(count // 2, count)
        except Exception:  # not every measure accepts fewer samples
            again = of(0, count)
        return first, parts, again


def some(value: Any, start: int, stop: int) -> Any:
    """Return samples of an output or of targets; a number that a model returns, such as its loss, stays whole."""
    return pytree.tree_map_only(torch.Tensor, lambda t: (t[start:stop] if t.dim() else t).detach().clone(), value)
