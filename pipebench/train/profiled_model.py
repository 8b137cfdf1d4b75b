"""A recipe's model, data and costs.

The model is traced to layers, and checked against the data set that feeds it; a profile says what its layers cost at
every size that travels.
"""

import logging
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from pipebench.cluster import Cluster
from pipebench.errors import GraphError, PlanError, TracingError
from pipebench.model.graph import LayerGraph, as_one_layer, trace
from pipebench.model.precision import in_precision
from pipebench.model.rounded_data import RoundedData
from pipebench.model.sampling import Size, UnitShape, mix, name_hash, seed_default_generator
from pipebench.model.trace_check import check_traced
from pipebench.profile.as_graph import InputsOf, graph_of, work_of
from pipebench.profile.choose import check_sizes, fitting, has_one_size, is_measured, profile_for, profile_of_file
from pipebench.profile.model import Profile
from pipebench.recipe.engines import engine_kind
from pipebench.recipe.make import make_dataset, make_model
from pipebench.recipe.rules_zoo import one_line
from pipebench.recipe.schema import Recipe
from pipebench.recipe.weightless import weightless
from pipebench.schedule.modes import AUTO
from pipebench.train.request import travelling_sizes, whole_minibatches
from zoo.plain import seeded
from zoo.registry import Dataset

_LOG = logging.getLogger("pipebench.train.profiled_model")
KEPT = "of the kept decision"


@dataclass(frozen=True)
class ProfiledModel:
    """A recipe's model, data and costs.

    Attributes:
        dataset: the data.
        graph: the layer graph, with its initial weights where they are needed; else on the meta device.
        device: where arithmetic happens.
        profile: layer costs at every size that travels.
        left_over: samples of an epoch that the profile has no times for, and the data not, therefore.
    """

    dataset: Dataset
    graph: LayerGraph
    device: torch.device
    profile: Profile
    left_over: int = 0


def profile_model(
    recipe: Recipe,
    cluster: Cluster,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    whole_minibatches: bool = False,
    trains: bool = False,
    kept: Profile | None = None,
    whole_only: bool = False,
) -> ProfiledModel:
    """Trace and profile a recipe's model.

    Args:
        recipe: a validated recipe.
        cluster: whose device the times are to be true for.
        on_progress: told of (layers profiled, layers to profile).
        whole_minibatches: profile whole minibatches too where only microbatches travel.
        trains: whether the weights are needed for more than a profile.
        kept: the profile, where it is known already.
        whole_only: see `prepare`.

    Raises:
        GraphError, PlanError, ProfileError: the model can't be traced or profiled, or isn't fed by the data set.
    """
    device = choose_device(recipe.engine.device)
    dataset, left_over = _data(recipe, whole_only=whole_only)
    if recipe.model.get("profile") is not None:
        return _model_of_file(recipe, dataset, left_over, device)
    measures = kept is None and is_measured(recipe, cluster)
    is_users = recipe.model.get("target") is not None
    on_meta = not trains and not is_users and not measures
    model = initial_model(recipe, "meta" if on_meta else "cpu")
    graph = _layer_graph(recipe, model, dataset.argument_names or len(dataset.inputs))
    dataset = dataset.feeding(graph.inputs)
    _check_fed(model, graph, dataset, str(recipe.dataset.get("name") or recipe.dataset.get("target")))
    exact, graph = (graph, dataset), in_precision(graph, recipe.train.precision)
    if graph.rounding is not None:
        dataset = RoundedData(dataset, graph.rounding.low_type)
    sizes = travelling_sizes(recipe, dataset, whole_minibatches=whole_minibatches)
    if kept is not None:
        profile = fitting(kept, KEPT, graph, sizes)
    else:
        profile = profile_for(recipe, cluster, graph, dataset, sizes, device, on_progress)
    decides = kept is None and (trains or engine_kind(recipe).in_processes)
    if is_users and decides and len(graph.layers) > 1:  # one layer runs as it is, and the zoo's models are tested
        check_traced(*exact, sizes)
    return ProfiledModel(dataset, graph, device, _noted(profile, left_over), left_over)


def _noted(profile: Profile, left_over: int) -> Profile:
    """Return a profile that says which samples of an epoch it has no times for."""
    return replace(profile, note=f"{profile.note}; {left_over_note(left_over)}") if left_over else profile


def left_over_note(left_over: int) -> str:
    """Return in words that some samples aren't run."""
    return f"the {left_over} samples of an epoch that fill no minibatch aren't run: there are no times for so few"


def _data(recipe: Recipe, *, whole_only: bool = False) -> tuple[Dataset, int]:
    """Return a recipe's data, and how many samples of an epoch aren't in it: those the profile has no times for."""
    dataset: Dataset = make_dataset(recipe.dataset)
    if dataset.sequential:  # pieces of a text are all whole
        return dataset, 0
    if not whole_only and (engine_kind(recipe).trains or not has_one_size(recipe)):
        return dataset, 0
    whole = whole_minibatches(dataset, recipe.train.minibatch_size)
    return whole, dataset.num_train - whole.num_train


