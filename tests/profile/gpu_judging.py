"""Compares computed profiles of recent devices with three profiles measured on one H100.

`h100_layers.csv` holds the times of the layers: fp32 without TF32, deterministic, 64 images of 3x224x224, torch 2.11
with CUDA 13.0 and cuDNN 9.19, the medians of 11 passes of `pipebench profile` with `engine.timing=measured`.
"""

import csv
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from pipebench.profile.devices import DEVICES, DeviceSpec
from pipebench.profile.efficiencies import Convolutions
from pipebench.profile.model import LayerProfile
from pipebench.profile.roofline import Roofline
from pipebench.zoo.alexnet import alexnet
from pipebench.zoo.resnet import resnet50
from pipebench.zoo.vgg import vgg16
from tests.profile.judging import Images, profile_rows

IMAGES = 64
MODELS: dict[str, Callable[[], nn.Module]] = {"alexnet": alexnet, "vgg16": vgg16, "resnet50": resnet50}
# Milliseconds of a whole forward and backward, in the runs that the layers were measured in.
WHOLE_MS = {"alexnet": 9.415, "vgg16": 116.28, "resnet50": 92.49}
# The same sums over layers where kernels need not be deterministic; AlexNet wasn't measured so.
FREE_MS = {"vgg16": 99.7, "resnet50": 68.6}
# What the host of that machine took to issue a layer's kernels while layers were timed one by one. Fitted on the layers
# of AlexNet and ResNet-50 that do next to nothing; a whole step, which isn't interrupted, has the catalogue's.
HOST_S = 60e-6
H100 = DEVICES["H100"]
AS_MEASURED = replace(H100, launch_s=HOST_S)
# Where the fit begins: about the rates that the layers show. Where terms never bind it stays there.
START = Convolutions(0.45, 0.6, 0.3, 0.12, 0.03, 0.07)


@dataclass(frozen=True)
class Judged:
    """A layer's computed and measured milliseconds of forward and backward."""

    layer: str
    kind: str
    computed: float
    measured: float


def judged(model: str, device: DeviceSpec = AS_MEASURED) -> list[Judged]:
    """Return the layers of a model, the loss included."""
    rows = computed_rows(model, device)
    measured = _measured()[model]
    assert [row.name for row in rows] == [row["layer"] for row in measured]
    return [
        Judged(ours.name, ours.kind, (ours.forward_s + ours.backward_s) * 1e3, _ms(theirs))
        for ours, theirs in zip(rows, measured, strict=True)
    ]


def computed_rows(model: str, device: DeviceSpec) -> tuple[LayerProfile, ...]:
    """Return the computed layers of a model at the measured number of images."""
    return profile_rows(MODELS[model], Images(), IMAGES, device=device)


def ratio(layers: Sequence[Judged]) -> float:
    """Return computed over measured time of all layers together."""
    return sum(each.computed for each in layers) / sum(each.measured for each in layers)


def factor(layers: Sequence[Judged], share: float = 0.01) -> float:
    """Return the geometric mean of the factors by which layers of more than a share of the time are wrong."""
    total = sum(each.measured for each in layers)
    logs = [abs(math.log(each.computed / each.measured)) for each in layers if each.measured > share * total]
    return math.exp(sum(logs) / len(logs))


@dataclass(frozen=True)
class Product:
    """One of the three products of a convolution: its seconds at all of the peaks, and the fractions it depends on."""

    arithmetic_s: float
    memory_s: float
    arithmetic: str  # which of `Convolutions`
    memory: str
    measured_s: float

    def seconds(self, known: Mapping[str, float]) -> float:
        return max(self.arithmetic_s / known[self.arithmetic], self.memory_s / known[self.memory])


