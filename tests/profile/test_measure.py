"""The measured profile: state that it doesn't change, and loose bounds on its times."""

import gc
import re
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipebench.errors import ProfileError
from pipebench.garbage import without_collector
from pipebench.model import allocator
from pipebench.model.graph import trace
from pipebench.profile import measure
from pipebench.profile.clocks import device_clock
from pipebench.profile.enough import StopRule
from pipebench.profile.measure import measured_profile, note_on_sums
from pipebench.profile.model import Profile
from pipebench.profile.request import ProfileRequest
from pipebench.recipe.schema import EngineRecipe, OptimizerRecipe
from pipebench.zoo.mnist5k import mnist5k
from pipebench.zoo.vgg import VGG, vgg16
from tests.support import Blobs

SGD = OptimizerRecipe("sgd", lr=0.1, momentum=0.9)
CPU = torch.device("cpu")
ENGINE = EngineRecipe()


@pytest.fixture(autouse=True)
def _time_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers and the whole step are timed one after the other: what others do on the machine is left out."""
    monkeypatch.setattr(measure, "device_clock", lambda device: device_clock(device, time.process_time))


def narrow() -> VGG:
    return vgg16(width=0.125, batch_norm=True, num_classes=10, in_channels=1, image_size=32)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return measured_profile(
        ProfileRequest(trace(narrow()), mnist5k(), [4, 16], SGD, "narrow vgg16"),
        CPU,
        rule=StopRule(most=3),
        engine=ENGINE,
    )


def test_every_layer_and_size_is_measured(profile: Profile) -> None:
    names = [layer.name for layer in trace(narrow()).layers]
    for size in (4, 16):
        assert [row.name for row in profile.layers[size]] == [*names, "loss"]
        assert profile.load_s[size] > 0
        assert all(row.forward_s > 0 for row in profile.layers[size])
    assert profile.source == "measured"
    assert profile.update_floor_s > 0


def test_sum_over_layers_is_about_a_whole_step(profile: Profile) -> None:
    assert set(profile.sum_over_whole) == {4, 16}
    assert f"; sum over layers / whole step: {profile.sum_over_whole[4]:.3f} at 4 samples, " in profile.note
    assert re.search(r", torch \S+, on 20\d\d-\d\d-\d\d at \d\d:\d\d UTC;", profile.note)


@pytest.mark.parametrize(
    ("ratios", "far"), [({4: 0.51, 8: 1.9}, ""), ({4: 1.0, 8: 0.49}, "8"), ({4: 2.1, 8: 0.1}, "4, 8")]
)
def test_sums_far_from_a_whole_step_are_reported(ratios: dict[int, float], far: str) -> None:
    note = note_on_sums(ratios)
    assert (f"; not near 1 at {far}: " in note) if far else ("not near" not in note)
    assert note_on_sums({}) == ""


class Language(nn.Module):
    """Two LSTMs, the first one's states passed on, with an embedding that may be frozen or tied to the decoder."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, width)
        self.first = nn.LSTM(width, width, batch_first=True)
        self.second = nn.LSTM(width, width, batch_first=True)
        self.decode = nn.Linear(width, 500)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map [samples, 20] int64 and bool to logits and to how sure they are, which has no gradient."""
        hidden, states = self.first(self.embed(tokens))
        again, _ = self.second(hidden, states)
        hidden = torch.relu_(again + hidden)
        hidden += 1.0
        logits = self.decode(hidden.masked_fill(mask.unsqueeze(2), 0.0))
        sure = (logits.detach().argmax(2) > 7).float()
        return logits, sure


class Words(Blobs):
    """Two inputs, integers and booleans, and a loss that reads a tuple."""

    inputs: Sequence[str] = ("tokens", "mask")

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        tokens = torch.tensor([[(7 * index + position) % 500 for position in range(20)] for index in indices])
        both = {"tokens": tokens, "mask": tokens == 3, "label": tokens}
        return {field: both[field] for field in fields}

    def loss(self, output: Any, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return summed cross-entropy of the first output, plus what has no gradient."""
        logits, sure = output
        return super().loss(logits.flatten(0, 1), {"label": targets["label"].flatten()}) + sure.sum()


