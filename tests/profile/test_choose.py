"""The choice of a recipe's profile, and refusals."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipebench.cluster import Cluster, Level
from pipebench.errors import ProfileError
from pipebench.model.graph import trace
from pipebench.profile import choose
from pipebench.profile.analytic import analytic_profile
from pipebench.profile.choose import profile_for, profile_request
from pipebench.profile.devices import DEVICES
from pipebench.profile.graph_txt import write_graph_txt
from pipebench.profile.load import load_profile
from pipebench.profile.model import LayerProfile, Profile
from pipebench.profile.request import ProfileRequest
from pipebench.profile.stored import write_profile
from pipebench.recipe.schema import EngineRecipe, OptimizerRecipe, Recipe, TrainRecipe
from pipebench.zoo.mnist5k import mnist5k
from pipebench.zoo.vgg import vgg16

OPTIONS: dict[str, Any] = {"width": 0.125, "num_classes": 10, "in_channels": 1, "image_size": 32}
GRAPH = trace(vgg16(**OPTIONS))
SGD = OptimizerRecipe("sgd", lr=0.1)


def cluster(device: str) -> Cluster:
    return Cluster("somewhere", device, None, (Level("machine", 2, 1e9, 1e-5),))


def choice(timing: str, device: str = "V100", **options: Any) -> Profile:
    train = TrainRecipe(minibatch_size=4, optimizer=OptimizerRecipe("sgd", lr=0.1), max_epochs=1)
    recipe = Recipe(
        name="r",
        model={"name": "vgg16", **OPTIONS, **options},
        dataset={"name": "mnist5k"},
        train=train,
        engine=EngineRecipe(timing=timing),
    )
    request = profile_request(recipe, GRAPH, mnist5k(), [4])
    return profile_for(recipe, cluster(device), request, torch.device("cpu"))


@cache
def analytic() -> Profile:
    return choice("analytic")


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for measuring: return the models it was asked for."""
    monkeypatch.setenv("PIPEBENCH_CACHE", str(tmp_path))
    asked: list[str] = []
    computed = analytic()

    def stand_in(request: ProfileRequest, *args: Any, **kwargs: Any) -> Profile:
        asked.append(request.model)
        return replace(computed, source="measured", model=request.model)

    monkeypatch.setattr(choose, "measured_profile", stand_in)
    return asked


def test_auto_follows_the_cluster() -> None:
    assert choice("auto").source == "analytic"
    assert choice("auto", "local").source == "measured"


def test_measured_once_until_something_changes(measured: list[str]) -> None:
    first = choice("measured", "local")
    assert choice("measured", "local") == first
    assert len(measured) == 1
    choice("measured", "local", dropout=0.1)
    assert measured[1] == "vgg16(width=0.125, num_classes=10, in_channels=1, image_size=32, dropout=0.1)"


def test_computed_once_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []

    def spy(*args: Any) -> Profile:
        computed.append(args[1].name)
        return analytic_profile(*args)

    monkeypatch.setattr(choose, "analytic_profile", spy)
    first = choice("analytic")
    assert choice("analytic") == first
    assert computed == ["V100"]
    assert choice("analytic", "K80") != first
    choice("analytic", width=0.25)
    monkeypatch.setattr(choose, "own_hash", lambda: "other code")
    assert choice("analytic") == first
    assert computed == ["V100", "K80", "V100", "V100"]


class Striding(nn.Module):
    """A convolution whose stride changes what it costs, and no shape of a parameter."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 10, 5, stride=stride)
        self.head = nn.AdaptiveAvgPool2d(1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Map [samples, 1, height, width] float32 to [samples, 10] logits."""
        return self.head(self.convolution(image)).flatten(1)