def _model_of_file(recipe: Recipe, data: Dataset, left_over: int, device: torch.device) -> ProfiledModel:
    """Return the model that is a profile."""
    found = profile_of_file(recipe, data)
    costs = work_of(found)
    graph = graph_of(next(iter(costs.layers.values())))
    dataset = InputsOf(data, found, graph.inputs)
    check_sizes(found, str(recipe.model["profile"]), travelling_sizes(recipe, dataset))
    return ProfiledModel(dataset, graph, device, _noted(costs, left_over), left_over)


def choose_device(name: str) -> torch.device:
    """Return the device of `auto`, `cpu` or `cuda`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def initial_model(recipe: Recipe, device: str = "cpu") -> nn.Module:
    """Return the whole model, initialised under the recipe's seed, however it is cut later.

    Args:
        recipe: a validated recipe.
        device: `cpu`, or `meta` for shapes without weights: no memory, no time.

    Raises:
        GraphError: a model of the zoo can't have these options.
    """
    seed = mix(recipe.train.seed, name_hash("initial weights"))
    # Whatever a model's author draws from: every process makes the model itself, and all have to make the same.
    with seeded(seed) if recipe.model.get("target") is not None else nullcontext():
        seed_default_generator(torch.device("cpu"), seed)
        with weightless() if device == "meta" else torch.device(device):
            try:
                made: nn.Module = make_model(recipe.model)
            except (RuntimeError, ArithmeticError) as error:
                # Torch's words on a layer of the zoo's that can't be; what a target raises is told already.
                if recipe.model.get("name") is None:
                    raise
                name = recipe.model["name"]
                raise GraphError(f"{name} can't be built with these options: {one_line(error)}") from error
    return made


def _layer_graph(recipe: Recipe, model: nn.Module, fed: int | Collection[str]) -> LayerGraph:
    """Return a model as layers; as one, where it can't be traced and nothing is to be cut.

    Args:
        recipe: says which modules are layers, and how it is run.
        model: its model.
        fed: how many arguments of its forward the data set feeds, or which.

    Raises:
        GraphError: it can't be traced, and would have to be cut.
    """
    mode = recipe.parallelism.mode
    try:
        return trace(model, list(recipe.model.get("leaves") or ()), fed)
    except TracingError as error:
        if mode == AUTO or recipe.parallelism.row.shape not in ("one", "one-stage"):
            raise
        _LOG.info("%s: run as one layer, since mode %s cuts nothing", error, mode)
        return as_one_layer(model, fed)


def _check_fed(model: nn.Module, graph: LayerGraph, dataset: Dataset, name: str) -> None:
    """Refuse a data set that isn't this model's.

    Raises:
        PlanError: it feeds other inputs, or ids that an embedding lacks; or scores what the model can't write.
    """
    if len(graph.inputs) != len(dataset.inputs):
        raise PlanError(
            f"the model reads {len(graph.inputs)} inputs ({', '.join(graph.inputs)}), "
            f"but dataset {name} feeds {len(dataset.inputs)} ({', '.join(dataset.inputs)})"
        )
    writes = dataset.generates_with
    if writes is not None and not callable(getattr(model, writes, None)):
        raise PlanError(
            f"dataset {name} scores what the model writes, and {type(model).__name__} has no "
            f"method {writes} to write with"
        )
    _check_ids(graph, dataset, name)


def _check_ids(graph: LayerGraph, dataset: Dataset, name: str) -> None:
    """Refuse an embedding with fewer rows than the data set has ids: a lookup would fail somewhere in the run."""
    fields = dict(zip(graph.inputs, dataset.inputs, strict=True))
    for layer in graph.layers:
        module = graph.root.get_submodule(str(layer.node.target)) if layer.node.op == "call_module" else None
        for field in (fields[read] for read in layer.inputs if isinstance(module, nn.Embedding)):
            assert isinstance(module, nn.Embedding)
            if module.num_embeddings < dataset.num_ids.get(field, 0):
                raise PlanError(
                    f"embedding {layer.name} of the model has {module.num_embeddings} rows, and {field} of dataset "
                    f"{name} has {dataset.num_ids[field]} different ids"
                )


def input_bytes(graph: LayerGraph, dataset: Dataset, sizes: Iterable[Size]) -> dict[Size, dict[str, int]]:
    """Return the bytes of every input of a model, by size of the unit."""
    names = [*zip(graph.inputs, dataset.inputs, strict=True)]
    examples = {size: _example(dataset, size) for size in sizes}
    return {size: {name: example[field].nbytes for name, field in names} for size, example in examples.items()}


def _example(dataset: Dataset, size: Size) -> dict[str, torch.Tensor]:
    if isinstance(size, UnitShape):
        return dataset.of_length(size.columns).example(size.num_samples)
    return dataset.example(size)
