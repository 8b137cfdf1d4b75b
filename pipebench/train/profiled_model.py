"""A recipe's model, data and costs.

The model is traced to layers and checked against its data set. A profile has the layers' costs at every size of a unit.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from pipebench.cluster import Cluster
from pipebench.errors import GraphError, PlanError, ProfileError, TracingError
from pipebench.model.examples import Example
from pipebench.model.graph import LayerGraph, as_one_layer, trace
from pipebench.model.precision import LOW_TYPES, in_precision
from pipebench.model.rounded_data import RoundedData
from pipebench.model.sampling import Size, UnitShape, mix, name_hash, seed_default_generator
from pipebench.model.slice_modules import Alone, EmbeddingSlices, SliceGroup, Slices
from pipebench.model.sliced import ProcessSlicer, Slicer, SlicerInTurn
from pipebench.model.trace_check import check_traced
from pipebench.profile.as_graph import InputsOf, graph_of, work_of
from pipebench.profile.choose import (
    check_sizes,
    fitting,
    has_one_size,
    is_measured,
    profile_for,
    profile_of_file,
    profile_request,
)
from pipebench.profile.model import Profile
from pipebench.profile.request import ProfileRequest
from pipebench.profile.tensor import with_exchanges
from pipebench.recipe.engines import engine_kind
from pipebench.recipe.make import make_dataset, make_model
from pipebench.recipe.rules_zoo import one_line
from pipebench.recipe.schema import Recipe
from pipebench.recipe.weightless import weightless
from pipebench.schedule.modes import AUTO
from pipebench.train.request import sizes_to_plan, source_of_one, travelling_sizes, whole_minibatches
from pipebench.zoo.plain import DatasetPair
from pipebench.zoo.registry import Dataset
from pipebench.zoo.seeding import seeded

_LOG = logging.getLogger("pipebench.train.profiled_model")
_OF_DECISION = "of the kept decision"  # where a given profile is from, in messages
_WITHOUT_ONE = "Expected more than 1 value per channel"  # what torch's BatchNorm says of a single sample


@dataclass(frozen=True)
class ProfiledModel:
    """A recipe's model, data and costs."""

    dataset: Dataset
    graph: LayerGraph  # with initial weights if they are needed, otherwise on the meta device
    device: torch.device  # of the arithmetic
    profile: Profile  # layer costs at every size of a unit
    left_over: int = 0  # samples of an epoch without times in the profile, left out of the data


class Wanted(NamedTuple):
    """What is wanted of a recipe's model besides costs."""

    trains: bool = False  # weights, not only for profiling
    profile_given: Profile | None = None  # the profile, if it is known
    plans: bool = False  # costs at the sizes of other modes' units, too
    whole_only: bool = False  # no costs of an epoch's last, short minibatch: fewer sizes to profile
    group: SliceGroup | None = None  # slices of one process, whose group this is; None: all slices in this process


COSTS = Wanted()


def profile_model(
    recipe: Recipe, cluster: Cluster, on_progress: Callable[[str], None] | None = None, wanted: Wanted = COSTS
) -> ProfiledModel:
    """Trace and profile a recipe's model on a cluster's device; `on_progress` gets what is profiled, in words.

    Raises:
        GraphError, PlanError, ProfileError: it can't be traced or profiled, or the data set doesn't fit it.
    """
    device, trains, profile_given = choose_device(recipe.engine.device), wanted.trains, wanted.profile_given
    dataset, left_over = _data(recipe, whole_only=wanted.whole_only)
    if recipe.model.get("profile") is not None:
        return _model_of_file(recipe, dataset, left_over, device)
    measures = profile_given is None and is_measured(recipe, cluster)
    is_users = recipe.model.get("target") is not None
    on_meta = not trains and not is_users and not measures
    model = initial_model(recipe, "meta" if on_meta else "cpu")
    dataset = dataset.for_model(model)
    slices, args = _num_slices(recipe), arguments_of(recipe, dataset)
    slicer = Slicer(Alone(slices), in_processes=engine_kind(recipe).in_processes)
    graph = _layer_graph(recipe, model, args, slicer)
    dataset = dataset.feeding(graph.inputs)
    _check_fed(model, graph, dataset, str(recipe.dataset.get("name") or recipe.dataset.get("target")))
    decides = profile_given is None and (trains or engine_kind(recipe).in_processes)
    # Costs are those of one slice. The graph that is checked, and trains in one process, computes all of them.
    trained = _sliced(recipe, model, args, wanted.group) if slices > 1 and (trains or (is_users and decides)) else graph
    exact, graph = (trained, dataset), in_precision(graph, recipe.train.precision)
    if graph.rounding is not None:
        dataset = RoundedData(dataset, graph.rounding.low_type)
    sizes = sizes_to_plan(recipe, cluster, dataset) if wanted.plans else travelling_sizes(recipe, dataset)
    if profile_given is not None:
        profile = fitting(profile_given, _OF_DECISION, graph, sizes)
    else:
        request = profile_request(recipe, graph, dataset, sizes)
        profile = _profile_of(recipe, cluster, request, device, on_progress)
        profile = profile if slices == 1 else with_exchanges(profile, cluster.levels[0], slices)
    if is_users and decides:  # the zoo's are tested
        check_traced(*exact, sizes)
    if trains and slices > 1:
        graph = in_precision(trained, recipe.train.precision)
    return ProfiledModel(dataset, graph, device, _noted(profile, left_over, exact[1].example_note), left_over)


