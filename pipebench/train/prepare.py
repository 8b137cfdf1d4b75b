"""From a recipe to everything an engine needs: model, data, profile, plan, pipeline, costs.

Every step is a function of what the steps before it gave, so that each can be called, printed and tested alone.
"""

import logging
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from pipebench.cluster import Cluster
from pipebench.engine.setup import Setup
from pipebench.errors import Fault, PlanError, RecipeError, TracingError, choice
from pipebench.model.graph import LayerGraph, as_one_layer, trace
from pipebench.model.optimizer import make_optimizer
from pipebench.model.plan import Plan, make_plan, recut, starts_of_cuts
from pipebench.model.plan_layers import layer_problems, plan_of, refuse
from pipebench.model.precision import in_precision
from pipebench.model.rounded_data import RoundedData
from pipebench.model.sampling import Shape, Size, mix, name_hash, seed_default_generator
from pipebench.model.trace_check import check_traced
from pipebench.planner.compare import compare
from pipebench.planner.planner import Planner
from pipebench.planner.plans import Comparison
from pipebench.planner.predict import Course, make_pipeline
from pipebench.profile.as_graph import InputsOf, graph_of, work_of
from pipebench.profile.choose import check_sizes, fitting, has_one_size, is_measured, profile_for, profile_of_file
from pipebench.profile.model import Profile
from pipebench.recipe.engines import engine_kind
from pipebench.recipe.make import make_dataset, make_model
from pipebench.recipe.moves import asked_moves
from pipebench.recipe.plan_file import PlanForm, form_problems, is_plan_file, load_plan
from pipebench.recipe.push_order import load_push_order
from pipebench.recipe.schema import LARGEST, LossScaleRecipe, ParallelismRecipe, Recipe, TrainRecipe
from pipebench.recipe.weightless import weightless
from pipebench.schedule.modes import AUTO, MODES
from pipebench.schedule.notation import parse_plan, streams_problem
from pipebench.schedule.pipeline import Pipeline
from pipebench.schedule.weights import CORRECTION_DECAY, WEIGHT_POLICIES
from pipebench.search.architectures import Architectures
from pipebench.search.search import SearchSetup, first_of, metric_of, trace_of
from pipebench.search.trace import steps_of
from pipebench.simulate.costs import stage_costs
from pipebench.simulate.evaluation import evaluation_of
from pipebench.simulate.memory import stage_memories
from pipebench.train.kept_plan import ANEW, kept_plan
from pipebench.train.largest import with_largest_update
from pipebench.train.learning_rate import learning_rate
from pipebench.train.moves import PlannedMove, planned_moves
from pipebench.train.periods import Periods
from pipebench.train.request import plan_request, samplers, travelling_sizes, whole_minibatches
from zoo.plain import seeded
from zoo.registry import Dataset

_LOG = logging.getLogger("pipebench.train.prepare")
KEPT = "of the kept decision"


@dataclass(frozen=True)
class Job:
    """A recipe, ready to run.

    Attributes:
        recipe: the recipe.
        cluster: the cluster, with as many servers as the recipe asks for.
        setup: what the engine takes.
        comparison: the modes that were compared, if the recipe left the mode to the planner.
        left_over: samples of an epoch that aren't run, since the profile has times of whole minibatches only.
        search: how the model's architecture changes; the setup is that of the first one. None: it stays.
        moves: plans that the recipe asks for while it goes on.
    """

    recipe: Recipe
    cluster: Cluster
    setup: Setup
    comparison: Comparison | None = None
    left_over: int = 0
    search: SearchSetup | None = None
    moves: tuple[PlannedMove, ...] = ()

    @property
    def profile(self) -> Profile:
        """Layer costs at every size that travels."""
        return self.setup.profile

    @property
    def whole_profile(self) -> Profile:
        """The same of the model with all that a search may leave out."""
        return self.profile if self.search is None else self.search.architectures.profile


