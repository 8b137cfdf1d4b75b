"""Optimizers by name and by target: the weights of a plain loop, and a trial that finds those that can't give them."""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipebench.checkpoint.optimizers import FreshStates
from pipebench.checkpoint.tensors import Form
from pipebench.errors import UserCodeError
from pipebench.model.large_batch import LAMB, LARS
from pipebench.model.optimizer import FUSED, GroupRates, make_optimizer, state_bytes_per_byte
from pipebench.recipe.named import KINDS, OPTIMIZER
from pipebench.recipe.schema import OptimizerRecipe
from pipebench.run.trial import try_optimizer
from tests.checkpoint.support import captured, restored
from tests.checkpoint.test_round_trips import check_resuming
from tests.distributed.cases import matrices, own_optimizer
from tests.made_up_gpu import made_up_gpu
from tests.oracles import sequential
from tests.support import Blobs, Mlp, make_engine, make_setup, parameters_of

# Name to class: everything in torch.optim but what needs a closure or sparse gradients, and what is written here.
OPTIMIZERS: dict[str, Any] = {
    **{
        name.lower(): getattr(torch.optim, name)
        for name in (
            "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop",
            "Rprop", "SGD",
        )
    },
    "lars": LARS,
    "lamb": LAMB,
}  # fmt: skip
REFUSED = {"lbfgs", "sparse_adam"}
LR = 0.05


def named(name: str) -> OptimizerRecipe:
    """Return a recipe's optimizer that averages, if it can, from its third update on; else with its own defaults."""
    return OptimizerRecipe(name, LR, arguments={"t0": 2, "lambd": 0.01} if name == "asgd" else {})


def model_for(name: str) -> nn.Module:
    return matrices() if name == "muon" else Mlp()


def test_every_optimizer_of_torch_is_tested() -> None:
    """Those that torch has added since may be more."""
    assert {*OPTIMIZERS} >= {*KINDS[OPTIMIZER].names()}
    assert {*KINDS[OPTIMIZER].targets()} - {*KINDS[OPTIMIZER].names()} == REFUSED


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_the_bits_of_a_plain_loop(name: str) -> None:
    """Those of sgd, adam and adamw are those of torch's fused ones."""
    recipe, data = named(name), Blobs()
    setup = make_setup(
        model_for(name), ([3], [1, 1]), weights="one", depth=1, dataset=data,
        make_optimizer=partial(make_optimizer, recipe), lr=lambda stage, before, own: LR,
    )  # fmt: skip
    engine = make_engine(setup)
    engine.train(0, 9)
    model = model_for(name)
    fields = [data.fetch("train", setup.sampler.indices(k), ["x", "label"]) for k in range(9)]
    sequential.train(
        model,
        OPTIMIZERS[name](model.parameters(), lr=LR, **recipe.arguments, **({"fused": True} if name in FUSED else {})),
        [[((each["x"],), each)] for each in fields],
        data.loss,
        lambda targets: float(len(targets["label"])),
    )
    found = parameters_of(engine)
    assert all(torch.equal(found[key], parameter.detach()) for key, parameter in model.named_parameters())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes_from_a_checkpoint(name: str) -> None:
    recipe = named(name)
    check_resuming(
        lambda: make_setup(model_for(name), ([2, 4], [1, 2, 1]), make_optimizer=partial(make_optimizer, recipe))
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_passes_the_trial(name: str) -> None:
    try_optimizer(named(name), list(model_for(name).parameters()))


@pytest.mark.parametrize("name", ["RMSprop", "ASGD", "NAdam"])
def test_a_name_is_short_for_a_target(name: str) -> None:
    made = [
        make_optimizer(recipe, [torch.zeros(2, 2)])
        for recipe in (named(name.lower()), own_optimizer(f"torch.optim:{name}"))
    ]
    assert type(made[0]) is type(made[1]) is getattr(torch.optim, name)
    assert made[0].defaults.keys() == made[1].defaults.keys()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LBFGS", "can't take a step of a stage: TypeError: .*'closure'"),
        ("SparseAdam", "can't take a step of a stage: RuntimeError: SparseAdam does not support dense gradients"),
        ("Muon", "can't make the optimizer: ValueError: Muon only supports 2D parameters"),
    ],
)
def test_optimizers_that_cannot_train_stages_are_refused(name: str, message: str) -> None:
    with pytest.raises(UserCodeError, match=rf"^train.optimizer.target: torch.optim:{name} {message}"):
        try_optimizer(own_optimizer(f"torch.optim:{name}"), list(Mlp().parameters()))


class Forgetful(torch.optim.SGD):
    """Keeps its momentum in a list of its own, beside the state that travels with parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.sums: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Add up gradients and step by the sum."""
        for index, parameter in enumerate(self.param_groups[0]["params"]):
            if len(self.sums) <= index:
                self.sums.append(torch.zeros_like(parameter.grad))
            self.sums[index] += parameter.grad
            parameter.data.sub_(self.param_groups[0]["lr"] * self.sums[index])


