"""ImageNet-1K (ILSVRC 2012) from folders of JPEG files, one folder per class, with the standard augmentation.

All random numbers for a sample derive from (draw, index), so they don't depend on the minibatch, process or order.
"""

from __future__ import annotations

import hashlib
import math
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from pipebench.zoo import metrics
from pipebench.zoo.images import LabelledImages
from pipebench.zoo.late import torch
from pipebench.zoo.options import at_least, check_split
from pipebench.zoo.places import DATA_VARIABLE, data_folder
from pipebench.zoo.registry import DataError

_FOLDERS = {"train": "train", "eval": "val"}
_SUFFIXES = (".jpeg", ".jpg", ".png")
# Mean and standard deviation per channel over ImageNet's training images, as used by all of torchvision's models.
PIXEL_MEAN, PIXEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Random crops as Szegedy et al. (2015) describe them, section 6: 8% to 100% of the area, ratio 3/4 to 4/3.
_CROP_AREAS, _CROP_RATIOS, _CROP_TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10


class ImageNet(LabelledImages):
    """ImageNet; fields `image` and `label`.

    `image`: [samples, 3, image_size, image_size] float32, normalised by the constants above. Training samples are
    random crops, half of them flipped; held-out ones are resized and cropped in the middle. `label`: [samples] int64,
    the index of the class's folder in alphabetical order, as in torchvision's ImageFolder.
    """

    concurrent = True

    def __init__(self, root: str, sizes: Mapping[str, int], image_size: int, resize_size: int, processes: int) -> None:
        super().__init__((3, image_size, image_size), **sizes)
        self.root = root
        self._best = [k for k in (1, 5) if k == 1 or k < sizes["num_classes"]]  # with 5 classes, top5 is always 1
        self.metrics: Mapping[str, str] = {f"top{k}": "max" for k in self._best}
        self.image_size = image_size
        self.resize_size = resize_size
        self.loader_processes = processes

    def check(self) -> None:
        """Compare the folders with the expected layout and sizes; decodes no image.

        Raises:
            FileNotFoundError: a folder is missing; describes the layout.
            ValueError: sizes differ from the options; names the option to set.
        """
        folder = data_folder("imagenet", self.root, "train/<class>/*.JPEG and val/<class>/*.JPEG")
        _listings.cache_clear()  # files may have been added since the last check
        listings = _listings(str(folder))
        if listings["train"].classes != listings["eval"].classes:
            odd = sorted(set(listings["train"].classes) ^ set(listings["eval"].classes))
            raise ValueError(
                f"imagenet: {folder}/train and {folder}/val have to hold the same class folders, but {odd[0]} is in "
                f"one of them only ({len(odd)} such folders)"
            )
        for option, found in (
            ("num_classes", len(listings["train"].classes)),
            ("num_train", listings["train"].ends[-1]),
            ("num_eval", listings["eval"].ends[-1]),
        ):
            if found != getattr(self, option):
                raise ValueError(
                    f"imagenet: {option} is {getattr(self, option)}, but {folder} holds {found}: set it so"
                )

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return fields of the samples at `indices`, in that order; labels alone need no decoded image.

        Raises:
            DataError: an image can't be read; names the file.
        """
        check_split("imagenet", split)
        listing = _listings(str(data_folder("imagenet", self.root)))[split]
        fetched: dict[str, torch.Tensor] = {}
        for field in fields:
            if field == "label":
                fetched[field] = torch.tensor([listing.label(index) for index in indices], dtype=torch.int64)
            else:
                fetched[field] = self._images(split, listing, indices, draw)
        return fetched

    def score(self, output: Any, targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the numbers of samples whose label has the largest logit, `top1`, or one of the five largest, `top5`.

        With at most five classes, there is no `top5`.
        """
        logits = metrics.main_logits(output)
        return {f"top{k}": metrics.num_correct(logits, targets["label"], k) for k in self._best}

    def _images(self, split: str, listing: Listing, indices: Sequence[int], draw: int) -> torch.Tensor:
        images = torch.empty(len(indices), 3, self.image_size, self.image_size)
        for row, index in enumerate(indices):
            picture = _decoded(listing.path(index))
            if split == "train":
                images[row] = augmented(picture, self.image_size, generator_of(draw, index))
            else:
                images[row] = centred(picture, self.image_size, self.resize_size)
        return images


def imagenet(
    root: str = "",
    image_size: int = 224,
    resize_size: int = 256,
    loader_processes: int = 4,
    num_train: int = 1_281_167,
    num_eval: int = 50_000,
    num_classes: int = 1000,
) -> ImageNet:
    """Build the data set; reads nothing.

    Args:
        root: folder with `train` and `val`, each of which has a folder of images per class; empty: `imagenet` in the
            folder that PIPEBENCH_DATA names.
        image_size: height and width of the model's images, in pixels, at least 1.
        resize_size: length of the shorter side of held-out images before the crop, in pixels, at least image_size.
        loader_processes: processes in which an engine decodes images ahead; 0: in its own.
        num_train: training images.
        num_eval: held-out images.
        num_classes: classes, and so folders.
    """
    sizes = {"num_train": num_train, "num_eval": num_eval, "num_classes": num_classes}
    at_least(1, "imagenet", image_size=image_size, **sizes)
    if resize_size < image_size:
        raise ValueError(f"imagenet: resize_size is {resize_size}, allowed is image_size, {image_size}, or more")
    at_least(0, "imagenet", loader_processes=loader_processes)
    return ImageNet(root, sizes, image_size, resize_size, loader_processes)


