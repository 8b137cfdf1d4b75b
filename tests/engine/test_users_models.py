"""Users' models with features that a cut, a copy or a second forward could lose train as in a plain loop.

The plain loop trains the untraced model; it shares no code with the engine.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

from pipebench.engine.clipping import gradient_norm
from pipebench.errors import GraphError, UserCodeError
from pipebench.model.graph import trace
from pipebench.model.optimizer import make_optimizer
from pipebench.model.sampling import Sampler
from pipebench.model.trace_check import check_traced
from pipebench.recipe.schema import OptimizerRecipe
from pipebench.recipe.users_code import _is_of_an_operation, as_users
from pipebench.run.trial import _refuse_what_gets_lost
from tests.evaluations import mode_setup, trained
from tests.oracles import sequential
from tests.support import Blobs, parameters_of

UPDATES = 2
Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    """Four linear layers, with something of a test's between them."""

    def __init__(self, middle: Callable[["Net", torch.Tensor], torch.Tensor], part: nn.Module | None = None) -> None:
        super().__init__()
        torch.default_generator.manual_seed(3)
        self.a, self.b, self.c, self.d = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.part = part
        self.middle = middle
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, 6] to [samples, 4]."""
        hidden = self.middle(self, torch.tanh(self.a(x)))
        return self.d(torch.tanh(self.c(hidden)))


def doubles(net: Net, h: torch.Tensor) -> torch.Tensor:
    factor = torch.ones(8, dtype=torch.float64)
    factor += 1
    h = torch.tanh(net.b(h))
    factor[:4] *= 2
    return h * factor


def sums(net: Net, h: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(8, dtype=torch.float64)
    total += h.mean(0)
    h = torch.tanh(net.b(h))
    total += h.mean(0)
    return h * total


def masks(net: Net, h: torch.Tensor) -> torch.Tensor:
    mask = h > 0
    k = torch.tanh(net.b(h))
    mask &= k > 0
    mask |= h > 0.5
    return k * mask


def compares(net: Net, h: torch.Tensor) -> torch.Tensor:
    part = h.detach() * 1
    h = torch.tanh(net.b(h))
    part.gt_(0.1)
    return h * (part / 3 - part)


def converts(net: Net, h: torch.Tensor) -> torch.Tensor:
    h = (h * 1.5).to(torch.float64).mul_(2)
    k = net.b(h).double()
    k.div_(3)
    return k


def detaches(net: Net, h: torch.Tensor) -> torch.Tensor:
    return torch.tanh(net.b(h)).detach()


def compares_apart(net: Net, h: torch.Tensor) -> torch.Tensor:
    return h * (net.b(h) > 0)


def chooses(net: Net, h: torch.Tensor) -> torch.Tensor:
    return h + functional.one_hot(torch.tanh(net.b(h)).argmax(1), 8)


def splits(net: Net, h: torch.Tensor) -> torch.Tensor:
    first, second = net.part(torch.tanh(net.b(h)))  # type: ignore[misc]
    return first * (second > 0)


def calls(net: Net, h: torch.Tensor) -> torch.Tensor:
    return net.part(torch.tanh(net.b(h)))  # type: ignore[misc]


class MovingMean(nn.Module):
    """Subtracts a running mean; `data` hides from autograd that it changes."""

    one_layer = True
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x without the mean of what came before, and it."""
        if self.training:
            self.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


class Detached(nn.Module):
    """Detaches what comes in, where torch.fx doesn't see it."""

    one_layer = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach() * 2


class Twice(nn.Module):
    """Two linear layers as one layer with two outputs."""

    one_layer = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both outputs, [samples, 8] each."""
        return self.first(x), self.second(x)


class Widest(MovingMean):
    """Divides by the largest number so far, which seldom changes later."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x over the largest number of each column."""
        with torch.no_grad():
            if self.training:
                self.mean.copy_(torch.maximum(self.mean, x.abs().amax(0)))
        return torch.tanh(x - self.mean)


