"""Rules on model and data set: names and options in the zoo, targets, and what of training depends on the data."""

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from pipebench.cluster import Cluster
from pipebench.errors import PlanError, choice, shown
from pipebench.metrics import CURVES
from pipebench.recipe.draft import Draft, Problems, rule
from pipebench.recipe.engines import ENGINES
from pipebench.recipe.make import make_dataset, make_model
from pipebench.recipe.options import OF_PAIRS, options, problems_of, zoo_options
from pipebench.recipe.plan_file import asked_replicas
from pipebench.recipe.schema import Recipe
from pipebench.recipe.targets import ALLOWED, is_target, target_in
from pipebench.recipe.typecheck import problem_with
from pipebench.schedule.modes import AUTO, MODES
from pipebench.schedule.notation import streams_problem
from pipebench.zoo.registry import DATASETS, MODELS

_MOST_PROCESSES = 1024
_MOST_IN_FLIGHT = 256  # minibatches; allowed even if an epoch has fewer, to try a recipe on a few samples
EVAL_LOSS = "eval_loss"
_MEANS_OF = {"cross_entropy": ["samples", "labels"], "mse": ["samples"]}  # what losses by name may be means over
FRACTIONS = ("top1", "top5", "token_accuracy", "nsp_accuracy", "meteor")
_PERPLEXITIES = ("perplexity", "mlm_perplexity")


@rule
def _model(draft: Draft) -> Problems:
    model = _known(draft, "model")
    if model is None:
        return
    name, target = model.get("name"), model.get("target")
    problem = problem_with(model.get("leaves"), list[str] | None)
    if problem is not None:
        yield "model.leaves", problem
    if model.get("profile") is not None:
        yield from _model_of_profile(model)
    elif (name is None) == (target is None):
        given = "neither" if name is None else "both"
        yield "model", f"got {given} of name and target, allowed is one of the names {', '.join(MODELS)} or a target"
    elif target is not None:
        if not is_target(target):
            yield "model.target", f"got {shown(target)}, allowed is {ALLOWED}"
    elif not isinstance(name, str) or name not in MODELS:
        yield "model.name", choice(name, MODELS)
    else:
        yield from _options(draft, "model", name, model)


def _model_of_profile(model: Mapping[str, Any]) -> Problems:
    """Check a model that is given by its profile alone, and has no options."""
    if not isinstance(model["profile"], str):
        yield "model.profile", f"got {shown(model['profile'])}, allowed is a profile's file"
    for key, value in model.items():
        if key != "profile" and value is not None:
            yield f"model.{key}", f"got {shown(value)} beside profile, which says all that is known: allowed is null"


@rule
def _profile_only(model: Mapping[str, Any], kind: str, timing: str) -> Problems:
    if model.get("profile") is None:
        return
    if kind in ENGINES and ENGINES[kind].trains:
        given = f"got a profile, which is for engine.kind simulated: kind {kind} trains"
        yield "model.profile", f"{given}, and costs can't be trained; give a name or a target"
    if timing != "auto":
        yield "engine.timing", f"got {timing}, and model.profile has times of its own: allowed is auto"


@rule
def _dataset(draft: Draft) -> Problems:
    dataset = _known(draft, "dataset")
    if dataset is None:
        return
    name, target = dataset.get("name"), dataset.get("target")
    if target is not None:
        yield from _own_dataset(draft, dataset)
        return
    if name is None:
        yield "dataset.name", f"is missing, allowed are {', '.join(DATASETS)}; or a target, {ALLOWED}"
        return
    if not isinstance(name, str) or name not in DATASETS:
        yield "dataset.name", choice(name, DATASETS)
        return
    problems = list(_options(draft, "dataset", name, dataset))
    yield from problems
    if problems:
        return
    try:
        draft.made["@dataset"] = made = make_dataset(dataset)
        draft.made["@metrics"] = made.metrics
    except (TypeError, ValueError) as error:
        if not any(key.startswith("dataset.") for key in draft.pending):
            yield "dataset", one_line(error)


