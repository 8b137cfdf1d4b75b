"""Compares the analytic profile with the PipeDream artifact's two V100 profiles, and with published training rates.

The measured files aren't part of this repository; they are read from `../shared/profiles`.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn
from torch.nn import functional

from pipebench.model.graph import trace
from pipebench.profile.devices import DEVICES, DeviceSpec
from pipebench.profile.efficiencies import SHIPPED, Efficiencies
from pipebench.profile.model import LayerProfile
from pipebench.profile.roofline import priced
from pipebench.profile.walk import walk
from pipebench.zoo.gnmt import gnmt8
from pipebench.zoo.registry import Dataset
from tests.support import Blobs

FOLDER = Path(__file__).parents[3] / "shared" / "profiles"
VGG_FILE, GNMT_FILE = FOLDER / "vgg16_v100_b128.graph.txt", FOLDER / "gnmt8_v100.graph.txt"
# Derived from the GNMT file: an LSTM's hidden state takes 131,072 bytes = 32 sentences * 1024 * 4, its output 48 times
# that in the encoder and 47 times in the decoder, and the attention's scores 288,768 bytes = 32 * 47 * 48 * 4.
SENTENCES, FILE_WORDS = 32, 48
# The artifact times modules; functions (add, concatenation) and the loss have no times in it.
TIMED = frozenset(
    (
        *("Conv2d", "ReLU", "MaxPool2d", "Linear", "Dropout"),
        *("Embedding", "LSTM", "EmuBidirLSTM", "RecurrentAttention", "Classifier"),
    )
)
# The artifact's names of the layers that the zoo calls otherwise.
ARTIFACT_KINDS = {"WordEmbedding": "Embedding", "LSTMLayer": "LSTM", "BidirectionalLSTM": "EmuBidirLSTM"}
# Rows whose backward the artifact books on the other of the two: see the report.
SWAPPED = (("source_embedder", "bidirectional"), ("decoder_2", "classifier"))

V100 = DEVICES["V100"]
V100_SXM2 = replace(V100, name="V100 SXM2", flops_per_s=15.7e12, source="NVIDIA V100 datasheet, SXM2 16 GB")
P100 = DeviceSpec("P100", 10.6e12, 732e9, 16 * 10**9, 56, 12e9, "NVIDIA P100 datasheet, SXM2 16 GB")


@dataclass(frozen=True)
class Judged:
    """A layer's computed and measured milliseconds."""

    name: str
    kind: str
    computed_forward: float
    computed_backward: float
    measured_forward: float
    measured_backward: float
    parameter_bytes: int
    measured_parameter_bytes: int

    @property
    def computed(self) -> float:
        return self.computed_forward + self.computed_backward

    @property
    def measured(self) -> float:
        return self.measured_forward + self.measured_backward


@dataclass(frozen=True)
class Rate:
    """A published training rate in samples per second."""

    model: str
    make: Callable[[], nn.Module]
    device: DeviceSpec
    batch: int
    published: float
    side: int = 224

    def computed(self, efficiencies: Efficiencies | None = None) -> float:
        """Return the computed rate; forward, backward and loss."""
        rows = profile_rows(self.make, Images(self.side), self.batch, efficiencies, self.device)
        return self.batch / sum(row.forward_s + row.backward_s for row in rows)


def _make(name: str, **options: object) -> Callable[[], nn.Module]:
    return lambda: getattr(torchvision.models, name)(weights=None, **options)