class Assigned(MovingMean):
    """The same mean, assigned."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, self.mean = self.mean, 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x * (1 - before) - self.mean


class Renormalised(nn.BatchNorm1d):
    """A BatchNorm that reads in training what it changes."""

    one_layer = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.running_mean.clone()  # type: ignore[union-attr]
        super().forward(x)
        return x - before


class TracedMean(MovingMean):
    """The same, traced."""

    one_layer = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = self.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return (x - mean).to(self.mean.dtype) / self.mean.shape[0]


def weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.nn.utils.weight_norm(nn.Linear(8, 8))


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5)  # type: ignore[no-untyped-call]


def decaying(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.1, weight_decay=0.5)


def summed_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, target, reduction="sum")


def plainly(
    model: nn.Module, size: int, per_update: int, make: Make = decaying, loss: Any = summed_loss
) -> dict[str, torch.Tensor]:
    """Train the model itself; every update is of some minibatches, one after the other."""
    data, sampler = Blobs(), Sampler(48, size, 0)

    def minibatch(k: int) -> Any:
        fields = data.fetch("train", sampler.indices(k), ["x", "label"])
        return (fields["x"],), fields["label"]

    sequential.train(
        model,
        make(list(model.parameters())),
        [[minibatch(k * per_update + i) for i in range(per_update)] for k in range(UPDATES)],
        loss,
        lambda target: float(len(target)),
    )
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_as_expected(setup: Any, expected: dict[str, torch.Tensor]) -> None:
    found = parameters_of(trained(setup, UPDATES))
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(
    ("middle", "part"),
    [
        (doubles, None), (sums, None), (masks, None), (compares, None), (converts, None), (detaches, None),
        (compares_apart, None), (chooses, None), (calls, Detached), (splits, Twice),
        (calls, MovingMean), (calls, Assigned), (calls, Widest), (calls, lambda: Renormalised(8)), (calls, TracedMean),
        (calls, weight_norm), (calls, pruned),
        (calls, lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))),
    ],
)  # fmt: skip
def test_a_model_trains_as_in_a_plain_loop_cut_anywhere(middle: Any, part: Any, recomputes: bool) -> None:
    def model() -> Net:
        torch.default_generator.manual_seed(5)
        return Net(middle, None if part is None else part())

    by_minibatch, by_halves = plainly(model(), 4, 1), plainly(model(), 2, 2)
    graph = trace(model())
    check_traced(graph, Blobs())
    options = {"make_optimizer": decaying, "recompute": recomputes}
    # Every other cut: the others where layers aren't recomputed, or where they are
    for start in range(1 + recomputes, len(graph.layers), 2):
        if all(start not in range(min(same) + 1, max(same) + 1) for same in shared(graph)):
            if recomputes:
                assert_as_expected(mode_setup(model(), "gpipe", [start], backward="split", **options), by_halves)
            else:  # one mode for every second of them each
                mode, expected = ("gpipe", by_halves) if start % 4 == 1 else ("model", by_minibatch)
                assert_as_expected(mode_setup(model(), mode, [start], **options), expected)
    assert_as_expected(mode_setup(model(), "single", [], **options), by_minibatch)


def shared(graph: Any) -> list[list[int]]:
    """Return the layers that share a buffer, which can't be parted."""
    names = {name for layer in graph.layers for name in layer.buffers}
    return [[layer.index for layer in graph.layers if name in layer.buffers] for name in names]


class Scaling(nn.Module):
    """Multiplies by a buffer that every forward changes."""

    one_layer = True
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.mul_(0.9)
        return x * self.scale


def test_a_buffer_that_minibatches_in_flight_still_need_is_reported() -> None:
    assert trained(mode_setup(Net(calls, Scaling()), "model", [4]))
    with pytest.raises(GraphError, match="a layer changes in place what a backward still needs"):
        trained(mode_setup(Net(calls, Scaling()), "pipedream", [6]), 4)


def writes_a_view(net: Net, h: torch.Tensor) -> torch.Tensor:
    h = h * 1.0
    part = h[:, :4].mul_(2)
    return torch.tanh(net.b(torch.cat([part, part], 1))) + h


def test_memory_under_two_names_is_refused() -> None:
    """The sum reads what was written through a view; behind a cut it would read what was there before."""
    with pytest.raises(GraphError, match=r"can't be cut: its output 0 in training .* write in place \(mul_\)"):
        check_traced(trace(Net(writes_a_view)), Blobs())


def test_buffers_that_a_function_changes_are_refused() -> None:
    def normalises(net: Net, h: torch.Tensor) -> torch.Tensor:
        mean: Any = net.part.mean  # type: ignore[union-attr]
        return functional.batch_norm(h, mean, torch.ones(8, dtype=torch.float64), training=net.training)

    net = Net(normalises, TracedMean())
    with pytest.raises(GraphError, match=r"a function changes its buffer part\.mean"):
        check_traced(trace(net), Blobs())


