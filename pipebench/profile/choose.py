"""Chooses a recipe's profile: measured here, computed for its cluster's device, or read from a file.

A profile measured on this machine is never combined with another cluster's links.
"""

import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from pipebench import zoo
from pipebench.cluster import LOCAL, Cluster
from pipebench.errors import ProfileError
from pipebench.model.device import torch_settings
from pipebench.model.graph import LayerGraph
from pipebench.model.optimizer import state_bytes_per_byte
from pipebench.profile.analytic import analytic_profile
from pipebench.profile.cache import cached, own_hash
from pipebench.profile.devices import DEVICES, device_of, is_computed, local_device_name
from pipebench.profile.graph_txt import UNKNOWN_DEVICE
from pipebench.profile.load import load_profile
from pipebench.profile.measure import measured_profile
from pipebench.profile.model import LayerProfile, Profile
from pipebench.profile.request import ProfileRequest
from pipebench.profile.walk import rows_without_costs
from pipebench.recipe.engines import engine_kind
from pipebench.recipe.ranges import ANEW, MEASURED, TIMINGS
from pipebench.recipe.schema import Recipe
from pipebench.recipe.targets import targets_of
from pipebench.zoo.registry import Dataset


def profile_for(
    recipe: Recipe,
    cluster: Cluster,
    request: ProfileRequest,
    device: torch.device,
    on_progress: Callable[[str], None] | None = None,
) -> Profile:
    """Return the profile that `engine.timing` asks for.

    Args:
        recipe: names timing, model and settings.
        cluster: its device is the one to compute for.
        request: the model, its data and the sizes.
        device: where to measure.
        on_progress: gets what is profiled, in words; isn't called if a file or the cache has the profile.

    Raises:
        ProfileError: the cluster doesn't allow that timing, or the file is of another model, precision or size.
    """
    timing = _timing(recipe, cluster)
    if timing == "analytic":
        if cluster.device == LOCAL:
            raise ProfileError(
                "engine.timing: analytic needs a device of the catalogue, cluster local has none; use auto"
            )
        spec = device_of(cluster, recipe.engine)
        key: dict[str, object] = {"computed for": asdict(spec), "by": own_hash()}
        make = partial(analytic_profile, request, spec, on_progress)
    elif timing == "measured":
        _check_measurable(recipe, cluster, request.dataset)
        key = _machine(recipe, device)
        make = partial(measured_profile, request, device, on_progress=on_progress, engine=recipe.engine)
    else:
        return _used_here(recipe, device, _read_for(recipe, timing, request))
    found = cached({**_model_parts(recipe, request), **key}, make, anew=recipe.engine.timing == ANEW)
    return _used_here(recipe, device, found)


def _used_here(recipe: Recipe, device: torch.device, found: Profile) -> Profile:
    """Return a profile with what depends on this run: the recipe's precision, and the number of GPUs here.

    A file's or the cache's profile may have another run's.
    """
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    return replace(found, precision=recipe.train.precision, num_local_gpus=num_gpus)


def _check_measurable(recipe: Recipe, cluster: Cluster, dataset: Dataset) -> None:
    """Refuse to measure samples of several lengths, and to measure here for another cluster's device."""
    if dataset.lengths:
        raise ProfileError(
            f"dataset.lengths: {recipe.dataset.get('lengths')} needs times at every length, and only the data has "
            "minibatches to measure; use a cluster whose device is of the catalogue, or fixed"
        )
    if cluster.device != LOCAL and not engine_kind(recipe).in_processes:
        raise ProfileError(
            f"engine.timing: {recipe.engine.timing} gives this machine's times, which say nothing about the "
            f"{cluster.device} of cluster {cluster.name}; use auto, analytic or a profile file, or cluster local"
        )


def profile_request(recipe: Recipe, graph: LayerGraph, dataset: Dataset, sizes: Sequence[int]) -> ProfileRequest:
    """Return what to profile for a recipe."""
    return ProfileRequest(graph, dataset, sizes, recipe.train.optimizer, _model_text(recipe))


def measured_key(recipe: Recipe, request: ProfileRequest, device: torch.device) -> dict[str, object]:
    """Return the cache's key of a profile measured on a device of this machine: everything that determines it."""
    return {**_model_parts(recipe, request), **_machine(recipe, device)}


def _machine(recipe: Recipe, device: torch.device) -> dict[str, object]:
    """Return what determines a measured profile besides the model: device, settings and the measuring code."""
    with torch_settings(recipe.engine):
        return {
            "by": own_hash(),
            "device": local_device_name(device),
            "threads": torch.get_num_threads(),
            "deterministic": recipe.engine.deterministic,
            "tf32": recipe.engine.tf32,
            "channels_last": recipe.engine.channels_last,
        }