_INCEPTION = _make("inception_v3", aux_logits=False, init_weights=False)
# TensorFlow, "Benchmarks" (May 2017, cuDNN 5.1): one P100 of a DGX-1, training, synthetic data.
FITTED_ON = (
    Rate("Inception-v3", _INCEPTION, P100, 64, 142, side=299),
    Rate("ResNet-50", _make("resnet50"), P100, 64, 219),
    Rate("ResNet-152", _make("resnet152"), P100, 64, 91.8),
    Rate("VGG-16", _make("vgg16"), P100, 64, 154),
)
# NVIDIA, DeepLearningExamples, ResNet-50 v1.5 for PyTorch, container 21.03: one V100 of a DGX-1, fp32; the batch isn't
# given beside the rate. The others: TensorFlow's as above, the K80s being those of Google's cloud.
NOT_FITTED = (
    Rate("ResNet-50", _make("resnet50"), V100_SXM2, 128, 367),
    Rate("AlexNet", _make("alexnet"), P100, 512, 2987),
    Rate("ResNet-50", _make("resnet50"), DEVICES["K80"], 64, 51.9),
    Rate("VGG-16", _make("vgg16"), DEVICES["K80"], 32, 35.4),
)


class Images(Blobs):
    """Shapes of images, no data."""

    def __init__(self, side: int = 224) -> None:
        super().__init__()
        self.side = side

    def example(self, num_samples: int) -> dict[str, torch.Tensor]:
        image = torch.empty(num_samples, 3, self.side, self.side, device="meta")
        return {"x": image, "label": torch.empty(num_samples, dtype=torch.int64, device="meta")}