@pytest.mark.parametrize("kind", ["plain", "frozen", "tied"])
def test_a_language_model(kind: str) -> None:
    model = Language()
    if kind == "frozen":
        model.embed.requires_grad_(False)
    if kind == "tied":
        model.decode.weight = model.embed.weight
    profile = measured_profile(ProfileRequest(trace(model), Words(), [8], SGD, kind), CPU, engine=ENGINE)
    rows = {row.name: row for row in profile.layers[8]}
    assert rows["embed"].inputs == ("tokens",)
    assert rows["first"].output_parts == (8 * 20 * 64 * 4, 8 * 64 * 4, 8 * 64 * 4)
    assert (rows["embed"].backward_s > 0) == (kind != "frozen")
    assert [rows[name].backward_s for name in ("argmax", "gt", "detach")] == [0, 0, 0]
    assert rows["argmax"].gradient_bytes == rows["gt"].gradient_bytes == 0
    assert rows["loss"].reads == tuple(
        i for i, row in enumerate(profile.layers[8]) if row.name in ("decode", "float_1")
    )
    assert all(rows[name].backward_s > 0 for name in ("first", "second", "decode", "loss"))
    assert 0.25 < profile.sum_over_whole[8] < 4  # 0.9 to 1.1 on a quiet machine


def test_vgg_adds_up() -> None:
    model = vgg16(width=0.25, num_classes=10, in_channels=1, image_size=32)
    profile = measured_profile(
        ProfileRequest(trace(model), mnist5k(), [32], SGD, "vgg16"), CPU, rule=StopRule(most=5), engine=ENGINE
    )
    assert 0.25 < profile.sum_over_whole[32] < 4  # 0.9 to 1.1 on a quiet machine


