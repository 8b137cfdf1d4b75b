"""A model that a device can't hold as a whole is measured in pieces, with the profile of a whole pass."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pipebench.errors import ProfileError
from pipebench.model.graph import trace
from pipebench.model.optimizer import make_optimizer
from pipebench.profile import measure
from pipebench.profile.clocks import device_clock
from pipebench.profile.devices import DEVICES
from pipebench.profile.enough import StopRule
from pipebench.profile.measure import mean_profile, measured_profile
from pipebench.profile.model import LayerProfile, Profile
from pipebench.profile.pieces import Pieces
from pipebench.profile.request import ProfileRequest
from pipebench.profile.roofline import priced
from pipebench.profile.walk import _Walk, walk
from pipebench.recipe.schema import EngineRecipe, OptimizerRecipe
from tests.made_up_gpu import made_up_gpu
from tests.models import HalfFrozen
from tests.profile.test_walk import Fork, InPlace, Sequences, Tokens
from tests.support import Blobs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
IMAGES = Blobs(shape=(2, 8, 8))
MODELS: dict[str, tuple[Callable[[], nn.Module], Blobs]] = {
    "in place": (InPlace, Blobs()),
    "tuples and integers": (Sequences, Tokens()),
    "a tied parameter and a value of three readers": (Fork, Blobs()),
    "frozen layers and buffers": (lambda: HalfFrozen().double(), IMAGES),
    "values that skip pieces": (lambda: Hourglass(4).double(), Blobs(classes=8, shape=(8,))),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_pieces", [2, 3, 100])
@pytest.mark.parametrize("named", MODELS)
@pytest.mark.parametrize("counts", [True, False], ids=["saved bytes are counted", "passes are timed"])
def test_every_layer_has_the_operations_and_bytes_of_a_whole_pass(named: str, num_pieces: int, counts: bool) -> None:
    """Its operations and their sizes, priced as a device of the catalogue would take for them, and its bytes."""
    make, dataset = MODELS[named]
    graph = trace(make())
    samples = {name: torch.zeros_like(value, device=CPU) for name, value in dataset.example(3).items()}
    clock = partial(priced, DEVICES["V100"], with_data=True)

    def rows(root: nn.Module | Pieces) -> tuple[LayerProfile, ...]:
        return walk(graph, root, dataset, samples, clock, None if counts else lambda index: None)

    whole = rows(graph.root)
    before = copy.deepcopy(graph.root.state_dict())
    pieces = Pieces(graph, graph.root, CPU, num_pieces)
    assert [index for piece in pieces.ranges for index in piece] == [*range(len(graph.layers) + 1)]
    assert len(pieces.ranges) == min(num_pieces, len(graph.layers) + 1)
    assert rows(pieces) == whole
    assert any(row.saved_bytes for row in whole) == counts
    torch.testing.assert_close(graph.root.state_dict(), before, rtol=0, atol=0)


WIDTH, NUM_LAYERS = 64, 15
LAYER_BYTES = 4 * WIDTH**2


@pytest.fixture
def step_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time an optimizer's step on one layer, as it is on a small part of a model of gigabytes."""
    monkeypatch.setattr(measure, "_STEPPED_BYTES", LAYER_BYTES // 2)


def measured(limit_bytes: float, notes: list[str]) -> Profile:
    """Measure a stack of layers on an emulated GPU of `limit_bytes`."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    dataset = Blobs(classes=WIDTH, shape=(WIDTH,), dtype=torch.float32)
    request = ProfileRequest(trace(model), dataset, [4], OptimizerRecipe("sgd", lr=0.1), "it")
    with made_up_gpu(limit_bytes):
        return measured_profile(request, CUDA, StopRule(most=1), notes.append, engine=EngineRecipe())


@pytest.fixture(scope="module")
def whole() -> Profile:
    """The stack's profile on a device that holds all of it at once."""
    return measured(1e9, [])


@pytest.mark.usefixtures("step_one_layer")
@pytest.mark.parametrize(
    ("layers_held", "num_pieces"), [(100, 1), (14, 2), pytest.param(8, 4, marks=pytest.mark.slow), (4.5, 8)]
)
def test_as_few_pieces_as_fit_are_measured(
    layers_held: float, num_pieces: int, whole: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped: list[str] = []

    def noted(recipe: OptimizerRecipe, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        stepped.extend(str(each.device) for each in parameters)
        return make_optimizer(recipe, parameters)

    monkeypatch.setattr(measure, "make_optimizer", noted)
    notes: list[str] = []
    found = measured(layers_held * LAYER_BYTES, notes)
    assert f"in {num_pieces} pieces" in found.note or num_pieces == 1
    assert bool(found.whole_step_s) == (num_pieces == 1)
    tried = [2**k for k in range(1, 10) if 2**k <= num_pieces]
    assert [each for each in notes if "pieces" in each] == [
        f"measuring in {k} pieces, larger ones are too much for cuda" for k in tried
    ]
    bytes_of = [
        [replace(row, forward_s=0, backward_s=0, weight_s=0) for row in profile.layers[4]] for profile in (found, whole)
    ]
    assert bytes_of[0] == bytes_of[1]
    assert {*stepped} == {"cuda:0"}


@pytest.mark.usefixtures("step_one_layer")
@pytest.mark.parametrize(
    ("activations_held", "num_pieces"), [(14, 1), (10, 2), pytest.param(8, 4, marks=pytest.mark.slow)]
)
def test_activations_that_filled_the_device_are_freed_before_the_next_try(
    activations_held: int, num_pieces: int
) -> None:
    """A layer that saves its own output would keep it, and a graph is nothing that Python's collector sees."""
    model = nn.Sequential(*(part for _ in range(10) for part in (nn.Linear(8, 8), nn.Tanh())))
    dataset, size = Blobs(num_train=512, classes=8, shape=(8,), dtype=torch.float32), 512
    request = ProfileRequest(trace(model), dataset, [size], OptimizerRecipe("sgd", lr=0.1), "it")
    with made_up_gpu(activations_held * size * 8 * 4 + 20_000):
        found = measured_profile(request, CUDA, StopRule(most=1), engine=EngineRecipe())
    assert f"in {num_pieces} pieces" in found.note or num_pieces == 1
    assert bool(found.whole_step_s) == (num_pieces == 1)


@pytest.mark.usefixtures("step_one_layer")
def test_the_sum_of_a_tied_gradient_is_stored_on_the_host() -> None:
    """It filled the device beside every piece between the layers that share the parameter."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS - 1)]
    layers[0].weight = layers[-1].weight
    model = nn.Sequential(nn.Tanh(), *layers)
    dataset = Blobs(classes=WIDTH, shape=(WIDTH,), dtype=torch.float32)
    request = ProfileRequest(trace(model), dataset, [2], OptimizerRecipe("sgd", lr=0.1), "it")
    with made_up_gpu(3.8 * LAYER_BYTES):
        found = measured_profile(request, CUDA, StopRule(most=1), engine=EngineRecipe())
    assert "in 8 pieces" in found.note


class Hourglass(nn.Module):
    """As a U-Net: the k-th layer from the end also reads the output of the k-th."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.down, self.up = (nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(depth)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, 8] to [samples, 8]."""
        skipping = []
        for layer in self.down:
            x = layer(x)
            skipping.append(x)
        for layer in self.up:
            x = layer(x) + skipping.pop()
        return x


@pytest.mark.usefixtures("step_one_layer")
def test_values_that_skip_pieces_are_stored_on_the_host() -> None:
    """They filled the device, however many pieces there were: of eight outputs each skips to the other half."""
    dataset, size = Blobs(num_train=512, classes=8, shape=(8,), dtype=torch.float32), 512
    request = ProfileRequest(trace(Hourglass(8)), dataset, [size], OptimizerRecipe("sgd", lr=0.1), "it")
    with made_up_gpu(8 * size * 8 * 4 + 20_000):
        found = measured_profile(request, CUDA, StopRule(most=1), engine=EngineRecipe())
    assert "in 8 pieces" in found.note


def test_a_piece_begins_with_values_of_earlier_pieces_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second round it was given copies of what it computes itself, too: bytes copied, and held in vain."""
    graph, dataset = trace(Hourglass(4).double()), Blobs(num_train=2, classes=8, shape=(8,))
    begun: list[tuple[int, list[str]]] = []
    begin = _Walk.begin_with

    def noted(walked: _Walk, left: Any, piece: range, copy: Callable[[Any], Any]) -> None:
        begin(walked, left, piece, copy)
        begun.append((piece.start, [str(node) for node in walked._env.keys() - walked._inputs.keys()]))

    monkeypatch.setattr(_Walk, "begin_with", noted)
    samples = dataset.fetch("train", range(2), [*dataset.inputs, *dataset.targets])
    walk(graph, Pieces(graph, copy.deepcopy(graph.root), CPU, 2), dataset, samples, device_clock(CPU))
    names = [layer.name for layer in graph.layers]
    assert len(begun) == 4
    assert all(names.index(name) < start for start, found in begun for name in found)
    assert any(found for _, found in begun)


@pytest.mark.usefixtures("step_one_layer")
def test_a_layer_too_large_for_the_device_is_named() -> None:
    with pytest.raises(
        ProfileError, match=r"^(from layer _[0-9]+ on nothing|layer _[0-9]+ .Linear.) can.*CUDA out of memory"
    ):
        measured(1.5 * LAYER_BYTES, [])


@pytest.mark.usefixtures("step_one_layer")
def test_whole_steps_count_only_if_every_process_has_timed_them(whole: Profile) -> None:
    """Of two GPUs, something else has taken memory of one."""
    apart = measured(9 * LAYER_BYTES, [])
    assert whole.whole_step_s
    assert mean_profile([whole, whole]).whole_step_s == whole.whole_step_s
    assert mean_profile([whole, apart]).whole_step_s == mean_profile([apart, whole]).whole_step_s == {}