def _own_dataset(draft: Draft, dataset: Mapping[str, Any]) -> Problems:
    """Check the keys of a data set with a target; what the target returns is checked when the recipe runs."""
    from pipebench.recipe.own_data import directions
    from pipebench.zoo.measures import COUNTS, LOSSES, METRICS

    loss, mean_over, metrics, inputs, targets, processes = (dataset.get(name) for name in OF_PAIRS)
    problems: list[tuple[str, str]] = []
    if dataset.get("name") is not None:
        problems.append(("dataset", f"got both of name and target, allowed is one of them, a target is {ALLOWED}"))
    elif not is_target(dataset["target"]):
        problems.append(("dataset.target", f"got {shown(dataset['target'])}, allowed is {ALLOWED}"))
    if loss is not None and loss not in [*LOSSES] and target_in(loss) is None:
        problems.append(("dataset.loss", f"{choice(loss, LOSSES)}, or a target, {ALLOWED}"))
    if mean_over is not None and mean_over not in [*COUNTS] and target_in(mean_over) is None:
        problems.append(("dataset.mean_over", f"{choice(mean_over, COUNTS)}, or a target, {ALLOWED}"))
    elif mean_over is not None and mean_over not in (known := _MEANS_OF.get(str(loss), [mean_over])):
        problems.append(("dataset.mean_over", f"got {shown(mean_over)}, allowed with {loss} is {' or '.join(known)}"))
    if processes is not None and (problem_with(processes, int) or not 0 <= processes <= _MOST_PROCESSES):
        allowed = f"a whole number from 0 to {_MOST_PROCESSES}"
        problems.append(("dataset.loader_processes", f"got {shown(processes)}, allowed is {allowed}"))
    for key, named in (("inputs", inputs), ("targets", targets)):
        is_list = isinstance(named, list) and named and all(type(name) in (str, int) for name in named)
        if named is not None and not is_list:
            problems.append((f"dataset.{key}", f"got {shown(named)}, allowed is a list of keys, or of places from 0"))
    problems += _own_metrics(metrics, METRICS)
    yield from ((key, problem) for key, problem in problems if key not in draft.pending)
    if metrics is not None and not problems:
        draft.made["@metrics"] = directions(metrics)


def _own_metrics(metrics: Any, known: Mapping[str, Any]) -> Problems:
    form = f"{{NAME: {{target: {ALLOWED}, best: max}}}}, best: min where lower is better"
    if isinstance(metrics, list):
        for name in metrics:
            if not isinstance(name, str) or name not in known:
                yield "dataset.metrics", f"{choice(name, known)}; or {form}"
    elif metrics is not None and not isinstance(metrics, Mapping):
        yield "dataset.metrics", f"got {shown(metrics)}, allowed is a list of {', '.join(known)}, or {form}"
    for name, given in metrics.items() if isinstance(metrics, Mapping) else ():
        key = f"dataset.metrics.{name}"
        if name in CURVES:
            yield key, f"is the name of what every run records: allowed are names beside {', '.join(CURVES)}"
        elif is_target(given):
            yield key, f"got {shown(given)}, which doesn't say whether higher or lower is better: allowed is {form}"
        elif isinstance(given, Mapping) and target_in(given) is not None:
            if given.get("best") not in ("max", "min"):
                said = "is missing" if given.get("best") is None else f"got {shown(given['best'])}"
                yield f"{key}.best", f"{said}, allowed are max (higher is better) and min"
        elif not isinstance(given, str) or given not in known:
            yield key, f"{choice(given, known)}; or {form}"


@rule
def _model_values(builds: bool, model: Mapping[str, Any]) -> Problems:
    yield from model_problems(model)


def model_problems(model: Mapping[str, Any]) -> Problems:
    """Build a model of the zoo on the meta device, which checks the ranges of its options."""
    # Larger numbers would make so many layers that building them takes long.
    is_quick = all(not isinstance(value, int) or abs(value) < 10**6 for value in model.values())
    if model.get("name") is not None and is_quick:
        problem = _problem_of_building(MODELS[model["name"]], json.dumps(model, sort_keys=True, default=repr))
        if problem:
            yield "model", problem


@lru_cache(maxsize=128)  # the runs of a report have few models
def _problem_of_building(entry: object, model: str) -> str:
    """Return what is wrong with the options of a registered model, given as JSON; "" if it can be built."""
    from pipebench.recipe.weightless import weightless  # late: imports torch

    options = json.loads(model)
    try:
        with weightless(), warnings.catch_warnings():
            warnings.filterwarnings("error", ".*zero-element")  # a layer without channels or classes
            make_model(options)
    except (TypeError, ValueError) as error:
        return one_line(error)
    except (RuntimeError, ArithmeticError, UserWarning) as error:
        # The message is torch's, about a layer, and doesn't name the model.
        return f"{options['name']} can't be built with these options: {one_line(error)}"
    return ""


@rule
def _images(model: Mapping[str, Any], dataset: Any) -> Problems:
    """Check that a model is built for the data set's images: pooling would take any size, and hide a mismatch."""
    name = str(model.get("name"))
    if name not in MODELS or dataset.image_shape is None:
        return
    built_for = {each.name: each.default for each in zoo_options("model", name).values()} | options(model)
    channels, height, width = dataset.image_shape
    for option, needed in (("in_channels", channels), ("image_size", height if height == width else None)):
        if isinstance(built_for.get(option), int) and needed not in (None, built_for[option]):
            given = f"{'got' if option in model else 'is by default'} {built_for[option]}"
            images = f"the data set's images are {channels} x {height} x {width} (channels, height, width)"
            yield f"model.{option}", f"{given}, and {images}: allowed is {needed}"