class Listing(NamedTuple):
    """The images of one split."""

    folder: str  # that holds the class folders
    classes: tuple[str, ...]  # names of the class folders, in alphabetical order
    # File names per class, in alphabetical order, joined by null characters: a million separate strings would take
    # 100 MB in every loader process.
    names: tuple[str, ...]
    ends: tuple[int, ...]  # images of the classes up to and including each

    def label(self, index: int) -> int:
        """Return the class of an image."""
        if not 0 <= index < self.ends[-1]:
            raise IndexError(f"imagenet: there is no sample {index}, {self.folder} holds {self.ends[-1]} images")
        return bisect_right(self.ends, index)

    def path(self, index: int) -> str:
        """Return the file of an image."""
        label = self.label(index)
        start = self.ends[label - 1] if label else 0
        return os.path.join(self.folder, self.classes[label], self.names[label].split("\0")[index - start])


def generator_of(draw: int, index: int) -> torch.Generator:
    """Return the generator of all random numbers for a sample, seeded by (draw, index)."""
    digest = hashlib.blake2b(f"{draw} {index}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def random_crop(height: int, width: int, generator: torch.Generator) -> tuple[int, int, int, int]:
    """Draw the part of an image to train on, as torchvision's RandomResizedCrop, but from a given generator.

    Returns:
        Top, left, height and width, in pixels, within the image.
    """
    least, most = (math.log(ratio) for ratio in _CROP_RATIOS)
    for _ in range(_CROP_TRIES):
        area_draw, ratio_draw, top_draw, left_draw = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
        area = height * width * (_CROP_AREAS[0] + area_draw * (_CROP_AREAS[1] - _CROP_AREAS[0]))
        ratio = math.exp(least + ratio_draw * (most - least))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top, left = int(top_draw * (height - crop_height + 1)), int(left_draw * (width - crop_width + 1))
            return top, left, crop_height, crop_width
    # All tries were too wide or too high: take as much of the middle as the ratios allow.
    crop_width = min(width, max(1, round(height * _CROP_RATIOS[1])))
    crop_height = min(height, max(1, round(width / _CROP_RATIOS[0])))
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width


def augmented(picture: Any, size: int, generator: torch.Generator) -> torch.Tensor:
    """Return a random crop of a PIL image, flipped with probability 1/2: [3, size, size] float32, normalised."""
    from torchvision.transforms.v2 import functional  # here, since it takes a second

    crop = random_crop(picture.height, picture.width, generator)
    picture = functional.resized_crop(picture, *crop, [size, size], antialias=True)
    if torch.rand((), generator=generator).item() < 0.5:
        picture = functional.horizontal_flip(picture)
    return _normalised(picture)


def centred(picture: Any, size: int, resize_size: int) -> torch.Tensor:
    """Return the middle of a PIL image resized to a shorter side of `resize_size`: shape and dtype as `augmented`."""
    from torchvision.transforms.v2 import functional

    picture = functional.resize(picture, [resize_size], antialias=True)
    return _normalised(functional.center_crop(picture, [size, size]))


def _normalised(picture: Any) -> torch.Tensor:
    from torchvision.transforms.v2 import functional

    pixels = functional.pil_to_tensor(picture).float().div_(255)
    normalised: torch.Tensor = functional.normalize(pixels, list(PIXEL_MEAN), list(PIXEL_STD))
    return normalised


def _decoded(path: str) -> Any:
    from PIL import Image  # torchvision needs it too

    try:
        with Image.open(path) as picture:
            return picture.convert("RGB")  # some of ImageNet's files are grey, CMYK or PNG
    except Exception as error:  # PIL raises many classes
        raise DataError(f"imagenet: {path} can't be read as an image") from error


def _scan(folder: Path) -> Listing:
    """List a split's images.

    Raises:
        FileNotFoundError: the folder hasn't the expected layout.
    """
    expected = f"{folder.parent}/train/<class>/*.JPEG and {folder.parent}/val/<class>/*.JPEG"
    hint = f"set dataset.root or {DATA_VARIABLE} to where they are"
    if not folder.is_dir():
        raise FileNotFoundError(f"imagenet: expected are {expected}, but there is no folder {folder}; {hint}")
    classes = tuple(sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()))
    if not classes:
        hint = f"move its images into one folder per class, or {hint}"
        raise FileNotFoundError(f"imagenet: expected are {expected}, but {folder} has no class folders; {hint}")
    names = [sorted(name for name in os.listdir(folder / each) if name.lower().endswith(_SUFFIXES)) for each in classes]
    for name, found in zip(classes, names, strict=True):
        if not found:
            raise FileNotFoundError(f"imagenet: expected are {expected}, but {folder / name} has no images")
    return Listing(str(folder), classes, tuple(map("\0".join, names)), tuple(accumulate(map(len, names))))


@lru_cache(maxsize=4)
def _listings(folder: str) -> dict[str, Listing]:
    """List both splits' images; cached, so that loader processes, which are forked afterwards, have the listings."""
    return {split: _scan(Path(folder, name)) for split, name in _FOLDERS.items()}
