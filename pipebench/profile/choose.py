"""Which profile a recipe gets: measured here, computed for its cluster's device, or read from a file.

Times of this machine are never combined with another cluster's links.
"""

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from pipebench.cluster import Cluster
from pipebench.errors import ProfileError
from pipebench.graph import LayerGraph
from pipebench.profile.analytic import analytic_profile
from pipebench.profile.cache import cached
from pipebench.profile.devices import find_device, local_device_name
from pipebench.profile.measure import measured_profile
from pipebench.profile.model import Profile
from pipebench.profile.walk import LOSS
from pipebench.recipe.schema import Recipe
from zoo import DATASETS, MODELS
from zoo.registry import Dataset

LOCAL = "local"


def profile_for(
    recipe: Recipe,
    cluster: Cluster,
    graph: LayerGraph,
    dataset: Dataset,
    sizes: Sequence[int],
    device: torch.device,
    on_progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Return the profile that `engine.timing` asks for.

    Args:
        recipe: the recipe; its model and optimizer describe and determine the profile.
        cluster: whose device the times are to be true for.
        graph: the layer graph.
        dataset: gives shapes, minibatches and the loss.
        sizes: numbers of samples that travel.
        device: where to measure.
        on_progress: told of (layers profiled, layers to profile); not called when a file or the cache has it.

    Raises:
        ProfileError: that timing isn't possible on this cluster, or the file doesn't fit.
    """
    timing = recipe.engine.timing
    if timing == "auto":
        timing = "measured" if cluster.device == LOCAL else "analytic"
    optimizer, text = recipe.train.optimizer, _model_text(recipe)
    if timing == "analytic":
        if cluster.device == LOCAL:
            raise ProfileError(
                "engine.timing: analytic needs a device of the catalogue, cluster local has none; use auto"
            )
        spec = find_device(cluster.device)
        return analytic_profile(graph, dataset, sizes, spec, optimizer, text, on_progress)
    if timing != "measured":
        return _fitting(load_profile(timing), timing, graph, sizes)
    if cluster.device != LOCAL:
        raise ProfileError(
            f"engine.timing: measured gives this machine's times, which say nothing about the {cluster.device} of "
            f"cluster {cluster.name}; use auto, analytic or a profile file, or cluster local"
        )
    return cached(
        _key_parts(recipe, graph, sizes, device),
        lambda: measured_profile(graph, dataset, sizes, optimizer, device, text, on_progress=on_progress),
    )


def load_profile(path: str | Path) -> Profile:
    """Read a profile file.

    Raises:
        ProfileError: it isn't there, or isn't a profile of this version.
    """
    try:
        return Profile.from_json(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"profile {path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    except KeyError as error:
        raise ProfileError(f"profile {path} isn't a pipebench profile: {error} is missing") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ProfileError(f"profile {path} isn't a pipebench profile: {error}") from error


def _fitting(profile: Profile, path: str, graph: LayerGraph, sizes: Sequence[int]) -> Profile:
    """Return the profile, once sure that it is one of this model at these sizes."""
    missing = sorted(set(sizes) - set(profile.layers))
    if missing:
        raise ProfileError(
            f"profile {path} has no times for {', '.join(map(str, missing))} samples, only for "
            f"{', '.join(map(str, sorted(profile.layers)))}; nothing is scaled, so profile those sizes too"
        )
    expected = [*(layer.name for layer in graph.layers), LOSS]
    for rows in profile.layers.values():
        found = [row.name for row in rows]
        for index, (ours, theirs) in enumerate(zip(expected, found, strict=False)):
            if ours != theirs:
                raise ProfileError(f"profile {path} is of another model: layer {index} is {theirs}, expected is {ours}")
        if len(found) != len(expected):
            raise ProfileError(f"profile {path} is of another model: {len(found)} layers, expected are {len(expected)}")
    return profile


def _model_text(recipe: Recipe) -> str:
    options = ", ".join(f"{key}={value}" for key, value in recipe.model.items() if key not in ("name", "target"))
    name = recipe.model.get("name") or recipe.model["target"]
    return f"{name}({options})"


def _key_parts(recipe: Recipe, graph: LayerGraph, sizes: Sequence[int], device: torch.device) -> dict[str, object]:
    """Return everything that determines a measured profile."""
    tensors = {**dict(graph.root.named_parameters()), **dict(graph.root.named_buffers())}
    return {
        "model": dict(recipe.model),
        "dataset": dict(recipe.dataset),
        "source": _source_hash(recipe),
        "graph": str(graph.graph),
        "shapes": {name: str((tuple(tensor.shape), tensor.dtype)) for name, tensor in tensors.items()},
        "sizes": sorted(sizes),
        "optimizer": asdict(recipe.train.optimizer),
        "device": local_device_name(device),
        "threads": torch.get_num_threads(),
        "deterministic": recipe.engine.deterministic,
        "tf32": recipe.engine.tf32,
        "torch": torch.__version__,
    }


def _source_hash(recipe: Recipe) -> str:
    """Return a hash of the files that make the model and the data set: edited code is profiled anew."""
    if "target" in recipe.model:
        model = importlib.import_module(str(recipe.model["target"]).split(":")[0]).__name__
    else:
        model = MODELS[recipe.model["name"]].make.__module__
    sources = [
        inspect.getsource(sys.modules[name]) for name in (model, DATASETS[recipe.dataset["name"]].make.__module__)
    ]
    return hashlib.sha256("".join(sources).encode()).hexdigest()
