"""Which profile a recipe gets, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipebench.cluster import Cluster, Level
from pipebench.errors import ProfileError
from pipebench.graph import trace
from pipebench.profile import Profile, choose, load_profile, profile_for
from pipebench.recipe.schema import EngineRecipe, OptimizerRecipe, Recipe, TrainRecipe
from zoo.mnist5k import mnist5k
from zoo.vgg import vgg16

OPTIONS: dict[str, Any] = {"width": 0.125, "num_classes": 10, "in_channels": 1, "image_size": 32}
GRAPH = trace(vgg16(**OPTIONS))


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
    return profile_for(recipe, cluster(device), GRAPH, mnist5k(), [4], torch.device("cpu"))


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for measuring: return the models it was asked for."""
    monkeypatch.setenv("PIPEBENCH_CACHE", str(tmp_path))
    asked: list[str] = []
    computed = choice("analytic")

    def stand_in(*args: Any, **kwargs: Any) -> Profile:
        asked.append(args[5])
        return replace(computed, source="measured", model=args[5])

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


def test_times_of_this_machine_stay_here() -> None:
    with pytest.raises(ProfileError, match="measured gives this machine's times, which say nothing about the V100"):
        choice("measured")
    with pytest.raises(ProfileError, match="analytic needs a device of the catalogue"):
        choice("analytic", "local")


def test_a_file_is_read_and_checked(tmp_path: Path) -> None:
    profile = choice("analytic")
    path = tmp_path / "profile.json"
    path.write_text(profile.to_json())
    assert choice(str(path)) == load_profile(path) == profile
    path.write_text(replace(profile, layers={8: profile.layers[4]}).to_json())
    with pytest.raises(ProfileError, match="has no times for 4 samples, only for 8; nothing is scaled"):
        choice(str(path))
    path.write_text(replace(profile, layers={4: profile.layers[4][1:]}).to_json())
    with pytest.raises(ProfileError, match="another model: layer 0 is features_1, expected is features_0"):
        choice(str(path))
    path.write_text(replace(profile, layers={4: profile.layers[4][:-1]}).to_json())
    with pytest.raises(ProfileError, match="another model: 40 layers, expected are 41"):
        choice(str(path))


MALFORMED = {
    "": "isn't a pipebench profile: Expecting value",
    "[]": "isn't a pipebench profile",
    "{}": "isn't a pipebench profile: 'pipebench_profile' is missing",
    '{"pipebench_profile": 7}': "a profile of version 2 is expected",
    '{"pipebench_profile": 1}': "'layers' is missing",
    '{"pipebench_profile": 1, "layers": {"x": []}}': "isn't a pipebench profile: invalid literal",
    '{"pipebench_profile": 1, "layers": {"1": [{"name": "a"}]}}': "isn't a pipebench profile",
    '{"pipebench_profile": 1, "layers": {}, "load_s": [], "whole_step_s": {}}': "isn't a pipebench profile",
    '{"pipebench_profile": 1, "layers": {}, "load_s": {}, "whole_step_s": {}}': "isn't a pipebench profile",
}


@pytest.mark.parametrize("text", MALFORMED)
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
    with pytest.raises(ProfileError, match="can't be read: "):
        load_profile(tmp_path / "b")