class Seldom(MovingMean):
    """Changes its buffer in every third forward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.count % 3 == 0:
            self.mean.copy_(x.detach().mean(0))
        return x - self.mean


def test_a_buffer_that_changes_in_some_forwards_only_is_not_recomputed() -> None:
    with pytest.raises(GraphError, match="a layer changes a buffer in some forwards only"):
        trained(mode_setup(Net(calls, Seldom()), "gpipe", [6]), 4)
    assert trained(mode_setup(Net(calls, Seldom()), "gpipe", [6], recompute=False), 4)


def test_results_given_as_arguments_are_refused() -> None:
    def into(net: Net, h: torch.Tensor) -> torch.Tensor:
        return torch.add(h, 1.0, out=net.part.mean)  # type: ignore[union-attr, arg-type]

    with pytest.raises(GraphError, match="layer add writes its result into out="):
        trace(Net(into, MovingMean()))


class Scaled(torch.optim.SGD):
    """SGD that reads attributes of parameters, which a model sets."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad *= getattr(parameter, "factor", 1.0)
        super().step(closure)


@pytest.mark.parametrize(
    ("mode", "options"), [("model", {}), ("dp", {"shard": "optimizer"}), ("model", {"precision": "bf16"})]
)
def test_attributes_of_parameters_reach_the_optimizer(mode: str, options: Any) -> None:
    model, data = Net(lambda net, h: torch.tanh(net.b(h))).float(), Blobs(dtype=torch.float32)
    for parameter in model.b.parameters():
        parameter.factor = 0.0  # type: ignore[attr-defined]
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    setup = mode_setup(model, mode, [2], make_optimizer=lambda p: Scaled(p, 0.1), dataset=data, **options)
    found = parameters_of(trained(setup, 2))
    for name, weights in found.items():
        moved = not torch.equal(weights, before[name].to(weights.dtype))
        assert moved == (not name.startswith("b.")), name


def hooked(net: Net) -> None:
    net.b.weight.register_hook(lambda gradient: gradient * 0)  # type: ignore[no-untyped-call]


def hooked_after(net: Net) -> None:
    net.b.weight.register_post_accumulate_grad_hook(lambda parameter: None)  # type: ignore[no-untyped-call]


def synchronised(net: Net) -> None:
    net.part = nn.SyncBatchNorm(8)


def renormalising(net: Net) -> None:
    net.part = nn.Embedding(4, 8, max_norm=1.0)


def by_data(net: Net) -> None:
    net.b.weight.data = net.a.weight.data


def by_a_parameter_of_a_view(net: Net) -> None:
    net.part = nn.ParameterList([net.a.weight.t()])


def by_a_buffer(net: Net) -> None:
    net.register_buffer("first_row", net.b.weight.data[0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (by_data, "a.weight and b.weight share memory"), (by_a_buffer, "b.weight and first_row share memory"),
        (by_a_parameter_of_a_view, "a.weight and part.0 share memory"),
        (hooked, "b.weight has a hook on its gradient"), (hooked_after, "b.weight has a hook on its gradient"),
        (synchronised, "part is a SyncBatchNorm"), (renormalising, "part changes its weights in forward"),
    ],
)  # fmt: skip
def test_features_that_would_get_lost_are_refused(change: Any, says: str) -> None:
    net = Net(calls)
    _refuse_what_gets_lost(net)
    change(net)
    with pytest.raises(UserCodeError, match=says):
        _refuse_what_gets_lost(net)


def test_neighbours_in_memory_and_one_parameter_at_two_places_are_not_refused() -> None:
    net, matrix = Net(calls), torch.randn(8, 8)
    net.b.weight = net.a.weight
    net.part = nn.ParameterList(
        [nn.Parameter(part) for part in (*torch.split(matrix[:4], 2), *torch.split(matrix[4:], 4, 1))]
    )
    _refuse_what_gets_lost(net)


def test_complex_gradients_count_whole_and_step_by_default() -> None:
    for size in (5, 200):  # few and many numbers are summed in different ways
        gradient = torch.randn(size, size, dtype=torch.complex128).conj()
        assert float(gradient_norm([gradient], torch.device("cpu"))) == pytest.approx(float(gradient.norm()))
    parameter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = make_optimizer(OptimizerRecipe(name="sgd", lr=0.5), [parameter])
    parameter.grad = torch.full((2,), 1j)
    optimizer.step()
    assert parameter.tolist() == [1 - 0.5j] * 2


def test_errors_of_operations_in_a_traced_model_are_the_user_s(capfd: pytest.CaptureFixture[str]) -> None:
    def view(net: Net, h: torch.Tensor) -> torch.Tensor:
        return h.t().view(-1, 8)

    with pytest.raises(RuntimeError, match="view") as raised:
        trace(Net(view)).root(torch.zeros(3, 6, dtype=torch.float64))
    theirs = as_users(raised.value)
    assert theirs is not None
    assert "the model's forward, as traced, in layer view: RuntimeError: view size is not compatible" in str(theirs)
    assert capfd.readouterr().err == ""
    assert not _is_of_an_operation(RuntimeError("CUDA error: an illegal memory access was encountered"))