class Decision(NamedTuple):
    """What all processes of a run must agree on.

    Attributes:
        plan: the plan.
        profile: the layer costs that it was made for.
        source: the plan's file.
    """

    plan: PlanForm
    profile: Profile
    source: str


def prepare(
    recipe: Recipe,
    cluster: Cluster,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    trains: bool = True,
    kept: Decision | None = None,
    measure_again: Callable[["ProfiledModel", Profile], Profile] | None = None,
    whole_only: bool = False,
) -> Job:
    """Make a recipe ready to run.

    Args:
        recipe: a validated recipe.
        cluster: the cluster it names.
        on_progress: told of (layers profiled, layers to profile).
        trains: False if only its shape is looked at: then, as in a simulation, there are no weights.
        kept: plan and profile that were made before; None makes them.
        measure_again: returns the profile that costs are taken from, where it isn't the one that the plan is from.
        whole_only: leave out of an epoch what fills no minibatch: fewer sizes to profile.

    Raises:
        PlanError, GraphError, ProfileError: what the model turns out not to allow.
    """
    trains = trains and engine_kind(recipe).trains
    known = profile_model(
        recipe,
        cluster,
        on_progress,
        trains=trains,
        kept=None if kept is None else kept.profile,
        whole_only=whole_only,
    )
    dataset, graph, profile = known.dataset, known.graph, known.profile
    search = None if recipe.search is None else _searched(recipe, known, known.profile)
    if search is not None:
        graph, profile = search.architectures.form(search.first)
    sampler, held_out = samplers(recipe.train, dataset)
    comparison = None
    if recipe.parallelism.mode == AUTO:
        if kept is None:
            comparison = compare(plan_request(recipe, cluster, profile, dataset), None)
            chosen = comparison.best.plan.mode
        else:
            chosen = kept.plan.mode
            if chosen not in MODES:
                raise RecipeError([Fault(kept.source, "mode", f"{choice(chosen[:60], MODES)}; {ANEW}")])
        recipe = replace(recipe, parallelism=replace(recipe.parallelism, mode=chosen))
    mode = recipe.parallelism.row
    if kept is None:
        plan = choose_plan(recipe, cluster, graph, profile, dataset)
    else:
        asked, workers = recipe.parallelism, cluster.num_workers
        plan = kept_plan(kept.plan, kept.source, asked, workers, graph, sampler.streams)
    if measure_again is not None:
        profile = measure_again(known, known.profile)
        if search is not None:
            search = _searched(recipe, known, profile)
            profile = search.architectures.form(search.first)[1]
    if search is not None:
        search = _with_steps(search, plan)
    pipeline = make_pipeline(
        plan,
        next(iter(profile.layers.values())),
        mode,
        microbatches=recipe.parallelism.microbatches if mode.microbatches else 1,
        accumulate=mode.accumulate,
        shares_norm=(recipe.train.optimizer.clip_norm is not None or _scales(recipe.train))
        and mode.flush
        and len(plan.stages) > 1,
    )
    _check_copies(cluster, pipeline)
    costs = stage_costs(profile, plan, WEIGHT_POLICIES[mode.weights].update_cost)
    if recipe.parallelism.accumulate == LARGEST:
        memories = stage_memories(profile, plan, pipeline, input_bytes(graph, dataset, profile.by_size))
        pipeline = with_largest_update(Course(pipeline, costs, cluster, plan.devices, sampler), memories)
    _check_scaling(recipe.train, graph, plan, flushes=pipeline.flushes)
    vpipe = recipe.parallelism.vpipe
    wanted = [] if vpipe is None else asked_moves(vpipe.moves)
    # In a simulation stages take what the profile says, which they were planned by: there is nothing to measure.
    balances = vpipe is not None and vpipe.balances and engine_kind(recipe).trains
    setup = Setup(
        graph=graph,
        plan=plan,
        pipeline=pipeline,
        profile=profile,
        costs=costs,
        evaluation=evaluation_of(graph, plan, pipeline, profile, dataset),
        cluster=cluster,
        dataset=dataset,
        sampler=sampler,
        held_out=held_out,
        make_optimizer=partial(make_optimizer, recipe.train.optimizer),
        lr=learning_rate(recipe.train, pipeline, sampler.num_samples, recipe.parallelism.annealing_epochs),
        clip_norm=recipe.train.optimizer.clip_norm,
        seed=recipe.train.seed,
        device=known.device,
        loss_scale=(recipe.train.loss_scale or LossScaleRecipe()) if _scales(recipe.train) else None,
        push_order=_order_of_pushes(recipe.parallelism, pipeline),
        correction_decay=recipe.parallelism.correction_decay or CORRECTION_DECAY,
        repartitions=balances or bool(wanted) or search is not None,
        balances=balances,
        live=vpipe is None or vpipe.live,
    )
    per_epoch = sampler.minibatches_per_epoch
    moves = planned_moves(wanted, setup, Periods.of(recipe.train, per_epoch))
    return Job(recipe, cluster, setup, comparison, known.left_over, search, moves)


