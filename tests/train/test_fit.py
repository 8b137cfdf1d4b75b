"""Checkpoints are checked against the model: any optimizer of torch, any module that carries state."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipebench.checkpoint.optimizers import FreshStates
from pipebench.checkpoint.state import CheckpointError, ModelState
from pipebench.checkpoint.tensors import Form
from pipebench.engine.setup import Setup
from pipebench.train.fit import check_fits
from tests.checkpoint.support import captured
from tests.checkpoint.test_round_trips import BEFORE, MLP_PLANS
from tests.engine.test_streams import text_setup
from tests.models import ConvNet
from tests.support import Blobs, Mlp, make_engine, make_setup

# Those that step on any dense parameter without further arguments.
_OTHERS = {"LBFGS", "SparseAdam", "Muon", "Optimizer"}
OPTIMIZERS = sorted(
    name
    for name, found in vars(torch.optim).items()
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and name not in _OTHERS
)


def trained(setup: Setup, count: int = BEFORE) -> ModelState:
    engine = make_engine(setup)
    engine.train(0, count)
    return captured(engine)


def test_most_optimizers_of_torch_are_tried() -> None:
    assert {"SGD", "Adam", "AdamW", "Adafactor", "ASGD", "Rprop"} <= set(OPTIMIZERS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_the_state_of_the_same_optimizer_fits(name: str) -> None:
    setup = make_setup(Mlp(), ([2, 4], [1, 2, 1]), make_optimizer=lambda p: getattr(torch.optim, name)(p))
    state = trained(setup)
    taken = check_fits(state, setup, BEFORE)
    assert taken.optimizer.keys() == state.optimizer.keys()
    for parameter, kept in [*state.optimizer.items()][::3]:
        for key, value in kept.items():
            for other in (torch.zeros(3, 3, 3), value.to_sparse() if value.dim() else torch.zeros(2), [value], None):
                spoilt = copy.deepcopy(state)
                spoilt.optimizer[parameter][key] = other
                with pytest.raises(CheckpointError, match=rf"the optimizer's {key} of {parameter}: found "):
                    check_fits(spoilt, setup, BEFORE)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", MLP_PLANS)
def test_a_checkpoint_of_any_plan_fits_any_other(plan: str) -> None:
    cut, columns = MLP_PLANS[plan]
    make: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.Adam(p, amsgrad=True, fused=True)  # noqa: E731
    state = trained(make_setup(Mlp(), cut, make_optimizer=make, **columns))
    check_fits(state, make_setup(Mlp(), ([3], [1, 1]), make_optimizer=make), BEFORE)


def test_an_optimizer_without_state_ignores_that_of_a_checkpoint() -> None:
    """For example with `train.optimizer.momentum=0`; in the other direction there is no state to restore."""
    momentum = make_setup(Mlp(), ([3], [1, 1]), make_optimizer=lambda p: torch.optim.SGD(p, 0.1, 0.9))
    plain = make_setup(Mlp(), ([3], [1, 1]))
    assert check_fits(trained(momentum), plain, BEFORE).optimizer == {}
    assert check_fits(trained(plain), momentum, BEFORE).optimizer == {}


class Late(torch.optim.SGD):
    """Has state only from its sixth step on, as averaging optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                if state["count"] > 5:
                    state["slow"] = parameter.detach().clone()


def test_state_that_a_user_s_optimizer_has_later_is_restored() -> None:
    setup = make_setup(Mlp(), ([], [1]), make_optimizer=lambda p: Late(p, 0.1))
    state = trained(setup)
    assert "slow" in check_fits(state, setup, BEFORE).optimizer["body.0.weight"]
    state.optimizer["body.0.weight"]["slow"] = torch.zeros(1).expand(9)
    with pytest.raises(CheckpointError, match=r"slow of body\.0\.weight: found a tensor of strides \[0\]"):
        check_fits(state, setup, BEFORE)


def test_uninitialised_values_may_be_nan() -> None:
    """Rows that are never looked up may be whatever memory held."""
    states = FreshStates(lambda p: torch.optim.SGD(p, 0.1, 0.9))
    nan = {"momentum_buffer": torch.full((2,), float("nan"))}
    assert states.check("rows", nan, Form((2,), torch.float32), may_be_nan=True)
    with pytest.raises(CheckpointError, match="NaN"):
        states.check("rows", nan, Form((2,), torch.float32))


@pytest.mark.parametrize("microbatches", [1, 3, 4])
def test_carried_states_fit_any_number_of_microbatches(microbatches: int) -> None:
    setup = text_setup(([2], [1, 1]), weights="one", order="all-forwards", microbatches=microbatches)
    state = trained(setup, 6)
    check_fits(state, text_setup(([1], [1, 1])), 6)
    pair = (torch.zeros(1, 1, 6).double(), torch.zeros(1, 1, 6).double())
    spoilt: list[tuple[Any, str]] = [
        (lambda c: c.pop("0/0/one"), r"state '0/0/one': is carried .* not in the checkpoint"),
        (lambda c: c.update({"7/0/one": pair}), r"state '7/0/one': is in the checkpoint, but no module"),
        (lambda c: c.update({"0/0/table": pair}), r"state '0/0/table'"),
        (lambda c: c.update({"one": pair}), r"state 'one'"),
        (lambda c: c.update({"0/0/one": pair[0]}), r"what module one carries \(0/0/one\): found float64"),
        (lambda c: c.update({"0/0/one": (pair[0], torch.zeros(1, 1, 5).double())}), r"tensor [01]: found float64"),
        (lambda c: c.update({"0/0/one": tuple(t.float() for t in c["0/0/one"])}), r"tensor 0: found float32"),
        (lambda c: c.update({"0/0/one": tuple(t.to_sparse() for t in c["0/0/one"])}), r"layout sparse_coo"),
        (lambda c: c.update({"0/0/one": None}), r"found None"),
        (lambda c: c.update({"0/0/one": (1, 2)}), r"tensor 0: found an int"),
    ]
    for change, message in spoilt:
        other = copy.deepcopy(state)
        change(other.carried)
        with pytest.raises(CheckpointError, match=message):
            check_fits(other, setup, 6)


@pytest.mark.parametrize("loaded", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("taken", ["fp32", "bf16"])
def test_carried_states_fit_any_precision(taken: str, loaded: str) -> None:
    """0.2.0 took the model's own types for those of a run: no 16-bit run of such a model could go on."""

    def setup(precision: str) -> Setup:
        made: Setup = text_setup(([2], [1, 1]), dtype=torch.float32, precision=precision)
        return made

    whole = make_engine(setup(loaded))
    whole.train(0, 6)
    state = check_fits(trained(setup(taken), 6), setup(loaded), 6)
    types = {key: [each.dtype for each in pair] for key, pair in captured(whole).carried.items()}
    assert {key: [each.dtype for each in pair] for key, pair in state.carried.items()} == types
    again = make_engine(setup(loaded))
    again.restore(state, None, 0.0)
    for engine in (whole, again):
        engine.train(6, 2)
    if taken == loaded:
        ours, theirs = captured(again).parameters, captured(whole).parameters
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_buffer_that_no_layer_reads_may_be_missing() -> None:
    class Idle(ConvNet):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("idle", torch.zeros(3))
            self.spare = nn.Linear(2, 2)

    setup = make_setup(Idle(), ([4], [2, 1]), dataset=Blobs(shape=(2, 8, 8), dtype=torch.float32))
    state = trained(setup)
    assert "idle" not in state.buffers
    check_fits(state, setup, BEFORE)
