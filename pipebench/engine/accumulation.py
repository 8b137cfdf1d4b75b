"""Gradients of a stage's parameters while backwards compute them: added up, and told of as soon as they are whole."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from weakref import WeakKeyDictionary

import torch

from pipebench.engine.weights import Version

OnGradient = Callable[[int, torch.Tensor], None]  # position of a parameter in the stage's order, its gradient


class Accumulation:
    """Adds the gradients of a stage's units.

    Autograd's own accumulation adds in place and takes over a gradient that nobody else holds; parameters have a `grad`
    only while a backward runs.

    Args:
        num_parameters: of the stage.

    Attributes:
        gradients: the sums so far, in the order of the parameters; None of those that have none.
    """

    def __init__(self, num_parameters: int) -> None:
        self.gradients: list[torch.Tensor | None] = [None] * num_parameters
        self._tellers: WeakKeyDictionary[Version, _Teller] = WeakKeyDictionary()

    @property
    def num_bytes(self) -> int:
        """Bytes of the sums."""
        return sum(g.nbytes for g in self.gradients if g is not None)

    def clear(self) -> None:
        """Forget the sums."""
        self.gradients = [None] * len(self.gradients)

    @contextmanager
    def add(self, version: Version, on_gradient: OnGradient | None) -> Iterator[None]:
        """Add the gradients that a backward computes meanwhile to the sums, or tell of them.

        Args:
            version: whose parameters it computes them for.
            on_gradient: takes every sum in place of `gradients`, as soon as nothing more is added to it.
        """
        parameters = version.parameters
        for parameter, total in zip(parameters, self.gradients, strict=True):
            parameter.grad = total
        self.clear()
        teller = self._tellers.get(version)
        if teller is None and on_gradient is not None:
            teller = self._tellers[version] = _Teller(version)
        if teller is not None:
            teller.on_gradient = on_gradient
        yield
        if teller is not None:
            teller.on_gradient = None
        self.gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None


class _Teller:
    """Hooks on a version's parameters, which stay: to make them anew at every backward takes as long as to call them.

    Attributes:
        on_gradient: what is told; None for nobody.
    """

    def __init__(self, version: Version) -> None:
        self.on_gradient: OnGradient | None = None
        for index, parameter in enumerate(version.parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._tell, index))  # type: ignore[no-untyped-call]

    def _tell(self, index: int, parameter: torch.Tensor) -> None:
        if self.on_gradient is not None:
            gradient = parameter.grad
            assert gradient is not None
            parameter.grad = None
            self.on_gradient(index, gradient)