def products(model: str) -> list[Product]:
    """Return the products of a model's convolutions that were measured to take any time."""
    measured = {row["layer"]: row for row in _measured()[model]}
    with torch.device("meta"):
        root = MODELS[model]()
    shapes: dict[str, torch.Size] = {}

    def note(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        return lambda _module, args: shapes.update({name: args[0].shape})

    own = {name: module for name, module in root.named_modules() if isinstance(module, nn.Conv2d)}
    hooks = [module.register_forward_pre_hook(note(name)) for name, module in own.items()]
    with torch.no_grad():
        root(torch.empty(IMAGES, 3, 224, 224, device="meta"))
    for hook in hooks:
        hook.remove()
    found: list[Product] = []
    for name, shape in shapes.items():
        row = measured[name.replace(".", "_")]
        forward, backward, weight = (float(row[key]) * 1e-3 for key in ("forward_ms", "backward_ms", "weight_ms"))
        found.extend(_products(own[name], shape, (forward, backward - weight, weight)))
    return [each for each in found if each.measured_s > 1e-5]


def _products(module: nn.Conv2d, shape: torch.Size, measured: tuple[float, float, float]) -> list[Product]:
    at_peak, endless = Convolutions(1, 1, 1, 1, 1, 1), 1e12
    arithmetic = _seconds(module, shape, Convolutions(1, 1, endless, endless, endless, endless))
    memory = _seconds(module, shape, replace(at_peak, direct=endless, winograd_forward=endless))
    doubled = _seconds(module, shape, Convolutions(1, 2, endless, endless, endless, endless))
    forward = "winograd_forward" if doubled[0] < arithmetic[0] else "direct"
    of_input = "input_memory" if module.stride == (1, 1) else "strided_input_memory"
    names = ((forward, "forward_memory"), ("direct", of_input), ("direct", "weight_memory"))
    return [
        Product(a, m, *name, theirs) for a, m, name, theirs in zip(arithmetic, memory, names, measured, strict=True)
    ]


def _seconds(module: nn.Conv2d, shape: torch.Size, known: Convolutions) -> tuple[float, float, float]:
    device = replace(with_convolutions(H100, known), launch_s=0.0)
    x = torch.empty(shape, device="meta", requires_grad=shape[1] > 3)

    def seconds(work: Callable[[], object]) -> float:
        with Roofline(device) as roofline:
            work()
        return float(roofline.seconds)

    out, weight = module(x), module.weight
    like = torch.empty_like(out)
    of_weight = seconds(lambda: torch.autograd.grad([out], [weight], [like], retain_graph=True))
    of_input = seconds(lambda: torch.autograd.grad([out], [x], [like], retain_graph=True)) if x.requires_grad else 0.0
    with torch.no_grad():
        return seconds(lambda: module(x)), of_input, of_weight


def fitted(models: Sequence[str], start: Convolutions) -> Convolutions:
    """Return the fractions that make these models' convolutions least wrong: one constant at a time, in smaller steps.

    The error of a model is the mean over its products of |ln(computed / measured)|, weighted by their time, and that of
    its total.
    """
    known = {model: products(model) for model in models}
    best = {name: value for name, value in vars(start).items() if name != "gradients"}
    error = _error(known, best)
    for step in (1.3, 1.1, 1.03):
        moved = True
        while moved:
            moved = False
            for name, change in itertools.product([*best], (step, 1 / step)):
                tried = {**best, name: best[name] * change}
                tried_error = _error(known, tried)
                if tried_error < error - 1e-6:
                    best, error, moved = tried, tried_error, True
    return Convolutions(**best)


def with_convolutions(device: DeviceSpec, known: Convolutions) -> DeviceSpec:
    """Return a device with other fractions of convolutions."""
    return replace(device, efficiencies=replace(device.efficiencies, convolutions=known))


def _error(known: Mapping[str, Sequence[Product]], tried: Mapping[str, float]) -> float:
    error = 0.0
    for each in known.values():
        total = sum(product.measured_s for product in each)
        computed = [product.seconds(tried) for product in each]
        error += abs(math.log(sum(computed) / total))
        error += sum(
            product.measured_s / total * abs(math.log(ours / product.measured_s))
            for ours, product in zip(computed, each, strict=True)
        )
    return error


def _measured() -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = defaultdict(list)
    with (Path(__file__).parent / "h100_layers.csv").open() as file:
        for row in csv.DictReader(file):
            found[row["model"]].append(row)
    return found


def _ms(row: dict[str, str]) -> float:
    return float(row["forward_ms"]) + float(row["backward_ms"])
