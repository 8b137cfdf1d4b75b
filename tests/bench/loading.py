"""`nox -s bench`: images per second that a core loads for ImageNet, and predicted over measured time of loading.

The images are scikit-learn's two photographs at ImageNet's mean size, written as JPEG of quality 95; loading is
compared with decoding alone. The prediction is the virtual clock's of an epoch of minibatches of 38.5 MB, by the
profile's `load_s`.
"""

import contextlib
import importlib.resources
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import TensorDataset

import pipebench
from pipebench.zoo.imagenet import ImageNet, imagenet
from tests.bench.pairs import median_and_range, rounds

ROUNDS = 9
IMAGES = 32  # JPEG files per split
EPOCHS, NUM_IMAGES, SHAPE = 3, 256, (3, 224, 224)  # of `epoch_ratios`
PHOTOGRAPHS = ("china.jpg", "flower.jpg")
MEAN_SIZE, QUALITY = (500, 375), 95


def loading_table() -> Table:
    """Measure interleaved rounds on one core; return a table of medians and ranges."""
    with tempfile.TemporaryDirectory() as folder:
        data, kilobytes = _data(Path(folder))
        paths = [*Path(folder).glob("train/*/*")]
        ways = {
            "training: decoded, a random crop, flipped": lambda: data.fetch("train", range(IMAGES), ["image"]),
            "evaluation: decoded, resized, its middle": lambda: data.fetch("eval", range(IMAGES), ["image"]),
            "floor: decoded by Pillow alone": lambda: [_decode(path) for path in paths],
        }
        taken = rounds(ways, ROUNDS, time.process_time)
    size = "x".join(map(str, MEAN_SIZE))
    table = Table(f"images of {size}, {kilobytes:.0f} kB on average", "images per second and core (median)", "range")
    for name, seconds in taken.items():
        table.add_row(name, *median_and_range([IMAGES / each for each in seconds], ".0f"))
    return table


def epoch_ratios(device: str, num_rounds: int) -> list[float]:
    """Return an epoch's seconds by the virtual clock over those by the wall clock, of pairs of runs on a device.

    The model is one convolution, so that loading takes much of an epoch.
    """
    recipe = {
        "name": "loading",
        "model": {"target": "tests.bench.loading:model"},
        "dataset": {"target": "tests.bench.loading:images", "loss": "cross_entropy", "metrics": {"top1": "top1"}},
        "train": {"minibatch_size": 64, "max_epochs": EPOCHS, "optimizer": {"name": "sgd", "lr": 0.01}},
        "cluster": {"name": "local"},
        "parallelism": {"mode": "single"},
    }
    engine = {"device": device, "timing": "measured", "threads": 1}
    return [_epoch_ratio(recipe, engine) for _ in range(num_rounds)]


def _epoch_ratio(recipe: dict[str, Any], engine: dict[str, Any]) -> float:
    """Return the ratio of one pair of runs, with a new profile."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("loading.yaml").write_text(yaml.safe_dump(recipe))
        with patch.dict(os.environ, PIPEBENCH_CACHE=folder):
            runs = [
                pipebench.run("loading.yaml", on_progress=lambda facts: None, engine={**engine, "kind": kind})
                for kind in ("virtual", "distributed")
            ]
    virtual_s, wall_s = (run.metrics["epoch_time_s"] for run in runs)
    return virtual_s / wall_s


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 8, stride=8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )


def images() -> tuple[TensorDataset, TensorDataset]:
    """Return training data of `epoch_ratios`, float32 [256, 3, 224, 224], and 64 of the images for evaluation."""
    made = torch.rand(NUM_IMAGES, *SHAPE, generator=torch.Generator().manual_seed(0))
    classes = torch.arange(NUM_IMAGES) % 10
    return TensorDataset(made, classes), TensorDataset(made[:64], classes[:64])


def epoch_table(device: str = "cpu") -> Table:
    ratios = epoch_ratios(device, ROUNDS)
    table = Table(
        "minibatches of 38.5 MB, one convolution", "virtual epoch over the wall's (target 0.9 to 1.1)", "range"
    )
    table.add_row(device, *median_and_range(ratios, ".2f"))
    return table


def _data(folder: Path) -> tuple[ImageNet, float]:
    """Write both splits into a folder; return the data set and the mean size of a file in kB."""
    paths, photographs = [], importlib.resources.files("sklearn.datasets.images")
    for split in ("train", "val"):
        (folder / split / "photograph").mkdir(parents=True)
        for index in range(IMAGES):
            found = photographs / PHOTOGRAPHS[index % len(PHOTOGRAPHS)]
            paths.append(folder / split / "photograph" / f"{index}.JPEG")
            with found.open("rb") as file, Image.open(file) as photograph:
                photograph.resize(MEAN_SIZE).save(paths[-1], quality=QUALITY)
    data = imagenet(str(folder), num_train=IMAGES, num_eval=IMAGES, num_classes=1, loader_processes=0)
    return data, statistics.mean(path.stat().st_size for path in paths) / 1000


def _decode(path: Path) -> Image.Image:
    with Image.open(path) as picture:
        return picture.convert("RGB")


if __name__ == "__main__":
    torch.set_num_threads(1)
    Console(width=140).print(loading_table(), epoch_table())