class Together(torch.optim.SGD):
    """Divides by the norm of all gradients together."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for parameter in parameters:
            parameter.data.sub_(self.param_groups[0]["lr"] / norm * parameter.grad)


class Counting(torch.optim.SGD):
    """Counts its steps, as one that acts at every 10th does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.num_steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.num_steps += 1


class Remembering(torch.optim.SGD):
    """Has a copy of the first weights, as one that averages them at every 10th step does."""

    def __init__(self, params: Any, lr: float) -> None:
        params = list(params)
        super().__init__(params, lr)
        self.slow = [parameter.detach().clone() for parameter in params]


class Fixed(torch.optim.SGD):
    """Keeps the rate that it was made with."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.lr = lr

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(self.lr * parameter.grad)


class Halving(torch.optim.SGD):
    """Has a schedule of its own."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.param_groups[0]["lr"] *= 0.5


class Wrapping(torch.optim.Optimizer):
    """Has another's groups, and nothing that torch's base class makes."""

    def __init__(self, params: Any, lr: float) -> None:
        self.inner = torch.optim.SGD(params, lr)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


class Queueing(torch.optim.SGD):
    """Keeps something that no checkpoint holds."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("last", deque([0.0], maxlen=3))


class Nesting(torch.optim.SGD):
    """Keeps its momentum in a dictionary, and empties gradients after its step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            total = state.setdefault("own", {"sum": torch.zeros_like(parameter)})["sum"]
            total.mul_(0.9).add_(parameter.grad)
            parameter.data.sub_(self.param_groups[0]["lr"] * total)
            parameter.grad.zero_()


class Growing(torch.optim.SGD):
    """Keeps the norms of all gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            norms = self.state[parameter].get("norms", torch.zeros(0))
            self.state[parameter]["norms"] = torch.cat([norms, parameter.grad.norm().reshape(1)])


class Late(torch.optim.SGD):
    """Keeps nothing before large gradients came."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad.abs().max() > 2:
                self.state[parameter]["seen"] = True