def _searched(recipe: Recipe, known: "ProfiledModel", profile: Profile) -> SearchSetup:
    """Return what a recipe's search needs to know, but for a trace's changes, which depend on the plan.

    Raises:
        GraphError: cells that aren't there, or can't be left out.
    """
    assert recipe.search is not None
    cells = recipe.search.cells
    architectures = Architectures.of(known.graph, profile, known.dataset, recipe.train.optimizer, cells)
    first = first_of(recipe.search, trace_of(recipe.search), architectures)
    metric, larger_is_better = metric_of(recipe, known.dataset.metrics)
    return SearchSetup(recipe.search, architectures, first, metric, larger_is_better, recipe.train.seed)


def _with_steps(search: SearchSetup, plan: Plan) -> SearchSetup:
    """Return the same with the changes of its trace, if it has one."""
    trace = trace_of(search.recipe)
    if trace is None:
        return search
    steps = steps_of(trace.events, search.architectures, search.first, plan, str(search.recipe.trace))
    return replace(search, steps=steps, end_second=trace.end_second)


def input_bytes(graph: LayerGraph, dataset: Dataset, sizes: Iterable[Size]) -> dict[Size, dict[str, int]]:
    """Return the bytes of every input of a model, by size of the unit."""
    names = [*zip(graph.inputs, dataset.inputs, strict=True)]
    examples = {size: _example(dataset, size) for size in sizes}
    return {size: {name: example[field].nbytes for name, field in names} for size, example in examples.items()}


def _example(dataset: Dataset, size: Size) -> dict[str, torch.Tensor]:
    if isinstance(size, Shape):
        return dataset.of_length(size.columns).example(size.num_samples)
    return dataset.example(size)


def _scales(train: TrainRecipe) -> bool:
    return train.precision == "fp16"


def _check_copies(cluster: Cluster, pipeline: Pipeline) -> None:
    """Refuse copies to hosts at a rate that nobody knows."""
    if pipeline.swaps and cluster.pcie_bytes_per_s is None:
        stages = ", ".join(map(str, pipeline.swaps))
        raise PlanError(
            f"layers of stage{'s' * (len(pipeline.swaps) > 1)} {stages} swap, and cluster {cluster.name} doesn't say "
            "how fast a device copies to its host: add to its file, e.g., "
            'pcie: {value: 15.76 GB/s, assumed: "PCIe 3.0 x16"}'
        )


def _check_scaling(train: TrainRecipe, graph: LayerGraph, plan: Plan, *, flushes: bool) -> None:
    """Refuse a stage without parameters that decides about its loss scale alone: nothing there shows an overflow."""
    if not _scales(train) or flushes:
        return
    for index, stage in enumerate(plan.stages):
        layers = graph.layers[stage.start : stage.stop]
        if not any(layer.parameters for layer in layers):
            raise PlanError(
                f"stage {index} ({layers[0].name} to {layers[-1].name}) has no parameters, and without a flush "
                "train.precision fp16 scales the gradients of each stage by what those of its parameters are; "
                "move parallelism.cuts or use fewer stages"
            )