def _read_for(recipe: Recipe, path: str, request: ProfileRequest) -> Profile:
    """Read the profile file that `engine.timing` names; check that it is of this model, precision and lengths."""
    found = fitting(_loaded(recipe, path, request.dataset), path, request.graph, request.sizes)
    if _says_samples(found):
        return found
    # Any device of the catalogue will do: only the bytes are used, which are the same on all.
    return _with_bytes_of(analytic_profile(request, next(iter(DEVICES.values()))), found, path)


def profile_of_file(recipe: Recipe, dataset: Dataset) -> Profile:
    """Return the profile that `model.profile` names, of a recipe whose model is only a profile.

    Raises:
        ProfileError: it can't be read, or has another precision than the recipe, or other lengths than `dataset`.
    """
    path = str(recipe.model["profile"])
    found = _loaded(recipe, path, dataset)
    if not _says_samples(found):
        found = replace(found, state_bytes_per_byte=state_bytes_per_byte(recipe.train.optimizer))
    return replace(found, precision=recipe.train.precision)


def has_one_size(recipe: Recipe) -> bool:
    """Return whether a recipe's profile is a `graph.txt`, of one size; raises a ProfileError if it can't be read."""
    path = recipe.model.get("profile") or recipe.engine.timing
    return path not in TIMINGS and not _says_samples(load_profile(path))


def check_sizes(profile: Profile, path: str, sizes: Sequence[int]) -> None:
    """Raise a ProfileError that names the missing sizes, unless a profile has all of `sizes`, in samples."""
    missing = sorted(set(sizes) - set(profile.layers))
    if missing:
        one = "a graph.txt holds one size, taken to be train.minibatch_size; if a mode would cut it"
        raise ProfileError(
            f"profile {path} has no times for {', '.join(map(str, missing))} samples, only for "
            f"{', '.join(map(str, sorted(profile.layers)))}; nothing is scaled, so profile those sizes too"
            + ("" if _says_samples(profile) else f" ({one}, name parallelism.accumulate)")
        )


def _loaded(recipe: Recipe, path: str, dataset: Dataset) -> Profile:
    """Return the profile of a file, after checking that it is of the recipe's precision and the data set's lengths."""
    found, precision = load_profile(path, recipe.train.minibatch_size), recipe.train.precision
    if _says_samples(found) and found.precision != precision:
        raise ProfileError(f"profile {path} is of precision {found.precision}, train.precision is {precision}")
    _check_lengths(found, path, dataset)
    return found


def is_measured(recipe: Recipe, cluster: Cluster) -> bool:
    """Return whether a recipe's profile is measured here, which requires weights and data."""
    return recipe.model.get("profile") is None and _timing(recipe, cluster) == "measured"


def _timing(recipe: Recipe, cluster: Cluster) -> str:
    if is_computed(recipe.engine.timing, cluster):
        return "analytic"
    return "measured" if recipe.engine.timing in ("auto", *MEASURED) else recipe.engine.timing


def fitting(profile: Profile, path: str, graph: LayerGraph, sizes: Sequence[int]) -> Profile:
    """Check that a profile is of a model and has all of `sizes`; return it without rows of model inputs.

    Raises:
        ProfileError: it is of another model, or lacks a size; names `path`.
    """
    check_sizes(profile, path, sizes)
    expected = rows_without_costs(graph)
    return profile.with_rows(lambda rows: _fitting_rows(profile, rows, path, expected))


def _fitting_rows(
    profile: Profile, rows: Sequence[LayerProfile], path: str, expected: Sequence[LayerProfile]
) -> tuple[LayerProfile, ...]:
    """Return the rows without those of model inputs, with the edges of the model's layers."""
    work = [row for row in rows if not row.is_input]
    for index, (ours, row) in enumerate(zip(expected, work, strict=False)):
        if ours.name != row.name:
            raise ProfileError(
                f"profile {path} is of another model: layer {index} is {row.name}, expected is {ours.name}"
            )
        reads = [rows[read].name for read in row.reads], [expected[read].name for read in ours.reads]
        if _says_samples(profile) and (problem := _contradiction(row, ours, reads)):
            raise ProfileError(f"profile {path} is of another model: layer {ours.name} {problem}")
    if len(work) != len(expected):
        raise ProfileError(f"profile {path} is of another model: {len(work)} layers, expected are {len(expected)}")
    return tuple(replace(row, reads=ours.reads, inputs=ours.inputs) for row, ours in zip(work, expected, strict=True))