def grouped(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Return an optimizer without weight decay on biases, whose rate is twice that of the others."""
    flat = [parameter for parameter in parameters if parameter.dim() < 2]
    others = [parameter for parameter in parameters if parameter.dim() >= 2]
    groups: list[dict[str, Any]] = [{"params": flat, "weight_decay": 0.0, "lr": 2 * lr}, {"params": others}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, weight_decay=0.1)


def grouped_apart(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Return an optimizer with the rate of every group, and none for all of them: AdamW's default is 0.001."""
    flat = [parameter for parameter in parameters if parameter.dim() < 2]
    others = [parameter for parameter in parameters if parameter.dim() >= 2]
    groups: list[dict[str, Any]] = [{"params": flat, "lr": lr / 8}, {"params": others, "lr": lr}]
    return torch.optim.AdamW([group for group in groups if group["params"]])


def faster(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=4 * lr, momentum=0.9)


class TensorRate(torch.optim.Adam):
    """Has its rate in a tensor, by which torch's steps round, and asks it what a float hasn't."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=torch.tensor(lr), foreach=False)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.param_groups[0]["lr"].item() > 0
        super().step()


class HalvingTensor(torch.optim.SGD):
    """Halves a rate in place."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=torch.tensor(lr))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.param_groups[0]["lr"].mul_(0.5)


class Rateless(torch.optim.SGD):
    """Needs no rate."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(0.01 * parameter.grad.sign())


def twelve(parameters: Any, lr: float) -> int:
    return 12


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Forgetful", "computes different weights when its parameters move"),
        ("Together", "updates a parameter differently when it has no others"),
        ("twelve", "returned int, needed is a torch.optim.Optimizer"),
        ("Counting", "has another num_steps when its state is restored from a checkpoint"),
        ("Remembering", "has another slow when its state is restored from a checkpoint"),
        ("Fixed", "steps alike at every rate"),
        ("Halving", "train.optimizer.target: its step changes the rates of its parameter groups"),
        ("HalvingTensor", "train.optimizer.target: its step changes the rates of its parameter groups"),
        ("Wrapping", r"makes a Wrapping without torch.optim.Optimizer.__init__"),
        ("Queueing", "holds a deque; a checkpoint holds tensors"),
    ],
)
def test_users_optimizers_that_cannot_train_stages_are_refused(name: str, message: str) -> None:
    with pytest.raises(UserCodeError, match=message):
        try_optimizer(own_optimizer(f"tests.model.test_optimizer:{name}"), list(Mlp().parameters()))


@pytest.mark.parametrize(
    ("target", "shares"),
    [(grouped, (2, 1)), (grouped_apart, (0.125, 1)), (faster, (4,)), (TensorRate, (1,))],
    ids=["default", "no-default", "another-rate", "tensor"],
)
def test_groups_keep_their_rates(target: Any, shares: Sequence[float]) -> None:
    recipe, data, model = own_optimizer(f"tests.model.test_optimizer:{target.__name__}"), Blobs(), Mlp()
    try_optimizer(recipe, list(model.parameters()))
    make = partial(make_optimizer, recipe)
    check_resuming(lambda: make_setup(Mlp(), ([2, 4], [1, 2, 1]), make_optimizer=make))
    setup = make_setup(
        Mlp(), ([3], [1, 1]), weights="one", depth=1, dataset=data, make_optimizer=make,
        lr=lambda stage, before, own: LR / (1 + before),
    )  # fmt: skip
    engine = make_engine(setup)
    engine.train(0, 5)
    optimizer = target(list(model.parameters()), LR)
    for k in range(5):
        fields = data.fetch("train", setup.sampler.indices(k), ["x", "label"])
        for group, share in zip(optimizer.param_groups, shares, strict=True):
            rate = LR / (1 + setup.sampler.samples_before(k)) * share
            group["lr"] = torch.tensor(rate) if isinstance(group["lr"], torch.Tensor) else rate
        sequential.train(model, optimizer, [[((fields["x"],), fields)]], data.loss, lambda t: float(len(t["label"])))
    found = parameters_of(engine)
    assert all(torch.equal(found[key], parameter.detach()) for key, parameter in model.named_parameters())


class _HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the numbers that the host reads of tensors: on a GPU it waits for each."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_rate_on_a_gpu_is_set_without_reading_it_back() -> None:
    with made_up_gpu():
        groups = [{"params": [torch.ones(2, device="cuda", requires_grad=True)]} for _ in range(2)]
        optimizer = torch.optim.SGD(groups, lr=torch.tensor(0.1, device="cuda"))
        rates = GroupRates(optimizer)
        with _HostReads() as reads:  # type: ignore[no-untyped-call]
            rates.set(0.05)
            assert not rates.have_changed()
        assert reads.count == 0
        optimizer.param_groups[1]["lr"].mul_(0.5)
        assert rates.have_changed()


def test_an_optimizer_without_a_rate_is_refused_only_if_rates_change() -> None:
    parameters = list(Mlp().parameters())
    try_optimizer(own_optimizer("tests.model.test_optimizer:Rateless"), parameters)
    with pytest.raises(UserCodeError, match="steps alike at every rate"):
        try_optimizer(own_optimizer("tests.model.test_optimizer:Rateless"), parameters, changes_rates=True)


def test_replicas_in_one_process_share_neither_gradients_nor_nested_state() -> None:
    make = partial(make_optimizer, own_optimizer("tests.model.test_optimizer:Nesting"))
    setup = make_setup(Mlp(), ([], [2]), weights="one", depth=1, make_optimizer=make)
    engine = make_engine(setup)
    engine.train(0, 4)
    again = restored(setup, captured(engine))
    for each in (engine, again):
        each.train(4, 4)
    found, expected = parameters_of(again), parameters_of(engine)  # which compare replicas
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("target", "key"), [("Growing", "norms"), ("Late", "seen")])
def test_state_that_grows_or_comes_late_is_restored(target: str, key: str) -> None:
    make = partial(make_optimizer, own_optimizer(f"tests.model.test_optimizer:{target}"))
    parameter = torch.zeros(3, requires_grad=True)
    optimizer = make([parameter])
    for _ in range(7):
        parameter.grad = torch.full_like(parameter, 3)
        optimizer.step()
    assert key in optimizer.state[parameter]
    assert FreshStates(make).check("it", optimizer.state[parameter], Form.of(parameter))


def test_adamw_is_torch_s_and_not_adam() -> None:
    recipe = OptimizerRecipe("adamw", 0.01, weight_decay=0.1)
    made = make_optimizer(recipe, [torch.zeros(2, requires_grad=True)])
    assert type(made) is torch.optim.AdamW
    assert made.defaults["weight_decay"] == 0.1
    assert made.defaults["fused"] is True


def test_state_is_counted() -> None:
    counts = {"SGD": 0, "RMSprop": 1, "Adam": 2, "Adafactor": 0, "Muon": 1}
    assert {name: state_bytes_per_byte(own_optimizer(f"torch.optim:{name}")) for name in counts} == counts
    by_name = {"sgd": 0, "adam": 2, "adamw": 2, "asgd": 1, "lars": 1, "lamb": 2, "adadelta": 2, "rmsprop": 1}
    assert {name: state_bytes_per_byte(named(name)) for name in by_name} == by_name
    assert state_bytes_per_byte(OptimizerRecipe("sgd", 1.0, 0.9)) == 1
    assert state_bytes_per_byte(OptimizerRecipe("adam", 1.0, arguments={"amsgrad": True})) == 3
    assert state_bytes_per_byte(OptimizerRecipe("lars", 1.0, 0.0)) == 0


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adafactor"])
def test_the_planner_s_state_bytes_equal_the_held_ones(name: str) -> None:
    """But for numbers beside tensors, such as the step's, and adafactor's rows and columns."""
    recipe = named(name)
    parameter = torch.zeros(128, 128, requires_grad=True)
    optimizer = make_optimizer(recipe, [parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = sum(v.nbytes for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor) and v.dim())
    assert held == state_bytes_per_byte(recipe) * parameter.nbytes
