"""`nox -s bench`: how many of ImageNet's images a core loads, beside decoding them alone.

The images are scikit-learn's two photographs at ImageNet's mean size, written as JPEG of quality 95.
"""

import importlib.resources
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

from pipebench.zoo.imagenet import ImageNet, imagenet

ROUNDS, IMAGES = 9, 32
PHOTOGRAPHS = ("china.jpg", "flower.jpg")
MEAN_SIZE, QUALITY = (500, 375), 95


def loading_table() -> Table:
    """Measure interleaved rounds on one core, and return a table of medians and ranges."""
    with tempfile.TemporaryDirectory() as folder:
        data, kilobytes = _data(Path(folder))
        paths = [*Path(folder).glob("train/*/*")]
        rows: dict[str, Callable[[], object]] = {
            "training: decoded, a random crop, flipped": lambda: data.fetch("train", range(IMAGES), ["image"]),
            "evaluation: decoded, resized, its middle": lambda: data.fetch("eval", range(IMAGES), ["image"]),
            "floor: decoded by Pillow alone": lambda: [_decode(path) for path in paths],
        }
        taken: dict[str, list[float]] = {name: [] for name in rows}
        for counts in (False, *[True] * ROUNDS):
            for name, load in rows.items():
                started = time.process_time()
                load()
                if counts:
                    taken[name].append(IMAGES / (time.process_time() - started))
    size = "x".join(map(str, MEAN_SIZE))
    table = Table(f"images of {size}, {kilobytes:.0f} kB on average", "images per second and core (median)", "range")
    for name, rates in taken.items():
        table.add_row(name, f"{statistics.median(rates):.0f}", f"{min(rates):.0f} to {max(rates):.0f}")
    return table


def _data(folder: Path) -> tuple[ImageNet, float]:
    """Write both splits; return the data set and the mean size of a file in kB."""
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
    Console(width=140).print(loading_table())