def test_model_and_random_state_are_unchanged() -> None:
    model = narrow().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    measured_profile(
        ProfileRequest(trace(model), mnist5k(), [2], SGD, "narrow"), CPU, rule=StopRule(most=1), engine=ENGINE
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training


def test_progress_names_layers_and_sizes_which_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_REPORT_EVERY_S", 0.0)
    reported: list[str] = []
    graph = trace(nn.Linear(6, 4, dtype=torch.float64))
    measured_profile(
        ProfileRequest(graph, Blobs(), [2, 3], SGD, "linear"), CPU, StopRule(most=1), reported.append, engine=ENGINE
    )
    one = [f"measuring layer {k} of 2 at {size} samples" for size in (2, 3) for k in (1, 1, 2, 2, 1)]
    first = [line for line in one if line.startswith("measuring layer 1")][::3]
    # The first pass counts bytes and says only that it begins; forwards go up, backwards down.
    assert reported == [*first, *one, *one]


def test_a_long_pass_is_measured_once_after_one_of_warm_up() -> None:
    reported: list[str] = []
    profile = measured_profile(
        ProfileRequest(trace(nn.Linear(6, 4, dtype=torch.float64)), Blobs(), [2], SGD, "linear"),
        CPU, StopRule(most_s=0.0), reported.append, engine=ENGINE,
    )  # fmt: skip
    assert reported.count("measuring layer 1 of 2 at 2 samples") == 2  # each pass says that it begins
    assert profile.note.startswith("medians of 1 pass at 2 samples (too few to say how precise) after warm-up")


def test_a_model_without_parameters() -> None:
    graph = trace(nn.Tanh())
    profile = measured_profile(
        ProfileRequest(graph, Blobs(shape=(4,)), [2], SGD, "tanh"), CPU, rule=StopRule(most=1), engine=ENGINE
    )
    assert (profile.update_s_per_byte, profile.update_floor_s) == (0, 0)
    assert profile.layers[2][0].backward_s == 0


@pytest.mark.parametrize(("most_bytes", "expected"), [(1 << 30, [6 * 8, 8, 8 * 4, 4]), (200, [6 * 8, 8])])
def test_an_optimizer_steps_on_the_copy_that_was_measured_and_on_some_of_a_large_one(
    most_bytes: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.2.0: another copy of the model's weights lay beside it, with whose gradients and state BERT large took 9 GB."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))  # 92 parameters: 368 bytes
    stepped: list[Sequence[torch.Tensor]] = []

    def make(recipe: OptimizerRecipe, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        stepped.append([parameter.detach().clone() for parameter in parameters])
        return torch.optim.SGD(parameters, 0.0)

    monkeypatch.setattr(measure, "make_optimizer", make)
    monkeypatch.setattr(measure, "_STEPPED_BYTES", most_bytes)
    data = Blobs(dtype=torch.float32)
    measured_profile(ProfileRequest(trace(model), data, [2], SGD, ""), CPU, StopRule(most=1), engine=ENGINE)
    one, some = stepped
    assert [each.numel() for each in one] == [1]
    assert [each.numel() for each in some] == expected
    assert torch.equal(some[0], next(model.parameters()))  # the copy's own, not zeros beside it


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_optimizers(name: str) -> None:
    graph = trace(nn.Linear(6, 4, dtype=torch.float64))
    assert (
        measured_profile(
            ProfileRequest(graph, Blobs(), [2], OptimizerRecipe(name, lr=0.1), ""), CPU, StopRule(most=1), engine=ENGINE
        ).update_floor_s
        > 0
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    found = measured_profile(
        ProfileRequest(trace(narrow()), mnist5k(), [16], SGD, "narrow vgg16"),
        torch.device("cuda"),
        rule=StopRule(most=3),
        engine=ENGINE,
    )
    assert all(row.forward_s >= 0 for row in found.layers[16])
    assert found.whole_step_s[16] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_measuring_leaves_no_cached_gpu_memory() -> None:
    wide = vgg16(num_classes=10, in_channels=1, image_size=32)
    assert sum(parameter.nbytes for parameter in wide.parameters()) > 128 << 20

    def measure_once() -> int:
        measured_profile(
            ProfileRequest(trace(wide), mnist5k(), [16], SGD, ""),
            torch.device("cuda"),
            rule=StopRule(most=1),
            engine=ENGINE,
        )
        return torch.cuda.memory_reserved()

    first = measure_once()  # workspaces of cuBLAS and cuDNN stay: 77.6 MB on an H100
    assert measure_once() <= first <= 128 << 20


@pytest.mark.parametrize(("device", "emptied"), [("cuda", 2), ("cpu", 0)])
def test_gpu_memory_is_released_after_success_and_failure(
    device: str, emptied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring is replaced by a stand-in, so no GPU is needed."""
    reported: list[str] = []

    def fails(*_: object) -> Profile:
        raise ProfileError("a layer fails")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: reported.append("emptied"))
    monkeypatch.setattr(measure, "_measured", lambda *_: None)
    measured_profile(ProfileRequest(trace(nn.Tanh()), Blobs(), [2], SGD, ""), torch.device(device), engine=ENGINE)
    monkeypatch.setattr(measure, "_measured", fails)
    with pytest.raises(ProfileError):
        measured_profile(ProfileRequest(trace(nn.Tanh()), Blobs(), [2], SGD, ""), torch.device(device), engine=ENGINE)
    assert len(reported) == emptied


def test_no_copy_of_a_large_model_is_left_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.2.0 trained with 1.7 GB of them beside it, which only cycles of references held."""
    trimmed: list[str] = []
    monkeypatch.setattr(allocator, "_LARGE_BYTES", 0)
    monkeypatch.setattr(allocator, "return_freed_blocks", lambda: trimmed.append("trimmed"))
    request = ProfileRequest(trace(nn.Linear(6, 317, dtype=torch.float64)), Blobs(), [2], SGD, "linear")
    with without_collector():
        measured_profile(request, CPU, StopRule(most=1), engine=ENGINE)
        left = [each for each in gc.get_objects() if isinstance(each, nn.Parameter) and each.shape == (317, 6)]
    assert len(left) == 1
    assert trimmed == ["trimmed"]


class Slow(Blobs):
    """Its first fetches are slow, as those that allocate memory; on a simulated clock."""

    now_s = 0.0
    fetches = 0

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        self.fetches += 1
        self.now_s += 0.5 if self.fetches < 6 else 0.02
        return super().fetch(split, indices, fields, draw)


@pytest.mark.parametrize(("processes", "each_s"), [(0, 0.02), (4, 0.005)])
def test_loading_is_timed_once_it_is_steady(processes: int, each_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1.0 took up to twenty times as long for the same minibatch, by what the allocator did meanwhile."""
    data = Slow()
    data.loader_processes = processes
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: data.now_s))
    graph = trace(nn.Linear(6, 4, dtype=torch.float64))
    profile = measured_profile(
        ProfileRequest(graph, data, [2], SGD, "linear"), CPU, rule=StopRule(most=4), engine=ENGINE
    )
    assert profile.load_s[2] == pytest.approx(each_s)