def _profile_of(
    recipe: Recipe,
    cluster: Cluster,
    request: ProfileRequest,
    device: torch.device,
    on_progress: Callable[[str], None] | None,
) -> Profile:
    """Return a profile of all sizes or, if a layer takes no single sample, of all other sizes.

    BatchNorm is such a layer. If only other modes have microbatches of one sample, they are planned with whole
    minibatches. If the recipe's own mode has some, the error says which key leads to them.
    """
    try:
        return profile_for(recipe, cluster, request, device, on_progress)
    except ProfileError as error:
        if _WITHOUT_ONE not in str(error):
            raise
        if 1 in travelling_sizes(recipe, request.dataset):
            raise ProfileError(f"{error}; {source_of_one(recipe, request.dataset)}", error.layer) from error
        several = request._replace(sizes=[size for size in request.sizes if size > 1])
        return profile_for(recipe, cluster, several, device, on_progress)


def _noted(profile: Profile, left_over: int, note: str = "") -> Profile:
    """Return a profile with a note, and one on the samples of an epoch that are left out, if there are some."""
    said = [profile.note, note, left_over_note(left_over) if left_over else ""]
    return replace(profile, note="; ".join(filter(None, said)))


def left_over_note(left_over: int) -> str:
    """Return a note that some samples aren't run."""
    return f"the {left_over} samples of an epoch that fill no minibatch aren't run: there are no times for so few"


def _data(recipe: Recipe, *, whole_only: bool = False) -> tuple[Dataset, int]:
    """Return a recipe's data, and how many samples of an epoch are left out for lack of times."""
    dataset: Dataset = make_dataset(recipe.dataset)
    if dataset.sequential:  # a text has no short minibatch
        return dataset, 0
    if not whole_only and (engine_kind(recipe).trains or not has_one_size(recipe)):
        return dataset, 0
    whole = whole_minibatches(dataset, recipe.train.minibatch_size)
    return whole, dataset.num_train - whole.num_train


def _model_of_file(recipe: Recipe, data: Dataset, left_over: int, device: torch.device) -> ProfiledModel:
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
    """Return the whole model, initialised with the recipe's seed: the same weights however it is cut.

    `device` is `cpu`, or `meta` for shapes without weights.

    Raises:
        GraphError: options are impossible for a model of the zoo.
    """
    seed = mix(recipe.train.seed, name_hash("initial weights"))
    # A user's model may draw from any generator. All are seeded, since every process makes the model itself.
    with seeded(seed) if recipe.model.get("target") is not None else nullcontext():
        seed_default_generator(torch.device("cpu"), seed)
        with weightless() if device == "meta" else torch.device(device):
            try:
                made: nn.Module = make_model(recipe.model)
            except (RuntimeError, ArithmeticError) as error:
                # torch's error on a layer with impossible sizes. Errors of users' models are reported elsewhere.
                if recipe.model.get("name") is None:
                    raise
                name = recipe.model["name"]
                raise GraphError(f"{name} can't be built with these options: {one_line(error)}") from error
    return made


