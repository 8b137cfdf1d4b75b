"""The state that an optimizer keeps for a parameter, found by a few steps on a parameter of the same shape.

So no list of optimizers is needed. The steps show the state's keys and their shapes and types: the parameter's
(momentum), scalars (step), rows and columns (Adafactor) or plain numbers.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from pipebench.checkpoint.state import CheckpointError
from pipebench.checkpoint.tensors import Form, check_form, check_plain, has_nan, kind_of
from pipebench.model.optimizer import MakeOptimizer, is_known

_STEPS = 3  # some keys exist, or aren't None, from the second step on only
_COUNTER = "step"  # the key of the number of steps in every optimizer of torch.optim
_LARGEST = 2**53  # up to it, a float holds all whole numbers

_States = list[dict[str, Any]]  # after each step, by key: the form of a tensor, or the value itself


def updates_of(states: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the number of steps on every parameter with optimizer state, None where the state doesn't count them."""
    return {name: _count(state.get(_COUNTER)) for name, state in states.items()}


def check_updates(expected: Mapping[str, float | None], states: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare a part's optimizer states with `expected`, what `updates_of` returned when it was written.

    Raises:
        CheckpointError: names the parameter, what was found and what is expected.
    """
    for name in sorted(expected.keys() ^ states.keys()):
        found = "one, expected is none" if name in states else "none, expected is the one that was written"
        raise CheckpointError(f"the optimizer's state of {name}: found {found}")
    for name, count in updates_of(states).items():
        if count != expected[name]:
            raise CheckpointError(
                f"the optimizer's {_COUNTER} of {name}: found {_number(count)}, expected is {_number(expected[name])}"
            )


def _count(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 and not value.is_complex() else None
    return float(value) if isinstance(value, int | float) and abs(value) <= _LARGEST else None


def _number(count: float | None) -> str:
    return "no number" if count is None else f"{count:.15g}"


class FreshStates:
    """The states that the recipe's optimizer makes for new parameters, cached by shape and type."""

    def __init__(self, make_optimizer: MakeOptimizer) -> None:
        self._make_optimizer = make_optimizer
        self._known: dict[Form, tuple[_States, bool]] = {}

    def check(self, name: str, found: Mapping[str, Any], parameter: Form, *, may_be_nan: bool = False) -> bool:
        """Compare a parameter's state with a fresh one; `may_be_nan` if the parameter itself began with NaN elements.

        Returns:
            Whether to load it. An optimizer that keeps no state (SGD whose momentum is 0 now) has no use for it.

        Raises:
            CheckpointError: names the parameter and the key, what was found and what is expected.
        """
        states, all_is_known = self._fresh(parameter)
        if all_is_known and not states[-1]:
            return False  # a user's own optimizer may have a state after more steps only
        for key in states[0].keys() - found.keys():
            raise CheckpointError(f"the optimizer's {key} of {name}: found nothing, expected is {_said(states, key)}")
        for key, value in found.items():
            where = f"the optimizer's {key} of {name}"
            if any(key in each for each in states):
                _check_known(where, value, [each[key] for each in states if key in each], may_grow=not all_is_known)
            elif all_is_known:  # torch's and pipebench's optimizers have all keys by now
                raise CheckpointError(f"{where}: found {kind_of(value)}, expected is {', '.join(states[0])} only")
            _check_numbers(where, key, value, may_be_nan=may_be_nan)
        return True

    def _fresh(self, parameter: Form) -> tuple[_States, bool]:
        if parameter not in self._known:
            tensor = torch.zeros(parameter.shape, dtype=parameter.dtype).requires_grad_()
            optimizer = self._make_optimizer([tensor])
            states: _States = []
            for _ in range(_STEPS):
                tensor.grad = torch.ones_like(tensor)
                optimizer.step()
                state = optimizer.state.get(tensor, {})
                states.append({k: Form.of(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()})
            self._known[parameter] = states, is_known(optimizer)
        return self._known[parameter]


def _said(states: _States, key: str) -> str:
    return str(states[0][key]) if isinstance(states[0][key], Form) else kind_of(states[0][key])


def _check_known(where: str, found: Any, forms: list[Any], *, may_grow: bool) -> None:
    """Compare a value with those of fresh states, one per step; a user's own may change its shape with the steps."""
    expected = forms[-1]
    if may_grow and isinstance(found, torch.Tensor) and len({form for form in forms if isinstance(form, Form)}) > 1:
        return
    if isinstance(found, torch.Tensor):
        expected = next((form for form in reversed(forms) if isinstance(form, Form)), expected)
        check_plain(where, found)
    if isinstance(expected, Form) and not any(found is form for form in forms):  # both may be None: no state yet
        check_form(where, found, expected)
    elif not any(type(found) is type(form) for form in forms) and not isinstance(expected, Form):
        raise CheckpointError(f"{where}: found {kind_of(found)}, expected is {kind_of(expected)}")


def _check_numbers(where: str, key: str, value: Any, *, may_be_nan: bool) -> None:
    """Refuse impossible numbers, also in nested lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        check_plain(where, value)
        if has_nan(value) and not may_be_nan:
            raise CheckpointError(f"{where}: found an element that isn't a number (NaN), expected are numbers")
        if key != _COUNTER or value.numel() != 1 or value.is_complex():
            return
        value = value.item()
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            _check_numbers(where, "", each, may_be_nan=may_be_nan)
        return
    if isinstance(value, int | float) and not _is_allowed(key, value):
        text = "a huge number" if abs(value) > _LARGEST else f"{value:g}"
        allowed = f"a number from {0 if key == _COUNTER else -_LARGEST:g} to {_LARGEST:g}"
        raise CheckpointError(f"{where}: found {text}, expected is {allowed}")


def _is_allowed(key: str, value: float) -> bool:
    if key == _COUNTER:
        return 0 <= value <= _LARGEST
    return abs(value) <= _LARGEST if isinstance(value, int) else not math.isnan(value)
