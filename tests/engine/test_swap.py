"""A stage computes the same bits whichever of its layers are swapped; which tensors are on the device, and when."""

import gc
import random
import re
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipebench.engine.replica import Replica, UnitInput
from pipebench.engine.swap import Saved, Swap
from pipebench.engine.virtual import VirtualEngine
from pipebench.errors import GraphError, PlanError
from pipebench.model.graph import trace
from pipebench.model.plan import memory_of
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP
from tests.engine.test_modes import images
from tests.engine.test_split import Recurrent
from tests.model.test_recompute import Counts, Overwrites
from tests.models import ConvNet, FunctionalDropout, MixedTypes, RandomNet, SkipNet, Structures, Tied
from tests.replicas import Unit, replicas_of, run
from tests.support import Blobs, Mlp, make_engine, make_setup, parameters_of


class Masked(nn.Module):
    """Attention under a mask, a tensor that two layers share, and dropout; double precision, [n, 6] to [n, 4]."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(3)
        self.queries, self.keys, self.drop = nn.Linear(3, 5), nn.Linear(3, 5), nn.Dropout(0.4)
        self.head = nn.Linear(5, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take the features as two steps of three."""
        steps = x.view(-1, 2, 3)
        queries, keys = torch.tanh(self.queries(steps)), self.keys(steps).transpose(1, 2)
        weights = (queries @ keys).masked_fill(x[:, :1, None] > 0.5, -1e9).softmax(-1)
        return self.head((self.drop(weights) @ queries * queries).sum(1))


def pictures(count: int) -> list[Unit]:
    return [(torch.randn(5, 2, 8, 8), torch.randint(4, (5,))) for _ in range(count)]