@pytest.mark.parametrize("timing", ["analytic", "measured"])
def test_options_of_layers_are_part_of_the_key(timing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1.0: only names and shapes of weights were, so a changed stride in a helper's module kept the old profile."""

    def measured(request: ProfileRequest, *_: object, **__: object) -> Profile:
        return analytic_profile(request, DEVICES["V100"])

    monkeypatch.setattr(choose, "measured_profile", measured)
    recipe = Recipe(
        name="r", model={"name": "vgg16"}, dataset={"name": "mnist5k"}, engine=EngineRecipe(timing=timing),
        train=TrainRecipe(minibatch_size=4, optimizer=SGD, max_epochs=1),
    )  # fmt: skip
    machine = cluster("V100" if timing == "analytic" else "local")
    requests = (profile_request(recipe, trace(Striding(stride)), mnist5k(), [4]) for stride in (1, 2))
    one, two = (profile_for(recipe, machine, request, torch.device("cpu")) for request in requests)
    assert one.layers[4][0].output_bytes > two.layers[4][0].output_bytes


def test_measured_times_are_refused_for_other_devices() -> None:
    with pytest.raises(ProfileError, match="measured gives this machine's times, which say nothing about the V100"):
        choice("measured")
    with pytest.raises(ProfileError, match="analytic needs a device of the catalogue"):
        choice("analytic", "local")


def test_a_file_is_read_and_checked(tmp_path: Path) -> None:
    profile = choice("analytic")
    path = tmp_path / "profile.json"
    path.write_text(write_profile(profile))
    assert choice(str(path)) == load_profile(path) == profile
    path.write_text(write_profile(replace(profile, layers={8: profile.layers[4]}, load_s={8: 0.1})))
    with pytest.raises(ProfileError, match="has no times for 4 samples, only for 8; nothing is scaled"):
        choice(str(path))
    first, *others = profile.layers[4]
    path.write_text(write_profile(replace(profile, layers={4: (replace(first, name="conv"), *others)})))
    with pytest.raises(ProfileError, match="another model: layer 0 is conv, expected is features_0"):
        choice(str(path))
    path.write_text(write_profile(replace(profile, layers={4: profile.layers[4][:-1]})))
    with pytest.raises(ProfileError, match="another model: 40 layers, expected are 41"):
        choice(str(path))


def test_a_file_of_version_7_is_read(tmp_path: Path) -> None:
    """Runs store profiles, and go on from them."""
    profile, path = choice("analytic"), tmp_path / "profile.json"
    text = write_profile(profile).replace('"pipebench_profile": 8', '"pipebench_profile": 7')
    for before, now in (("keeps", "saved_storages"), ("puts_out", "output_storages"), ("takes", "input_storages")):
        assert f'"{now}": [\n' in text
        text = text.replace(f'"{now}"', f'"{before}"')
    path.write_text(text)
    assert load_profile(path) == profile


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"reads": (0, 1)}, "layer features_2 reads features_0, features_1, expected is features_1"),
        ({"inputs": ("images",)}, "layer features_2 reads images, expected is nothing"),
        (
            {"parameter_sizes": {"features.2.weight": 8, "features.2.bias": 32}},
            "layer features_2 has 8 bytes in parameter_sizes for features.2.weight, expected is 2304 bytes",
        ),
        (
            {"parameter_sizes": {"features.2.weight": 2304, "features.2.bias": 32, "more": 1}},
            "layer features_2 has 1 bytes in parameter_sizes for more, expected is nothing",
        ),
        ({"buffer_sizes": {"mean": 8}}, "layer features_2 has 8 bytes in buffer_sizes for mean, expected is nothing"),
        ({"untrained_sizes": {"mean": 8}}, "layer features_2 has 8 bytes in untrained_sizes for mean, expected is not"),
        ({"master_sizes": {"features.2.bias": 8}}, "layer features_2 has 8 bytes in master_sizes for features.2.bias"),
    ],
)
def test_a_file_that_contradicts_the_model_is_refused(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    """Edges were taken from the model without a word, and bytes from the file."""
    profile = choice("analytic")
    rows = [replace(row, **changes) if row.name == "features_2" else row for row in profile.layers[4]]
    path = tmp_path / "profile.json"
    path.write_text(write_profile(replace(profile, layers={4: tuple(rows)})))
    with pytest.raises(ProfileError, match=re.escape(f"profile {path} is of another model: {problem}")):
        choice(str(path))


def test_a_graph_txt_gives_times_and_the_model_bytes(tmp_path: Path) -> None:
    profile = choice("analytic")
    path = tmp_path / "graph.txt"
    path.write_text(write_graph_txt(profile, 4))
    found = choice(str(path))
    assert [replace(row, weight_s=0.0) for row in found.layers[4]] == [
        replace(row, weight_s=0.0) for row in profile.layers[4]
    ]
    halves = {row.name: row.weight_s / row.backward_s for row in found.layers[4] if row.weight_s}
    assert halves.pop("features_0") == 1
    assert {*halves} == {row.name for row in profile.layers[4] if row.kind in ("Conv2d", "Linear")} - {"features_0"}
    assert {*halves.values()} == {0.5}
    assert (found.source, found.state_bytes_per_byte) == ("file", profile.state_bytes_per_byte)
    assert found.load_s == profile.load_s
    path.write_text(write_graph_txt(replace(profile, layers={8: choice_at(8)}, load_s={8: 0.0}), 8))
    with pytest.raises(ProfileError, match="another model or number of samples: layer features_0 has 262144 bytes"):
        choice(str(path))
    path.write_text(path.read_text().replace("features_0", "node1"))
    with pytest.raises(ProfileError, match="another model: layer 0 is node1, expected is features_0"):
        choice(str(path))


def choice_at(size: int) -> tuple[LayerProfile, ...]:
    return analytic_profile(
        ProfileRequest(GRAPH, mnist5k(), [size], OptimizerRecipe("sgd", lr=0.1), "m"), DEVICES["V100"]
    ).layers[size]


MALFORMED = {
    "": "isn't JSON: EOF while parsing a value",
    "[]": "got a list, allowed is an object",
    "{": "isn't JSON: EOF while parsing an object",
    '{"a":' * 100_000: "isn't JSON: recursion limit exceeded",
    "{}": "an object with the key 'pipebench_profile' is expected",
    '{"pipebench_profile": 6}': "is a profile of version 6, version 8 is expected: profile again",
    '{"pipebench_profile": [8]}': "is a profile of version a list, version 8 is expected",
    '{"pipebench_profile": 8}': "'model' is missing",
    '{"pipebench_profile": 8, "modle": 1}': "unknown key 'modle'; did you mean 'model'?",
}
# Where in a good profile of two layers and a loss, what is put there, what is said.
WRONG: list[tuple[tuple[Any, ...], Any, str]] = [
    (("model",), 3, "model: got 3, allowed is text"),
    (("note",), "\ud800", "isn't JSON: unexpected end of hex escape at line 1"),
    (("layers",), [], "layers: got a list, allowed is an object"),
    (("layers",), {}, "has no layers"),
    (("layers", "x"), [], "layers: got 'x', allowed is numbers of samples as keys"),
    (("layers", "4"), [], "has no layer that computes"),
    (("layers", "4"), {}, "layers[4]: got an object, allowed is a list"),
    (("layers", "4", 0), 1, "layers[4][0]: got 1, allowed is an object"),
    (("layers", "4", 0, "forward_s"), -1.0, "layers[4][0].forward_s: got -1.0, allowed is seconds from 0"),
    (("layers", "4", 0, "forward_s"), float("nan"), "layers[4][0].forward_s: got nan"),
    (("layers", "4", 0, "forward_s"), 10**5000, "isn't JSON: number out of range"),
    (("layers", "4", 0, "forward_s"), 10**4000, "layers[4][0].forward_s: got a huge number"),
    (("layers", "4", 0, "backward_s"), True, "layers[4][0].backward_s: got true"),
    (("layers", "4", 0, "weight_s"), 9.0, "layer 0 (a): weight_s is 9, more than backward_s, 0.2"),
    (("layers", "4", 0, "output_bytes"), 1.5, "layers[4][0].output_bytes: got 1.5, allowed is a whole number from 0"),
    (("layers", "4", 0, "output_bytes"), 1, "layer 0 (a): gradient_bytes are 8, more than output_bytes, 1"),
    (("layers", "4", 0, "output_parts"), [3, 4], "layer 0 (a): output_parts add up to 7 bytes, output_bytes are 8"),
    (("layers", "4", 0, "size"), 1, "layers[4][0]: unknown key 'size'"),
    (("layers", "4", 0, "name"), "a\n", "name and kind must be printable"),
    (("layers", "4", 0, "is_input"), 1, "layers[4][0].is_input: got 1, allowed is true or false"),
    (("layers", "4", 0, "is_input"), True, "layer 0 (a): a model input reads nothing"),
    (("layers", "4", 0, "inputs"), ["b"], "layer 0 (a): input 'b' is the name of a layer"),
    (("layers", "4", 0, "parameter_sizes"), {"w": -1}, "layers[4][0].parameter_sizes.w: got -1"),
    (("layers", "4", 1, "reads"), [1], "layer 1 (b): reads are [1], allowed are ascending indices of layers before it"),
    (("layers", "4", 1, "name"), "a", "layer 1 (a): layer 0 has that name already"),
    (("layers", "4", 1, "reads"), [-1], "layers[4][1].reads[0]: got -1"),
    (("load_s",), {}, "has layers at 4 samples, but no load_s"),
    (("whole_step_s",), {"4": 0}, "has whole_step_s 0 for 4 samples"),
    (("whole_step_s",), {"5": 1}, "has whole_step_s 1 for 5 samples"),
    (("state_bytes_per_byte",), None, "state_bytes_per_byte: got null"),
]


def small() -> Profile:
    rows = (
        LayerProfile("a", "Linear", 0.1, 0.2, 8, 8, (), ("x",), {"a.weight": 16}, weight_s=0.15),
        LayerProfile("b", "ReLU", 0.1, 0.2, 8, 8, (0,)),
        LayerProfile("loss", "loss", 0.1, 0.2, 8, 8, (1,)),
    )
    return Profile("m", "V100", "measured", "", {4: rows}, 1e-12, 1e-5, {4: 0.1}, {4: 0.3})


@pytest.mark.parametrize(("where", "value", "sentence"), WRONG, ids=map(str, range(len(WRONG))))
def test_a_wrong_value_is_one_sentence_that_says_where(
    tmp_path: Path, where: tuple[Any, ...], value: Any, sentence: str
) -> None:
    data = json.loads(write_profile(small()))
    inner = data
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = "@"
    path = tmp_path / "p.json"
    text = "1" + "0" * (5000 if value == 10**5000 else 4000) if value in (10**5000, 10**4000) else json.dumps(value)
    path.write_text(json.dumps(data).replace('"@"', text))
    with pytest.raises(ProfileError) as refused:
        load_profile(path)
    assert str(refused.value).startswith(f"profile {path}: ")
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "where", [("state_bytes_per_byte",), ("layers", "4", 1, "reads"), ("layers", "4", 0, "weight_s")], ids=str
)
def test_nothing_may_be_left_out_of_a_file(tmp_path: Path, where: tuple[Any, ...]) -> None:
    data = json.loads(write_profile(small()))
    inner = data
    for key in where[:-1]:
        inner = inner[key]
    del inner[where[-1]]
    (tmp_path / "p.json").write_text(json.dumps(data))
    with pytest.raises(ProfileError, match=rf": '{where[-1]}' is missing$"):
        load_profile(tmp_path / "p.json")


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: text[:30])
def test_a_malformed_file_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ProfileError) as refused:
        load_profile(path)
    assert str(path) in str(refused.value)
    assert MALFORMED[text] in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_or_binary_file(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="can't be read: No such file or directory"):
        load_profile(tmp_path / "none.json")
    with pytest.raises(ProfileError, match="can't be read: Is a directory"):
        load_profile(tmp_path)
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match="is not text in UTF-8"):
        load_profile(tmp_path / "b")
    with pytest.raises(ProfileError, match=r"can't be read: .*embedded null"):
        load_profile("a\0b")