class Sentences(Blobs):
    """Shapes of translation, no data. All sentences are of one length."""

    inputs: Sequence[str] = ("source", "source_length", "target_in")
    targets: Sequence[str] = ("target_out",)

    def __init__(self, source_words: int, target_words: int) -> None:
        super().__init__()
        self.source_words, self.target_words = source_words, target_words

    def example(self, num_samples: int) -> dict[str, torch.Tensor]:
        def words(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int64, device="meta")

        return {
            "source": words(num_samples, self.source_words),
            "source_length": words(num_samples),
            "target_in": words(num_samples, self.target_words),
            "target_out": words(num_samples, self.target_words),
        }

    def loss(self, output: Any, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(output.flatten(0, 1), targets["target_out"].flatten(), reduction="sum")


def profile_rows(
    make: Callable[[], nn.Module],
    dataset: Dataset,
    size: int,
    efficiencies: Efficiencies | None = None,
    device: DeviceSpec = V100,
) -> tuple[LayerProfile, ...]:
    """Return a model's analytic rows with any efficiencies on any device."""
    with torch.device("meta"):
        graph = trace(make().train())
    return walk(graph, graph.root, dataset, dataset.example(size), lambda work: priced(device, work, efficiencies))


def vgg(efficiencies: Efficiencies | None = None) -> list[Judged]:
    return _matched(profile_rows(_make("vgg16"), Images(), 128, efficiencies), VGG_FILE)


def gnmt(words: int, efficiencies: Efficiencies | None = None) -> list[Judged]:
    """Return the layers of GNMT with so many source words, and one target word less."""
    return _matched(profile_rows(gnmt8, Sentences(words, words - 1), SENTENCES, efficiencies), GNMT_FILE)


def mean_words() -> int:
    """Return the source words at which the classifier's forward, one large product, takes its measured time."""

    def share(words: int) -> float:
        return ratio(gnmt(words)[-1:], forward=True)

    fewest = 20
    later = fewest + bisect_left(range(fewest, FILE_WORDS + 1), 1.0, key=share)  # more words take longer
    return min((later - 1, later), key=lambda words: abs(share(words) - 1))


def ratio(layers: Sequence[Judged], *, forward: bool = False) -> float:
    if forward:
        return sum(x.computed_forward for x in layers) / sum(x.measured_forward for x in layers)
    return sum(x.computed for x in layers) / sum(x.measured for x in layers)


def rejoined(layers: Sequence[Judged]) -> list[Judged]:
    """Return the layers with each pair that the artifact mixes up as one."""
    result = []
    by_name = {layer.name: layer for layer in layers}
    seconds = {b: a for a, b in SWAPPED if a in by_name}
    firsts = set(seconds.values())
    for layer in layers:
        if layer.name in firsts:
            continue
        other = by_name.get(seconds.get(layer.name, ""))
        result.append(_sum(other, layer) if other else layer)
    return result


def without_swapped(layers: Sequence[Judged]) -> list[Judged]:
    """Return the layers without the pairs that the artifact mixes up."""
    names = {name for pair in SWAPPED for name in pair}
    return [layer for layer in layers if layer.name not in names]


def rank_correlation(layers: Sequence[Judged]) -> float:
    """Return Spearman's rank correlation of computed and measured time, weighted by measured time."""
    x, y = _ranks([layer.computed for layer in layers]), _ranks([layer.measured for layer in layers])
    weights = [layer.measured for layer in layers]
    total = sum(weights)

    def mean(values: Sequence[float]) -> float:
        return sum(w * v for w, v in zip(weights, values, strict=True)) / total

    dx, dy = [v - mean(x) for v in x], [v - mean(y) for v in y]
    product = mean([a * b for a, b in zip(dx, dy, strict=True)])
    return float(product / (mean([a * a for a in dx]) * mean([b * b for b in dy])) ** 0.5)


def fitted(layers: Callable[[Efficiencies], Sequence[Judged]]) -> tuple[float, Efficiencies]:
    """Return the factor on both efficiencies of arithmetic with which totals agree, and the layers computed with it."""
    low, high = 0.1, 10.0
    for _ in range(30):
        factor = (low * high) ** 0.5
        low, high = (factor, high) if ratio(layers(scaled(factor))) > 1 else (low, factor)
    return factor, scaled(factor)


def scaled(factor: float) -> Efficiencies:
    """Return the shipped efficiencies with those of arithmetic times a factor."""
    return replace(SHIPPED, product=SHIPPED.product * factor, convolution=SHIPPED.convolution * factor)


def _matched(rows: Sequence[LayerProfile], path: Path) -> list[Judged]:
    """Pair computed and measured rows, both in execution order; their kinds must agree one by one."""
    named = [replace(row, kind=ARTIFACT_KINDS.get(row.kind, row.kind)) for row in rows]
    computed = [row for row in named if row.kind in TIMED]
    measured = [row for row in _measured(path) if row[0] in TIMED]
    assert [row.kind for row in computed] == [kind for kind, *_ in measured]
    return [
        Judged(
            row.name, row.kind, row.forward_s * 1e3, row.backward_s * 1e3, forward, backward,
            row.parameter_bytes, parameter_bytes,
        )
        for row, (_, forward, backward, parameter_bytes) in zip(computed, measured, strict=True)
    ]  # fmt: skip


def _measured(path: Path) -> list[tuple[str, float, float, int]]:
    """Return kind, forward and backward milliseconds, and parameter bytes, in execution order."""
    pattern = r"node(\d+) -- (\w+).* -- forward_compute_time=([\d.]+), backward_compute_time=([\d.]+), .*=([\d.]+)$"
    found = re.findall(pattern, path.read_text(), re.MULTILINE)
    if path == VGG_FILE:  # its lines are shuffled; a chain's numbers are in order
        found.sort(key=lambda fields: int(fields[0]))
    return [(kind, float(forward), float(backward), int(float(size))) for _, kind, forward, backward, size in found]


def _sum(a: Judged, b: Judged) -> Judged:
    return Judged(
        f"{a.name} + {b.name}",
        f"{a.kind} + {b.kind}",
        a.computed_forward + b.computed_forward,
        a.computed_backward + b.computed_backward,
        a.measured_forward + b.measured_forward,
        a.measured_backward + b.measured_backward,
        a.parameter_bytes + b.parameter_bytes,
        a.measured_parameter_bytes + b.measured_parameter_bytes,
    )


def _ranks(values: Sequence[float]) -> list[float]:
    """Return ranks; equal values share their mean."""
    return [sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]