def rows(count: int) -> list[Unit]:
    return [(torch.randn(5, 6, dtype=torch.float64), torch.randint(4, (5,))) for _ in range(count)]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], list[Unit]]]] = {
    "convolutions": (lambda: ConvNet(dropout=0.3), pictures),
    "skips": (SkipNet, rows),
    "random": (lambda: RandomNet([[0], [0, 1], [1, 2], [0, 2, 3]]), rows),
    "recurrent": (Recurrent, rows),
    "attention": (Masked, rows),
    "dropout": (lambda: FunctionalDropout().double(), rows),
    "overwriting": (lambda: Overwrites().double(), rows),
    "buffers": (lambda: Counts().double(), rows),
    "tied": (Tied, rows),
    "types": (MixedTypes, rows),
    "structures": (Structures, rows),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_any_layers_are_swapped_with_the_same_bits(name: str) -> None:
    """Also beside layers that are recomputed, in one stage and two, and where nothing asks for the copies back."""
    make, data = MODELS[name]
    torch.default_generator.manual_seed(0)
    model, units, draw = make(), data(3), random.Random(name)
    num_layers = len(trace(model).layers)
    for starts in ([], [num_layers - 1 if name == "tied" else num_layers // 2]):
        kept = run(replicas_of(model, starts, "keep"), units)
        chosen = [[draw.choice(("keep", "swap", "recompute")) for _ in range(num_layers)] for _ in range(2)]
        for index, policies in enumerate((*chosen, ["swap"] * num_layers)):
            found = run(replicas_of(model, starts, policies), units, late=index % 2 == 0)
            assert found.keys() == kept.keys()
            for each, value in kept.items():
                assert torch.equal(found[each], value), (each, policies)


def second_stage(model: nn.Module, start: int, memory: Sequence[str]) -> tuple[Replica, int]:
    """Return the second of two stages, and the layer whose value it receives."""
    _, replica = replicas_of(model, [start], memory)
    ((layer,),) = replica.stage.receives.values()
    return replica, layer


def forward(replica: Replica, layer: int, values: torch.Tensor, unit: int = 0) -> None:
    received = {layer: values.requires_grad_()}
    target = torch.zeros(len(values), dtype=torch.long)
    replica.forward(UnitInput(unit, (unit, 0), [], received, 0, loss=lambda o: functional.cross_entropy(o, target)))


def chain() -> nn.Module:
    torch.default_generator.manual_seed(3)
    hidden = [each for _ in range(3) for each in (nn.Linear(6, 6), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(6, 4)).double()


def test_swapped_tensors_are_counted_once_and_without_weights() -> None:
    """A linear layer saves its input, which the tanh before it saves as its result: 5 x 6 numbers of 8 bytes each."""
    replica, layer = second_stage(chain(), 2, ["keep"] * 2 + ["swap"] * 5)
    before = replica.live_bytes()
    forward(replica, layer, torch.randn(5, 6, dtype=torch.float64))
    loss = 5 * 4 * 8 + 5 * 8 + 8  # softmax, targets, their total weight
    values = 3 * 5 * 6 * 8  # the received one and two results of tanh
    assert replica.live_bytes() - before == values + loss
    assert replica.swap_out(0) == values + loss == replica.host_bytes()
    assert replica.live_bytes() == before
    assert replica.swap_in(0) == values + loss
    assert (replica.live_bytes(), replica.host_bytes()) == (before + values + loss, 0)
    replica.backward(0, {})
    assert replica.host_bytes() == 0


def test_tensors_that_a_kept_layer_saves_too_stay_on_the_device() -> None:
    """Of linear, tanh, linear, tanh the second linear layer is swapped: its input is the first tanh's result."""
    replica, layer = second_stage(chain(), 2, ["keep", "keep", "keep", "keep", "swap", "keep", "swap"])
    before = replica.live_bytes()
    forward(replica, layer, torch.randn(5, 6, dtype=torch.float64))
    kept = replica.live_bytes() - before
    loss = 5 * 4 * 8 + 5 * 8 + 8
    for _ in range(2):  # a second unit finds it known
        assert replica.swap_out(0) == loss
        assert replica.live_bytes() - before == kept - loss == 3 * 5 * 6 * 8
        replica.backward(0, {})
        before = replica.live_bytes()
        forward(replica, layer, torch.randn(5, 6, dtype=torch.float64))


@pytest.mark.usefixtures("few_objects_to_collect")
def test_no_tensor_of_a_swapped_unit_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the received value, its graph's leaf; once copied back, it is freed with the graph."""
    storages: list[weakref.ref[torch.UntypedStorage]] = []
    pack, take = Swap.pack, Saved.take

    def packing(self: Swap, tensor: torch.Tensor) -> Saved:
        if tensor.is_floating_point():  # the targets are the loss function's, too
            storages.append(weakref.ref(tensor.untyped_storage()))
        return pack(self, tensor)

    def taking(self: Saved, tensor: torch.Tensor | None) -> None:
        if tensor is not None and tensor.is_floating_point():
            storages.append(weakref.ref(tensor.untyped_storage()))
        take(self, tensor)

    monkeypatch.setattr(Swap, "pack", packing)
    monkeypatch.setattr(Saved, "take", taking)
    replica, layer = second_stage(chain(), 2, ["keep"] * 2 + ["swap"] * 5)
    forward(replica, layer, torch.randn(5, 6, dtype=torch.float64))
    weights = {flat.untyped_storage().data_ptr() for flat in replica.weights.newest.flats}

    def num_alive() -> int:
        gc.collect()
        found = {storage.data_ptr() for each in storages for storage in [each()] if storage is not None}
        return len(found - weights)

    assert num_alive() == 5  # what it received, two results of tanh, softmax and total weight
    replica.swap_out(0)
    assert num_alive() == 0
    replica.swap_in(0)
    assert num_alive() == 5
    replica.backward(0, {})
    assert num_alive() == 0


def test_a_tensor_overwritten_before_its_copy_is_refused() -> None:
    """As by autograd, whether it is overwritten before the copy or, where there is none, before the backward."""
    for swaps in (True, False):
        replica, layer = second_stage(chain(), 2, ["keep"] * 2 + ["swap"] * 5)
        values = torch.randn(5, 6, dtype=torch.float64)
        forward(replica, layer, values)
        with torch.no_grad():
            values.mul_(2.0)
        use = partial(replica.swap_out, 0) if swaps else partial(replica.backward, 0, {})
        with pytest.raises(GraphError, match=r"shape \(5, 6\) and type torch.float64 .* was overwritten 1 times since"):
            use()


def test_a_tensor_overwritten_after_its_copy_keeps_its_values() -> None:
    found = []
    for spoils in (False, True):
        replica, layer = second_stage(chain(), 2, ["keep"] * 2 + ["swap"] * 5)
        values = torch.linspace(0, 1, 30, dtype=torch.float64).view(5, 6)
        forward(replica, layer, values)
        replica.swap_out(0)
        if spoils:
            with torch.no_grad():
                values.mul_(2.0)
        replica.backward(0, {})
        found.append([gradient for gradient in replica.gradients if gradient is not None])
    assert len(found[0]) == 6
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_layers_to_swap_are_chosen_by_name_or_pattern() -> None:
    names = ["first", "second_a", "second_b", "third"]
    assert memory_of(names, (), ["second_*"]) == ("keep", "swap", "swap", "keep")
    assert memory_of(names, ["first"], ["second_*", "third"]) == ("recompute", "swap", "swap", "swap")
    assert memory_of(names, (), ["third"], others="recompute") == ("recompute",) * 3 + ("swap",)
    with pytest.raises(PlanError, match=r"parallelism.swap_layers: the model has no layer 'thrid'; did you"):
        memory_of(names, (), ["thrid"])
    said = "swap_layers: 'second_b' names layer 'second_b', and recompute_layers does so as 'second_*': allowed is one"
    with pytest.raises(PlanError, match=re.escape(said)):
        memory_of(names, ["second_*"], ["second_b"])


COLUMNS: dict[str, dict[str, Any]] = {
    "gpipe": {"weights": "one", "order": "all-forwards", "microbatches": 3},
    "1f1b": {"weights": "one", "microbatches": 4},
    "pipedream": {},
    "pipedream, replicated": {"replicas": [2, 1, 1]},
    "vertical sync": {"weights": "stash-vertical-sync"},
    "two buffers": {"weights": "double-buffer", "accumulate": 3},
    "predicted": {"weights": "predict"},
    "corrected": {"weights": "correct"},
    "overwritten": {"weights": "none"},
    "interleaved": {"weights": "one", "order": "interleaved", "chunks": 3, "replicas": [1, 1, 1], "microbatches": 2},
    "pushed": {"weights": "newest-pulled", "sync": "asynchronous", "replicas": [2], "depth": 1},
    "clipped": {"weights": "one", "microbatches": 2, "clip_norm": 0.3},
    "bf16": {"precision": "bf16"},
}


def trained(model: nn.Module, seed: int, *, swapped: bool, replicas: Sequence[int], **columns: Any) -> VirtualEngine:
    """Train two segments of a random plan, with an evaluation between them."""
    draw = random.Random(seed)
    num_layers = len(trace(model).layers)
    starts = sorted(draw.sample(range(1, num_layers), len(replicas) - 1))
    policies = [draw.choice(("keep", "swap", "swap", "recompute")) for _ in range(num_layers)]
    data = images() if isinstance(model, ConvNet) else Blobs(num_train=46)
    memory = policies if swapped else [KEEP if policy == SWAP else policy for policy in policies]
    engine = make_engine(make_setup(model, (starts, replicas), dataset=data, memory=memory, seed=seed, **columns))
    engine.train(0, 13)
    engine.evaluate()
    engine.train(13, 6)
    return engine


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", COLUMNS)
def test_training_that_swaps_ends_with_the_same_bits(name: str) -> None:
    """Two models, random plans, random policies of layers; the last minibatch is a short one."""
    columns = {"replicas": [1, 1, 1], **COLUMNS[name]}
    for seed, model in enumerate((SkipNet(), ConvNet(dropout=0.3))):
        kept, swapped = (trained(model, seed, swapped=swaps, **columns) for swaps in (False, True))
        expected, found = parameters_of(kept), parameters_of(swapped)
        assert expected.keys() == found.keys()
        for each, parameter in expected.items():
            assert torch.equal(found[each], parameter), each
        assert [r.host_bytes() for r in swapped.replicas] == [0] * len(swapped.replicas)
        assert swapped.num_bytes["swap-out", "pcie"] == swapped.num_bytes["swap-in", "pcie"] > 0
        assert any(worker.peaks.host_bytes for worker in swapped.workers)
        assert {**kept.num_bytes} == {key: count for key, count in swapped.num_bytes.items() if key[1] != "pcie"}


def test_swapped_bytes_equal_those_of_the_shapes() -> None:
    """Linear layers save what they read, tanh layers what they put out; what crosses the cut is saved on both sides."""
    setup = make_setup(Mlp(), ([4], [1, 1]), memory=["swap"] * 7, dataset=Blobs(num_train=46))
    engine = make_engine(setup)
    engine.train(0, 12)  # of four samples; the last one has two
    widths = (6, 7, 8, 8, 5, 4)  # the input, three results of tanh, of which the second is received, too, the softmax
    each = sum(8 * 4 * width for width in widths) + 8 * 4 + 8  # targets, and their total weight
    short = sum(8 * 2 * width for width in widths) + 8 * 2 + 8
    assert engine.num_bytes["swap-out", "pcie"] == 11 * each + short
    first = 8 * 4 * sum(widths[:3])  # of which it has two in flight, and the second stage one
    assert [worker.peaks.host_bytes for worker in engine.workers] == [2 * first, each - first]


class Slopes(nn.Module):
    """A net's derivative along ones, by forward-mode differentiation."""

    one_layer = True

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(torch.func.jvp(self.net, (x,), (torch.ones_like(x),)), 1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch.func's own
@pytest.mark.parametrize("policy", [KEEP, RECOMPUTE, SWAP])
def test_a_layer_may_differentiate_by_torch_func(policy: str) -> None:
    """0.2.0: its run ended with an internal error, as tensors inside of a transform have no address."""

    def weights(**options: Any) -> dict[str, torch.Tensor]:
        torch.default_generator.manual_seed(2)
        model = nn.Sequential(nn.Linear(6, 6), Slopes(), nn.Linear(12, 4)).double()
        engine = make_engine(make_setup(model, ([1], [1, 1]), order="all-forwards", weights="one", **options))
        engine.train(0, 3)
        return {name: tensor for replica in engine.replicas for name, tensor in replica.tensors().items()}

    expected = weights()
    for name, tensor in weights(memory=[policy] * 3).items():
        assert torch.equal(tensor, expected[name])