def _check_dense(model: nn.Module, graph: LayerGraph) -> None:
    """Raise a GraphError for a parameter or buffer without a storage, such as a sparse matrix of edges."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *graph.root.named_buffers()):
        if tensor.layout is not torch.strided:
            raise GraphError(
                f"model {type(model).__name__} holds {name}, a tensor of layout {tensor.layout}: let it be dense "
                "(x.to_dense())"
            )


def _num_slices(recipe: Recipe) -> int:
    """Return among how many devices layers are divided, 1 while that is undecided."""
    tensor = recipe.parallelism.tensor
    return 1 if tensor == AUTO else int(tensor)


class Arguments(NamedTuple):
    """What a data set gives a model."""

    fed: int | Collection[str]  # number or names of the arguments
    examples: Sequence[Example]  # minibatches of several sizes, of a user's data set


def arguments_of(recipe: Recipe, dataset: Dataset) -> Arguments:
    """Return what a recipe's data set gives its model."""
    fed = dataset.argument_names or len(dataset.inputs)
    if not isinstance(dataset, DatasetPair):
        return Arguments(fed, ())
    # A single sample is left out: what decides by it, broadcasts mostly, is compared with the model itself.
    sizes = {2, 3, *travelling_sizes(recipe, dataset)} - {1}
    found = [example for size in sorted(sizes) for example in dataset.examples(size)]
    keys: Sequence[str | int] = dataset.argument_names or range(len(dataset.inputs))
    pairs = [*zip(keys, dataset.inputs, strict=True)]
    tensors = [{key: each[field] for key, field in pairs} for each in found]
    types = dict.fromkeys((None, LOW_TYPES.get(recipe.train.precision)))
    return Arguments(fed, [Example(each, low_type) for low_type in types for each in tensors])


def _layer_graph(recipe: Recipe, model: nn.Module, args: Arguments, slicer: Slicer) -> LayerGraph:
    """Return a model as layers; as a single layer if it can't be traced and the mode needs no cuts.

    `slicer` divides layers, if they are divided.
    """
    mode, leaves, name = recipe.parallelism.mode, list(recipe.model.get("leaves") or ()), type(model).__name__
    cuts = mode == AUTO or not recipe.parallelism.row.is_one_stage
    if [type(part).__name__ for part in model.modules() if type(part).__name__ in leaves] == [name]:
        if cuts:
            raise GraphError(f"model.leaves: got {name}, the whole model, and mode {mode} cuts it: use single or dp")
        return as_one_layer(model, args.fed)
    try:
        rewrites = {} if _num_slices(recipe) == 1 else {"rewrite": slicer}
        return trace(model, leaves, args.fed, examples=args.examples, **rewrites)
    except TracingError as error:
        if cuts:
            raise
        _LOG.info("%s: run as one layer, since mode %s cuts nothing", error, mode)
        return as_one_layer(model, args.fed)


def _sliced(recipe: Recipe, model: nn.Module, args: Arguments, group: SliceGroup | None) -> LayerGraph:
    """Return a model in slices with weights: with those of one process of a group, or with all, computed in turn."""
    if group is None:
        return _layer_graph(recipe, model, args, SlicerInTurn(_num_slices(recipe)))
    slicer = ProcessSlicer(group)
    return replace(_layer_graph(recipe, model, args, slicer), slices=Slices(group, slicer.cuts))


def _check_fed(model: nn.Module, graph: LayerGraph, dataset: Dataset, name: str) -> None:
    """Check that a data set fits the model, whose tensors are dense.

    Raises:
        GraphError: one isn't.
        PlanError: inputs differ, ids are out of an embedding's range, or the model can't generate text to score.
    """
    _check_dense(model, graph)
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
    """Raise a PlanError for an embedding with fewer rows than the data set has ids: a lookup would fail in the run."""
    fields = dict(zip(graph.inputs, dataset.inputs, strict=True))
    for layer in graph.layers:
        module = graph.root.get_submodule(str(layer.node.target)) if layer.node.op == "call_module" else None
        for field in (fields[read] for read in layer.inputs if isinstance(module, nn.Embedding | EmbeddingSlices)):
            assert isinstance(module, nn.Embedding | EmbeddingSlices)
            if module.num_embeddings < dataset.num_ids.get(field, 0):
                raise PlanError(
                    f"embedding {layer.name} of the model has {module.num_embeddings} rows, and {field} of dataset "
                    f"{name} has {dataset.num_ids[field]} different ids"
                )


def input_bytes(graph: LayerGraph, dataset: Dataset, sizes: Iterable[Size]) -> dict[Size, dict[str, int]]:
    """Return the bytes of every model input, by size of the unit."""
    names = [*zip(graph.inputs, dataset.inputs, strict=True)]
    examples = {size: _example(dataset, size) for size in sizes}
    return {size: {name: example[field].nbytes for name, field in names} for size, example in examples.items()}


def _example(dataset: Dataset, size: Size) -> dict[str, torch.Tensor]:
    if isinstance(size, UnitShape):
        return dataset.of_length(size.columns).example(size.num_samples)
    return dataset.example(size)
