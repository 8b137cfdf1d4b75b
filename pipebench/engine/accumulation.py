"""Sums of parameter gradients over the backwards of a round; each sum is passed on as soon as it is complete."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from weakref import WeakSet

import torch

from pipebench.engine.version import Version

OnGradient = Callable[[int, torch.Tensor], None]  # position of a parameter in the stage's order, its gradient


class Accumulation:
    """Adds the gradients of a stage's units; `num_parameters` are the stage's.

    Autograd adds, since it does so in place and without a copy of the first gradient: while a backward runs, a
    parameter's sum is its `grad`. Between backwards parameters have no `grad`, as every weight version has its own
    parameters.
    """

    def __init__(self, num_parameters: int) -> None:
        # Sums in the order of the stage's parameters; None without a gradient
        self.gradients: list[torch.Tensor | None] = [None] * num_parameters
        self._num_parameters = num_parameters
        self._passed_on_bytes = 0  # of the round's sums passed on, until the sums over the replicas are there
        # Of tied weights, whose sums are not passed on: they are summed over all stages' copies
        self.tied_positions: frozenset[int] = frozenset()
        self._hooked: WeakSet[Version] = WeakSet()  # versions whose parameters have hooks
        self._on_gradient: OnGradient | None = None  # of the backward that runs; None: gradients stay in `grad`

    @property
    def num_bytes(self) -> int:
        """Bytes of the sums, including those that were passed on to be summed over the replicas."""
        return self._passed_on_bytes + sum(g.nbytes for g in self.gradients if g is not None)

    def take_sums(self, gradients: list[torch.Tensor | None]) -> None:
        """Replace this replica's sums by the sums over all replicas."""
        self.gradients, self._passed_on_bytes = gradients, 0

    def clear(self) -> None:
        """Drop the sums."""
        self.gradients = [None] * self._num_parameters

    @contextmanager
    def add(self, version: Version, on_gradient: OnGradient | None) -> Iterator[None]:
        """Add the gradients of a backward inside to the sums of `version`'s parameters.

        `on_gradient` gets every sum as soon as it is complete, except those of tied weights; it takes the sum in place
        of `gradients`.
        """
        parameters = version.parameters
        for parameter, total in zip(parameters, self.gradients, strict=True):
            parameter.grad = total
        self.clear()
        if on_gradient is not None and version not in self._hooked:
            self._hook(version)
        self._on_gradient = on_gradient
        yield
        self._on_gradient = None
        self.gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None

    def _hook(self, version: Version) -> None:
        """Add hooks to a version's parameters. They stay: adding them takes as long as calling them."""
        self._hooked.add(version)
        for index, parameter in enumerate(version.parameters):
            if index not in self.tied_positions:
                parameter.register_post_accumulate_grad_hook(partial(self._completed, index))  # type: ignore[no-untyped-call]

    def _completed(self, index: int, parameter: torch.Tensor) -> None:
        if self._on_gradient is not None:
            gradient = parameter.grad
            assert gradient is not None
            parameter.grad = None
            self._passed_on_bytes += gradient.nbytes
            self._on_gradient(index, gradient)
