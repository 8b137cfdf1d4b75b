"""LARS and LAMB against their papers' algorithms; steps depend on neither cuts nor other types beside them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pipebench.model.large_batch import LAMB, LARS
from tests.oracles import large_batch

SHAPES = [(4, 3), (4,), (2, 3, 2, 2), (), (3, 2), (5,)]
CASES: dict[str, tuple[Callable[..., torch.optim.Optimizer], large_batch.Rule]] = {
    "lars": (LARS, large_batch.lars()),
    "lars, its algorithm": (
        lambda p, lr: LARS(p, lr, weight_decay=0.1, eta=0.02, exclude_vectors=False),
        large_batch.lars(decay=0.1, eta=0.02, exclude_vectors=False),
    ),
    "lars, vectors excluded from decay": (
        lambda p, lr: LARS(p, lr, momentum=0.5, weight_decay=0.1),
        large_batch.lars(0.5, 0.1),
    ),
    "lars, no momentum": (lambda p, lr: LARS(p, lr, momentum=0.0), large_batch.lars(0.0)),
    "lamb": (LAMB, large_batch.lamb()),
    "lamb, its algorithm": (
        lambda p, lr: LAMB(p, lr, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2, exclude_vectors=False),
        large_batch.lamb(0.8, 0.9, 1e-3, 0.2, exclude_vectors=False),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_step_equals_the_algorithm_s(name: str) -> None:
    """Of weights that are zero and gradients that are zero, too: they take the plain rate."""
    make, rule = CASES[name]
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in SHAPES]
    parameters[4].data.zero_()
    optimizer = make(parameters, 0.3)
    weights = [p.detach().numpy().copy() for p in parameters]
    states: list[dict[str, Any]] = [{} for _ in SHAPES]
    for t in range(1, 6):
        rate = 0.3 / t
        gradients = [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]
        if t == 2:
            gradients[0].zero_()
        for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            parameter.grad = gradient
            weights[index], states[index] = rule(weights[index], gradient.numpy(), states[index], rate, t)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        assert all(
            np.allclose(p.detach().numpy(), w, rtol=1e-12, atol=1e-13) for p, w in zip(parameters, weights, strict=True)
        )


@pytest.mark.parametrize("make", [LARS, LAMB])
def test_a_parameter_s_step_depends_on_no_other(make: Callable[..., torch.optim.Optimizer]) -> None:
    """Bit by bit, whatever types stand beside it: so a cut changes nothing."""
    generator = torch.Generator().manual_seed(0)
    types = (torch.float32, torch.float64, torch.bfloat16, torch.float32)
    start = [torch.randn(7, 9, generator=generator).to(kind) for kind in types]
    gradients = [torch.randn(7, 9, generator=generator).to(kind) for kind in types]

    def stepped(indices: list[int]) -> list[torch.Tensor]:
        parameters = [start[i].clone().requires_grad_() for i in indices]
        optimizer = make(parameters, 0.1)
        for _ in range(3):
            for i, parameter in zip(indices, parameters, strict=True):
                parameter.grad = gradients[i].clone()
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    together = stepped([0, 1, 2, 3])
    assert all(torch.equal(together[i], stepped([i])[0]) for i in range(4))
    assert all(not torch.equal(together[i], start[i]) for i in range(4))


@pytest.mark.parametrize("make", [LARS, LAMB])
def test_parameters_without_a_gradient_stay(make: Callable[..., torch.optim.Optimizer]) -> None:
    parameters = [torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)]
    parameters[0].grad = torch.ones(2, 2)
    optimizer = make(parameters, 0.1)
    optimizer.step()
    assert not torch.equal(parameters[0], torch.ones(2, 2))
    assert torch.equal(parameters[1], torch.ones(2, 2))
    assert parameters[1] not in optimizer.state


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_norms_of_half_precision_do_not_overflow(half: torch.dtype) -> None:
    """1,000 elements of 300 have a norm beyond the largest float16's square root, and squares beyond float16."""
    parameter = torch.full((1000, 2), 300.0, dtype=half, requires_grad=True)
    parameter.grad = torch.full_like(parameter, 200.0)
    LARS([parameter], 1.0, momentum=0.0, eta=0.5).step()
    assert torch.allclose(parameter.detach().float(), torch.tensor(150.0), rtol=1e-2)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (LARS, {"momentum": 1.0}, "momentum is 1.0, allowed are numbers from 0 to below 1"),
        (LARS, {"weight_decay": -1}, "weight_decay is -1, allowed are numbers of at least 0"),
        (LARS, {"eta": 0}, "eta is 0, allowed are numbers above 0"),
        (LAMB, {"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\), allowed are numbers from 0 to below 1"),
        (LAMB, {"eps": 0.0}, "eps is 0.0, allowed are numbers above 0"),
        (LAMB, {"weight_decay": -1}, "weight_decay is -1"),
    ],
)
def test_ranges(make: Callable[..., torch.optim.Optimizer], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make([torch.ones(1, requires_grad=True)], 0.1, **arguments)