def _contradiction(row: LayerProfile, expected: LayerProfile, reads: tuple[list[str], list[str]]) -> str:
    """Return what a layer's row says of the model that isn't so, as the end of a sentence; "" if all is.

    `reads` are the names of the layers that it reads, in the profile and in the model.
    """
    for given, wanted in (reads, ([*row.inputs], [*expected.inputs])):
        if given != wanted:
            names = (", ".join(each) or "nothing" for each in (given, wanted))
            return f"reads {next(names)}, expected is {next(names)}"
    for kind in ("parameter_sizes", "master_sizes", "buffer_sizes", "untrained_sizes"):
        found, needed = getattr(row, kind), getattr(expected, kind)
        if kind == "untrained_sizes" and not found:  # profiles of earlier versions have none
            continue
        for name in {**needed, **found}:
            if found.get(name) != needed.get(name):
                sizes = (f"{each[name]} bytes" if name in each else "nothing" for each in (found, needed))
                return f"has {next(sizes)} in {kind} for {name}, expected is {next(sizes)}"
    return ""


def _check_lengths(profile: Profile, path: str, dataset: Dataset) -> None:
    """Check that a profile's lengths and their shares are those of the data set."""
    held, wanted = ([(each.columns, each.share) for each in lengths] for lengths in (profile.lengths, dataset.lengths))
    if held != wanted:
        lengths = (f"lengths {', '.join(str(n) for n, _ in each)}" if each else "one length" for each in (held, wanted))
        raise ProfileError(f"profile {path} has times of {next(lengths)}, dataset.lengths asks for {next(lengths)}")


def _with_bytes_of(shapes: Profile, profile: Profile, path: str) -> Profile:
    """Return a `graph.txt`'s profile with the bytes of `shapes`, which was computed from the model.

    The file doesn't say which outputs have a gradient, which layers share a parameter, and what layers save for their
    backwards.
    """
    layers = {}
    for size, rows in shapes.layers.items():
        for ours, theirs in zip(rows[:-1], profile.layers[size], strict=False):
            given = (theirs.output_bytes, theirs.parameter_bytes)
            if given != (ours.output_bytes, ours.parameter_bytes):
                raise ProfileError(
                    f"profile {path} is of another model or number of samples: layer {ours.name} has {given[0]} bytes "
                    f"of output and {given[1]} of parameters, expected are {ours.output_bytes} and "
                    f"{ours.parameter_bytes} at {size} samples"
                )
        pairs = zip(rows, profile.layers[size], strict=True)
        layers[size] = tuple(ours.with_times_of(theirs) for ours, theirs in pairs)
    return replace(
        profile,
        model=shapes.model,
        layers=layers,
        note=f"times read from {Path(path).name}, which says neither device nor optimizer time; bytes of the model",
        state_bytes_per_byte=shapes.state_bytes_per_byte,
    )


def _says_samples(profile: Profile) -> bool:
    """Return whether a profile states its sizes and device, unlike one from a `graph.txt`."""
    return profile.device != UNKNOWN_DEVICE


def _model_text(recipe: Recipe) -> str:
    options = ", ".join(f"{key}={value}" for key, value in recipe.model.items() if key not in ("name", "target"))
    return f"{recipe.model.get('name') or recipe.model['target']}({options})"


def _model_parts(recipe: Recipe, request: ProfileRequest) -> dict[str, object]:
    """Return what determines a profile, whether measured or computed."""
    graph = request.graph
    tensors = {**dict(graph.root.named_parameters()), **dict(graph.root.named_buffers())}
    return {
        "model": dict(recipe.model),
        "dataset": dict(recipe.dataset),
        "source": _source_hash(recipe, graph),
        "graph": str(graph.graph),
        "modules": {name: _described(module) for name, module in graph.root.named_modules()},
        "shapes": {name: str((tuple(tensor.shape), tensor.dtype)) for name, tensor in tensors.items()},
        "sizes": sorted(request.sizes),
        "precision": recipe.train.precision,
        "optimizer": asdict(recipe.train.optimizer),
        "torch": torch.__version__,
    }


def _source_hash(recipe: Recipe, graph: LayerGraph) -> str:
    """Return a hash of the source files of the model and the data set, so that edited code is profiled again."""
    names = {importlib.import_module(target.partition(":")[0]).__name__ for _, target in targets_of(asdict(recipe))}
    # Layers' classes may be of any module. Those of torch don't count, since its version is part of the key.
    classes = (type(module).__module__ for module in graph.root.modules())
    names |= {name for name in classes if not f"{name}.".startswith(("torch.", f"{zoo.__name__}."))}
    sources = [file.read_text(encoding="utf-8") for file in sorted(Path(zoo.__file__).parent.glob("*.py"))]
    return hashlib.sha256("".join([*sources, *map(_source, sorted(names))]).encode()).hexdigest()


def _source(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module])
    except (OSError, TypeError):  # built into Python, or written in C
        return module


def _described(module: nn.Module) -> str:
    """Return a module's class and options, such as a stride, without addresses, which differ from run to run."""
    return re.sub(r" at 0x[0-9a-f]+", "", f"{type(module).__qualname__}({module.extra_repr()})")