def _order_of_pushes(parallelism: ParallelismRecipe, pipeline: Pipeline) -> dict[int, list[int]]:
    """Return the order of pushes to repeat, by the minibatch that a segment begins with; empty for the clock's."""
    if parallelism.push_order is None:
        return {}
    segments = load_push_order(parallelism.push_order, pipeline.replicas[0])
    return {pushes.first: pushes.minibatches for pushes in segments}


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
    """
    seed = mix(recipe.train.seed, name_hash("initial weights"))
    # Whatever a model's author draws from: every process makes the model itself, and all have to make the same.
    with seeded(seed) if recipe.model.get("target") is not None else nullcontext():
        seed_default_generator(torch.device("cpu"), seed)
        with weightless() if device == "meta" else torch.device(device):
            made: nn.Module = make_model(recipe.model)
    return made


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
    graph = layer_graph(recipe, model, dataset.argument_names or len(dataset.inputs))
    dataset, called = dataset.feeding(graph.inputs), recipe.dataset.get("name") or recipe.dataset.get("target")
    if len(graph.inputs) != len(dataset.inputs):
        raise PlanError(
            f"the model reads {len(graph.inputs)} inputs ({', '.join(graph.inputs)}), "
            f"but dataset {called} feeds {len(dataset.inputs)} ({', '.join(dataset.inputs)})"
        )
    writes = dataset.generates_with
    if writes is not None and not callable(getattr(model, writes, None)):
        raise PlanError(
            f"dataset {called} scores what the model writes, and {type(model).__name__} has no "
            f"method {writes} to write with"
        )
    _check_ids(graph, dataset, str(called))
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


def layer_graph(recipe: Recipe, model: nn.Module, fed: int | Collection[str]) -> LayerGraph:
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


def choose_plan(recipe: Recipe, cluster: Cluster, graph: LayerGraph, profile: Profile, dataset: Dataset) -> Plan:
    """Return the recipe's plan.

    Raises:
        PlanError: the model, the cluster or its memory doesn't allow it.
    """
    parallelism = recipe.parallelism
    planner = Planner(plan_request(recipe, cluster, profile, dataset), parallelism.mode)
    mode = planner.mode
    if parallelism.plan == AUTO and mode.shape not in ("one", "one-stage"):
        return _over(graph, planner.best().plan)
    if is_plan_file(parallelism.plan):
        return plan_of_file(parallelism, cluster.num_workers, graph, planner.request.streams)
    replicas = parse_plan(parallelism.plan, mode, cluster.num_workers)
    problem = streams_problem(replicas, planner.request.streams)
    if problem is not None:
        raise PlanError(f"train.streams: got {problem}")
    cuts = parallelism.cuts
    starts = planner.starts_of(replicas) if cuts is None else starts_of_cuts(graph, cuts)
    plan = make_plan(
        graph,
        starts,
        replicas * mode.chunks,
        mode=parallelism.mode,
        depth=mode.depth or planner.request.depth,
        chunks=mode.chunks,
        memory=planner.policies_of(replicas * mode.chunks, starts),
        relay=parallelism.relay,
    )
    return plan.on(planner.devices_of(replicas, starts))


def plan_of_file(parallelism: ParallelismRecipe, num_workers: int, graph: LayerGraph, streams: int | None) -> Plan:
    """Return the plan of the file that a recipe names.

    Raises:
        RecipeError: with everything that is wrong with it.
    """
    form = load_plan(parallelism.plan)
    problems = [*form_problems(form, parallelism, num_workers)]
    problem = streams_problem(form.replicas, streams)
    if problem is not None:
        problems.append(("stages", f"train.streams is {problem}"))
    refuse(parallelism.plan, [*problems, *layer_problems(form, graph)])
    return plan_of(form, graph, relay=parallelism.relay)


def _over(graph: LayerGraph, plan: Plan) -> Plan:
    """Return a plan of a profile's layers as one of the graph's, which are as many; the graph knows buffers, too."""
    return recut(graph, plan, [stage.start for stage in plan.stages[1:]])
