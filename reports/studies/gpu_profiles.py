"""Measure full-size models layer by layer on a GPU: `python -m reports.studies.gpu_profiles`.

Every model gets a page and its profile as JSON, which `engine.timing` of a recipe and `pipebench plan --profile` take.
The models are those of the full-size recipes with their initial weights; samples are made up, so no data is needed.
"""

import argparse
import io
import math
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pipebench.errors import Fault, ProfileError, RecipeError
from pipebench.model.graph import LayerGraph, trace
from pipebench.profile.analytic import analytic_profile
from pipebench.profile.devices import DEVICES, DeviceSpec
from pipebench.profile.enough import StopRule
from pipebench.profile.measure import measured_profile
from pipebench.profile.model import Profile
from pipebench.profile.stored import write_profile
from pipebench.recipe.load import LoadedRecipe, load
from pipebench.recipe.make import make_dataset
from pipebench.show.profile_report import print_profile
from pipebench.train.profiled_model import initial_model
from pipebench.zoo.registry import Dataset

# The models, and what makes each of them narrow enough for a test; every layer stays.
SMALL: Mapping[str, Sequence[str]] = {
    "vgg16": ("model.width=0.0625", "model.image_size=32", "dataset.image_size=32"),
    "resnet50": ("model.width=0.0625", "dataset.image_size=32"),
    "gnmt8": (
        *("model.hidden_size=16", "model.source_vocabulary=64", "model.target_vocabulary=64"),
        *("dataset.vocabulary=64", "dataset.typical_length=5"),
    ),
    "awd_lm": (
        *("model.vocabulary=64", "model.embedding_size=8", "model.hidden_size=16"),
        *("dataset.vocabulary=64", "dataset.bptt=5"),
    ),
}
_SMALL_MINIBATCH = "train.minibatch_size=2"
_REPEATS, _SMALL_REPEATS = 11, 2
_WIDTH = 140

PAGE = """# {name}, measured layer by layer

`{command}` makes this page and the profile beside it, `{profile}`.

| | |
| --- | --- |
| date | {date} |
| device | {device} |
| torch | {torch}, CUDA {cuda}, Python {python} |
| recipe | `{recipe}`: {size} samples per minibatch, deterministic kernels {deterministic}, TF32 {tf32} |
| narrowed by | {narrowed} |
| samples | made up: {samples} |
| computed | {computed} |

```
{table}
```
"""