@rule
def _reachable(target: Mapping[str, Any] | None, metrics: Mapping[str, str]) -> Problems:
    if target is None:
        return
    metric, value = target["metric"], target["value"]
    if metric not in metrics:
        allowed = "null, for there is no metric" if not metrics else None
        yield (
            "train.target.metric",
            f"got {metric[:60]!r}, allowed is {allowed}" if allowed else choice(metric, metrics),
        )
    elif metric in FRACTIONS and not 0 < value <= 1:
        hint = f"; did you mean {value / 100:g}?" if 1 < value <= 100 else ""
        yield "train.target.value", f"got {value:g}, allowed is a fraction above 0, at most 1{hint}"
    elif metric in _PERPLEXITIES and value <= 1:
        yield "train.target.value", f"got {value:g}, allowed is a number above 1"
    elif metric == "bleu" and not 0 < value <= 100:
        yield "train.target.value", f"got {value:g}, allowed is a number above 0, at most 100"


@rule
def _minibatch(minibatch_size: int, dataset: Any) -> Problems:
    if minibatch_size > dataset.num_train:
        problem = f"got {minibatch_size}, allowed are 1 to {dataset.num_train}, the training samples there are"
        yield "train.minibatch_size", problem


@rule
def _epoch(depth: Any, accumulate: Any, minibatch_size: int, dataset: Any) -> Problems:
    """Check the minibatches in flight and of an update, all of which are simulated, against those of an epoch."""
    in_epoch = math.ceil(dataset.num_train / minibatch_size)
    most = max(in_epoch, _MOST_IN_FLIGHT)
    for name, given in (("depth", depth), ("accumulate", accumulate)):
        if isinstance(given, int) and given > most:
            yield f"parallelism.{name}", f"got {given}, allowed are 1 to {most}: an epoch has {in_epoch} minibatches"


@rule
def _lengths(dataset: Any, kind: str) -> Problems:
    if dataset.lengths and kind in ENGINES and ENGINES[kind].trains:
        given = "got declared, which is for engine.kind simulated"
        yield "dataset.lengths", f"{given}: kind {kind} trains, on samples as long as they are; allowed is fixed"


@rule
def _streams(
    dataset: Any,
    streams: int | None,
    minibatch_size: int,
    evaluate_every: Mapping[str, Any],
    checkpoint_every: Mapping[str, Any] | None,
) -> Problems:
    if not dataset.sequential:
        if streams is not None:
            yield "train.streams", f"got {streams}, which is for text, whose samples follow each other: allowed is null"
        return
    streams = streams or 1
    if minibatch_size <= dataset.num_train < streams * minibatch_size:
        most = dataset.num_train // minibatch_size
        rows = f"streams of {minibatch_size} rows each"
        yield "train.streams", f"got {streams} {rows}, allowed are 1 to {most}: the text has {dataset.num_train} chunks"
    for name, period in (("evaluate_every", evaluate_every), ("checkpoint_every", checkpoint_every)):
        minibatches = (period or {}).get("minibatches")
        if minibatches is not None and minibatches % streams:
            given = f"got {minibatches}, which would leave some of the {streams} streams behind"
            yield f"train.{name}.minibatches", f"{given}: allowed are multiples of {streams}"


@rule
def _streams_of_plan(dataset: Any, cluster: Any, streams: int | None, mode: str, plan: Any) -> Problems:
    if not dataset.sequential or mode == AUTO:
        return
    try:
        replicas = asked_replicas(plan, MODES[mode], cluster.num_workers)
    except PlanError:  # another rule's fault
        return
    problem = None if replicas is None else streams_problem(replicas, streams or 1)  # None: the planner checks
    if problem is not None:
        yield "train.streams", f"got {problem}"


def dataset_problems(recipe: Recipe, cluster: Cluster, dataset: Any) -> Problems:
    """Yield key and problem where a recipe doesn't match its data set."""
    train, parallelism = recipe.train, recipe.parallelism
    target, evaluate, checkpoint = (
        None if each is None else asdict(each) for each in (train.target, train.evaluate_every, train.checkpoint_every)
    )
    yield from _reachable(target, dataset.metrics)
    yield from _minibatch(train.minibatch_size, dataset)
    yield from _epoch(parallelism.depth, parallelism.accumulate, train.minibatch_size, dataset)
    yield from _streams(dataset, train.streams, train.minibatch_size, evaluate or {}, checkpoint)
    yield from _streams_of_plan(dataset, cluster, train.streams, parallelism.mode, parallelism.plan)


def _known(draft: Draft, section: str) -> dict[str, Any] | None:
    """Return a section unless it is faulty as a whole; some of its values may be pending or faulty."""
    value = draft.values.get(section)
    whole = any(bad[:1] == (section,) and len(bad) <= 2 for bad in draft.leaves.faulty)
    return None if whole or not isinstance(value, dict) else value


def _options(draft: Draft, section: str, name: str, given: Mapping[str, Any]) -> Problems:
    if section == "dataset" and "leaves" in given:
        yield "dataset.leaves", "is for models, a data set has a name and its own options"
    for option, problem in problems_of(zoo_options(section, name), options(given)):
        if f"{section}.{option}" not in draft.pending:
            yield f"{section}.{option}", problem


def one_line(error: Exception) -> str:
    """Return an exception's message on one line, as the end of a sentence."""
    return " ".join(str(error).split())[:300]
