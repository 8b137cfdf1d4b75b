"""Checks that a user's own loss or metric depends on its samples only, made by calling it again.

Minibatches reach it in several processes, in parts, and again after a resume. If it counted calls or drew random
numbers, its values would depend on that. If it had parameters of its own, no optimizer would update them.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipebench.errors import UserCodeError

# Returns the sum over the samples of an output and its targets
Summed = Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor]
_CLOSE = 1e-4  # relative: other orders of addition
_EPSILONS = 4  # relative, in units of a type's rounding error: a mean and a sum of several in bf16
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


def refuse_changed_targets(
    what: str, measure: Summed, output: Any, targets: Mapping[str, torch.Tensor], key: str
) -> None:
    """Refuse a measure that changes targets in place, and changes them again when it is called again.

    What leaves them as they are from then on, such as `target[target == 255] = -100`, is allowed. The checks below, and
    those of the model's layers, call a measure with the same targets several times.
    """
    count = range(num_samples(targets))
    given = once = some(dict(targets), count)
    with torch.no_grad(), suppress(Exception):  # its own errors are reported where it is called next
        measure(output, given)
        once = some(given, count)
        measure(output, given)
    if not all(torch.allclose(once[name], given[name], rtol=0, atol=0, equal_nan=True) for name in given):
        raise UserCodeError(
            f"{what} changes its target in place, and changes it again when it is called again: give it a copy to "
            "change (target.clone())",
            key,
        )


def refuse_sums(
    what: str, measure: Summed, output: Any, targets: Mapping[str, torch.Tensor], total: torch.Tensor, key: str
) -> None:
    """Refuse a sum over samples where a mean is required; it would be multiplied by the number of samples again."""
    count = num_samples(targets)
    try:
        with torch.no_grad():
            each = (range(i, i + 1) for i in range(count))
            singles = sum(float(measure(some(output, one), some(dict(targets), one))) for one in each)
    except Exception:  # not every loss accepts a single sample
        return
    whole = float(total.detach())
    if count > 1 and whole and math.isclose(whole, count * singles, rel_tol=1e-4):
        raise UserCodeError(
            f"{what} of {count} samples is the sum of each one's, needed is their mean, or a tensor of one number per "
            "sample",
            key,
        )


def refuse_what_changes(what: str, measure: Summed, output: Any, targets: Mapping[str, torch.Tensor], key: str) -> None:
    """Refuse a measure that gives another number for the same samples after it has been called with others."""
    count = num_samples(targets)
    # Half of them in between: a running mean of all would be the same after both halves.
    parts = (range(count), range(count // 2), range(count))
    first, _, again = (_measured(measure, output, targets, part) for part in parts)
    if not math.isnan(first) and not math.isclose(first, again, rel_tol=_CLOSE, abs_tol=1e-6):
        raise UserCodeError(
            f"{what} of the same samples is first {first:g} and then {again:g} in sum: it draws random numbers or "
            "keeps something from call to call, which others would keep in other processes and where a run goes on; in "
            "a model, draws are seeded and buffers kept (dataset.loss: model)",
            key,
        )


def is_mean(
    measure: Summed,
    output: Any,
    targets: Mapping[str, torch.Tensor],
    factor: int = 1,
    parameters: Iterable[torch.Tensor] = (),
) -> bool:
    """Return whether a measure of a minibatch is the mean of its parts', cut in several ways.

    Parts of one cut may agree by chance, such as halves with as many labels of a mean over labels. Cuts with a part
    that can't be measured are left out; not every measure accepts a single sample.

    Of outputs or weights made larger by a factor, or in bf16, rounding may be larger, too, as in recurrent nets. As
    much as it makes of a difference between a part and the part twice over, in which all means are the same, is
    tolerated then.

    Args:
        measure: of samples, their sum.
        output: what it is measured of.
        targets: of the same samples.
        factor: by which outputs or weights are larger.
        parameters: of the model, if it computes the measure.
    """
    count = num_samples(targets)
    whole, cuts = _measured(measure, output, targets, range(count)), _cuts(output, count)
    found = {part: _measured(measure, output, targets, part) for cut in cuts for part in cut}
    close = max(_CLOSE, _EPSILONS * _epsilon([*pytree.tree_leaves(output), *parameters]))
    off = 0.0
    for cut in cuts:
        parts = [found[part] for part in cut]
        differs, largest = abs(whole - sum(parts)), max(map(abs, (whole, *parts)))
        if math.isfinite(differs) and differs > max(close * largest, 1e-6 * factor):
            off = max(off, differs)
    may_round = factor > 1 or close > _CLOSE
    return off == 0 or (may_round and off <= _ROUNDINGS * _rounding(measure, output, targets, found))


def _epsilon(values: Iterable[Any]) -> float:
    """Return the largest relative rounding error of the types of some tensors; 0 if none is of floats."""
    types = {value.dtype for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()}
    return max((torch.finfo(each).eps for each in types), default=0.0)


def _cuts(output: Any, count: int) -> list[tuple[range, range]]:
    """Return ways to cut a minibatch into two parts; only halves of outputs with other rows than those of samples."""
    if count < 2:
        return []
    cuts = [(range(count // 2), range(count // 2, count))]
    if all(t.shape[0] == count for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.dim()):
        cuts += [(range(1), range(1, count)), (range(0, count, 2), range(1, count, 2))]
    return cuts


def _rounding(measure: Summed, output: Any, targets: Mapping[str, torch.Tensor], found: Mapping[range, float]) -> float:
    """Return by how much a measure of parts of some samples, twice over, differs at most from twice that of the part.

    Args:
        measure: what is computed.
        output: of all samples.
        targets: of all samples.
        found: the measure by part; NaN where it can't be measured.
    """
    most = 0.0
    with torch.no_grad():
        for part, value in found.items():
            if not math.isfinite(value):
                continue
            try:
                twice = float(measure(_twice(some(output, part)), _twice(some(dict(targets), part))))
            except Exception:  # not every measure accepts any number of samples
                return math.inf
            most = max(most, abs(twice - 2 * value))
    return most


def _twice(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: torch.cat([t, t]) if t.dim() else t, value)


def _measured(measure: Summed, output: Any, targets: Mapping[str, torch.Tensor], part: range) -> float:
    """Return a measure's sum of some of the samples; NaN where they can't be measured, such as outputs without rows."""
    with torch.no_grad():
        try:
            return float(measure(some(output, part), some(dict(targets), part)))
        except Exception:  # not every measure accepts fewer samples
            return math.nan


def spread(count: int, total: int) -> list[int]:
    """Return `count` of `total` samples, or all, evenly spread: of sorted samples the first ones are of one class.

    >>> spread(3, 10), spread(3, 2)
    ([0, 3, 6], [0, 1])
    """
    count = min(count, total)
    return [index * total // count for index in range(count)]


def num_samples(targets: Mapping[str, torch.Tensor]) -> int:
    """Return the number of samples of some targets."""
    return next(iter(targets.values())).shape[0]


def some(value: Any, part: range) -> Any:
    """Return samples of an output or of targets; a number that a model returns, such as its loss, stays whole."""
    rows = slice(part.start, part.stop, part.step)
    return pytree.tree_map_only(torch.Tensor, lambda t: (t[rows] if t.dim() else t).detach().clone(), value)