class Noise(Dataset):
    """Another data set's fields, filled with noise: what a measurement needs of samples, without the data.

    Every sample is a pure function of (split, index). Numbers are standard normal; ids are uniform, without 0, which is
    padding in text; a field NAME_length holds the number of columns of NAME: no sample is padded.
    """

    def __init__(self, like: Dataset, num_classes: int) -> None:
        """Take shapes, types and the loss of `like`, whose data isn't read.

        Args:
            like: the data set.
            num_classes: different ids, 2 or more, of fields for which `like` doesn't say how many there are.
        """
        self.like, self.num_classes, self.num_ids = like, num_classes, like.num_ids
        self.inputs, self.targets, self.metrics = like.inputs, like.targets, like.metrics
        self.num_train, self.num_eval, self.sequential = like.num_train, like.num_eval, like.sequential

    def example(self, num_samples: int) -> dict[str, torch.Tensor]:
        """Return every field of the other data set's example, on the meta device."""
        return self.like.example(num_samples)

    def fetch(
        self, split: str, indices: Sequence[int], fields: Sequence[str], draw: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return the fields asked for; first dimension = samples."""
        return {field: torch.stack([self._sample(field, split, index) for index in indices]) for field in fields}

    def loss(self, output: Any, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the other data set's loss, a scalar."""
        return self.like.loss(output, targets)

    def _sample(self, field: str, split: str, index: int) -> torch.Tensor:
        shapes = {name: value[0] for name, value in self.example(1).items()}
        whole = shapes.get(field.removesuffix("_length"))
        if field.endswith("_length") and whole is not None:
            return torch.tensor(whole.shape[0], dtype=shapes[field].dtype)
        number = (2 * index + (split == "train")) * len(shapes) + list(shapes).index(field)
        generator = torch.Generator().manual_seed(number)
        if shapes[field].is_floating_point():
            return torch.randn(shapes[field].shape, generator=generator, dtype=shapes[field].dtype)
        highest = self.num_ids.get(field, self.num_classes)
        return torch.randint(1, highest, shapes[field].shape, generator=generator, dtype=shapes[field].dtype)

    def __str__(self) -> str:
        return ", ".join(f"{name} {list(value.shape[1:])}" for name, value in self.example(1).items())


def measure(loaded: LoadedRecipe, device: torch.device, text: str, repeats: int) -> tuple[Profile, str, Noise]:
    """Measure a recipe's model on made-up samples at its minibatch size.

    Args:
        loaded: the recipe; its cluster and its parallelism play no part.
        device: where to measure.
        text: what the profile is of.
        repeats: timed passes.

    Returns:
        The profile, whose loading time is 0, since making noise isn't loading; what the same layers are computed to
        take on that device; and the samples.

    Raises:
        ProfileError: a layer fails; names it.
    """
    recipe = loaded.recipe
    size, optimizer = recipe.train.minibatch_size, recipe.train.optimizer
    real: Dataset = make_dataset(recipe.dataset)
    dataset = Noise(real, _num_outputs(loaded, real))
    graph = trace(initial_model(recipe), list(recipe.model.get("leaves") or ()))
    rule = StopRule(least=repeats, most=repeats, most_s=math.inf)
    profile = measured_profile(graph, dataset, [size], optimizer, device, text, rule, engine=recipe.engine)
    return _without_loading(profile), _computed(loaded, graph, dataset, profile), dataset


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write a page and a profile per model.

    Args:
        arguments: of the command line; None for the process's own.

    Raises:
        SystemExit: with one sentence, where there is no such device, or a model is no recipe or can't be measured.
    """
    asked = _parsed(arguments)
    device = torch.device(asked.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_profiles: torch finds no CUDA device here; --device cpu --small measures narrow models instead")
    if device.type == "cpu" and not asked.small:
        sys.exit("gpu_profiles: full-size models are measured on a GPU; on a CPU add --small, for narrow ones")
    asked.out.mkdir(parents=True, exist_ok=True)
    for name in asked.models or SMALL:
        try:
            _write(name, asked.small, device, asked.out)
        except (ProfileError, RecipeError) as error:
            sys.exit(f"gpu_profiles: {name}: {error}")


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_profiles", description=str(__doc__).partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(SMALL)}; all of them by default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("reports", "gpu"), help="folder to write to")
    parser.add_argument("--small", action="store_true", help="narrow models, two samples: to try this out")
    asked = parser.parse_args(arguments)
    for name in asked.models:
        if name not in SMALL:
            parser.error(f"no model {name!r}, allowed are {', '.join(SMALL)}")
    return asked


def _write(name: str, small: bool, device: torch.device, folder: Path) -> None:
    """Measure one model and write its two files."""
    narrowed = [*SMALL[name], _SMALL_MINIBATCH] if small else []
    loaded = load(f"{name}/single", narrowed)
    file = f"{name}-small" if small else name
    repeats = _SMALL_REPEATS if small else _REPEATS
    profile, computed, samples = measure(loaded, device, f"{file}, every layer of {loaded.source}", repeats)
    size, engine = loaded.recipe.train.minibatch_size, loaded.recipe.engine
    lines = io.StringIO()
    print_profile(file, profile, size, show_all=True, console=Console(file=lines, width=_WIDTH, color_system=None))
    page = PAGE.format(
        name=file,
        command=shlex.join(
            ["python", "-m", "reports.studies.gpu_profiles", name, "--device", device.type, *["--small"] * small]
        ),
        profile=f"{file}.profile.json",
        date=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        device=profile.device,
        torch=torch.__version__,
        cuda=torch.version.cuda if device.type == "cuda" else "not used",
        python=platform.python_version(),
        recipe=loaded.source,
        narrowed=" ".join(f"`{option}`" for option in narrowed) or "nothing",
        size=size,
        deterministic="on" if engine.deterministic else "off",
        tf32="on" if engine.tf32 else "off",
        samples=samples,
        computed=computed,
        table="\n".join(line.rstrip() for line in lines.getvalue().strip("\n").splitlines()),
    )
    (folder / f"{file}.profile.json").write_text(write_profile(profile) + "\n", encoding="utf-8")
    (folder / f"{file}.md").write_text(page, encoding="utf-8")
    print(f"{folder / file}.md, {folder / file}.profile.json")


def _num_outputs(loaded: LoadedRecipe, dataset: Dataset) -> int:
    """Return the last dimension of the logits."""
    model = initial_model(loaded.recipe, "meta").eval()
    example = dataset.example(1)
    with torch.no_grad():
        output = model(*(example[name] for name in dataset.inputs))
    if not isinstance(output, torch.Tensor):
        raise RecipeError(
            [Fault(loaded.source, "model", "returns more than logits, so labels can't be made up for it")]
        )
    return output.shape[-1]


def _without_loading(profile: Profile) -> Profile:
    return replace(profile, load_s=dict.fromkeys(profile.load_s, 0.0))


def _computed(loaded: LoadedRecipe, graph: LayerGraph, dataset: Dataset, measured: Profile) -> str:
    """Say how the analytic profile of the same device compares, where the catalogue has the device."""
    spec = _catalogued(measured.device)
    if spec is None:
        return "the catalogue of devices doesn't have this one"
    (size,) = measured.layers
    computed = analytic_profile(graph, dataset, [size], spec, loaded.recipe.train.optimizer, measured.model)
    own, here = (sum(row.forward_s + row.backward_s for row in each.layers[size]) for each in (computed, measured))
    return f"{own * 1e3:.2f} ms for all layers on {spec.name} ({spec.source}); measured: {here * 1e3:.2f} ms"


def _catalogued(name: str) -> DeviceSpec | None:
    """Return the catalogue's entry whose name stands in a GPU's name: `NVIDIA H100 80GB HBM3`."""
    words = f" {name.replace('-', ' ').lower()} "
    return next((spec for spec in DEVICES.values() if f" {spec.name.lower()} " in words), None)


if __name__ == "__main__":
    main()
