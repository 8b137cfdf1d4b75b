"""The user's own data sets: made by `dataset.target`, with the recipe's loss and metrics."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from pipebench.errors import UserCodeError
from pipebench.metrics import CURVES
from pipebench.recipe.options import OF_PAIRS, arguments_of, target_options
from pipebench.recipe.targets import import_target, target_in
from pipebench.recipe.users_code import users_code
from pipebench.zoo.measures import (
    COUNTS,
    LOSSES,
    METRICS,
    Count,
    Measure,
    Metric,
    OfClass,
    OfWholeSet,
    cross_entropy_of_labels,
)
from pipebench.zoo.plain import DatasetPair
from pipebench.zoo.registry import Dataset
from pipebench.zoo.samples import Fields
from pipebench.zoo.seeding import seeded

# Data that is drawn at random must be the same in every process and run, whatever the run's seed is.
_SEED = 0


def own_dataset(dataset: Mapping[str, Any]) -> Dataset:
    """Return the data set of a recipe's `dataset` with a `target`.

    Raises:
        UserCodeError: the target isn't there, raises, or doesn't match the other keys.
    """
    target, made = dataset["target"], _made(dataset)
    if isinstance(made, Dataset):
        return _with_its_own(made, dataset)
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise UserCodeError(
            f"{target} returned {type(made).__name__}, needed is a pipebench.zoo.Dataset or a pair of torch data "
            "sets, to train on and held out",
            "dataset.target",
        )
    if dataset.get("loss") is None:
        raise UserCodeError(
            f"is missing, which a pair of torch data sets needs: {', '.join(LOSSES)} or a target", "dataset.loss"
        )
    with users_code(f"{target} makes data that can't be used", "dataset.target"):
        metrics, processes = _metrics(dataset.get("metrics")), dataset.get("loader_processes") or 0
        loss, count = _loss(dataset["loss"], dataset.get("mean_over"))
        pair = DatasetPair(made[0], made[1], loss, metrics, processes, _fields(dataset), count)
    if count is not None:
        with users_code(f"what the loss is a mean over can't be counted in {target}", "dataset.mean_over"):
            pair.weigh(pair.fetch("train", [0], pair.targets))
    pair.remake = partial(_made, dataset)
    return pair


def _made(dataset: Mapping[str, Any]) -> Any:
    """Return what the target returns."""
    target = dataset["target"]
    make = import_target(target)
    with users_code(f"{target} can't make the data set", "dataset.target"), seeded(_SEED):
        return make(**target_options(dataset))


def _fields(dataset: Mapping[str, Any]) -> Fields | None:
    named = [dataset.get(key) for key in ("inputs", "targets")]
    return None if named == [None, None] else Fields(*named)


def _loss(loss: Any, mean_over: Any) -> tuple[Measure, Count | None]:
    """Return a recipe's loss, and what counts the things that it is a mean over; None: these are samples."""
    mean_over = "samples" if mean_over is None else mean_over
    count = COUNTS[mean_over] if mean_over in [*COUNTS] else _count(mean_over)
    if not isinstance(loss, str) or loss not in LOSSES:
        return _measure(loss, "dataset.loss"), count
    return cross_entropy_of_labels if loss == "cross_entropy" and count is not None else LOSSES[loss], count


def _count(given: Any) -> Count:
    """Return the function of a target, with its arguments bound; of a class, one of its objects."""
    target = target_in(given)
    assert target is not None
    arguments = {name: value for name, value in given.items() if name != "target"} if isinstance(given, Mapping) else {}
    make = partial(import_target(target), **arguments)
    if not isinstance(make.func, type):
        return make
    with users_code(f"{target} can't be made", "dataset.mean_over"):
        made: Count = make()
    return made


def directions(metrics: Any) -> dict[str, str]:
    """Return a recipe's validated `dataset.metrics` as name to `max` or `min`."""
    if isinstance(metrics, Mapping):
        return {
            name: METRICS[given].best if isinstance(given, str) else given["best"] for name, given in metrics.items()
        }
    return {name: METRICS[name].best for name in metrics or ()}


def _with_its_own(made: Dataset, dataset: Mapping[str, Any]) -> Dataset:
    """Return a `zoo.Dataset` that a target made, which has a loss and metrics of its own, checked."""
    taken = [name for name in CURVES if name in made.metrics]
    if taken:
        raise UserCodeError(
            f"{dataset['target']} gives a data set with a metric {taken[0]}, the name of what every run records: "
            f"allowed are names beside {', '.join(CURVES)}",
            "dataset.target",
        )
    given = [name for name in OF_PAIRS[:5] if dataset.get(name) is not None]
    if given:
        raise UserCodeError(
            f"is for pairs of torch data sets, and {dataset['target']} gives a zoo.Dataset, which has its own",
            f"dataset.{given[0]}",
        )
    if dataset.get("loader_processes") is not None:
        made.loader_processes = dataset["loader_processes"]
    if type(made).renew is Dataset.renew:
        vars(made)["renew"] = partial(_renew, made, dataset)
    return made


def _renew(made: Dataset, dataset: Mapping[str, Any]) -> None:
    """Make a data set again, as if nothing had been read from it, in the same object, which others refer to."""
    anew = vars(_made(dataset))
    given = {name: vars(made)[name] for name in ("renew", "loader_processes") if name in vars(made)}
    if anew is not vars(made):
        vars(made).clear()
        vars(made).update(anew | given)


def _metrics(given: Any) -> dict[str, Metric | OfWholeSet]:
    if not isinstance(given, Mapping):
        return {name: METRICS[name] for name in given or ()}
    return {
        name: METRICS[it] if isinstance(it, str) else _metric(it, f"dataset.metrics.{name}")
        for name, it in given.items()
    }


def _metric(given: Mapping[str, Any], key: str) -> Metric | OfWholeSet:
    make, made = _tried(given, key)
    if callable(getattr(made, "update", None)) and callable(getattr(made, "compute", None)):
        return OfWholeSet(make, given["best"])
    return Metric(_measure(given, key), given["best"])


def _measure(given: Any, key: str) -> Measure:
    """Return the function of a target, with its arguments bound; of a class, one that makes an object and calls it."""
    make, made = _tried(given, key)
    if made is None:
        return make
    if not callable(made):
        raise UserCodeError(
            f"{target_in(given)} makes a {type(made).__name__}, which can't be called, needed is a function of the "
            "model's output and the target, or a class of objects that are called with them, such as those of "
            "torch.nn, or, for a metric of the whole held-out set, that have update(output, target) and compute()",
            key,
        )
    return OfClass(make)


def _tried(given: Any, key: str) -> tuple[partial[Any], Any]:
    """Return a target with its arguments bound, and an object if it is a class."""
    target = target_in(given)
    assert target is not None
    make = import_target(target)
    given_arguments = given.items() if isinstance(given, Mapping) else ()
    bound = partial(make, **{name: value for name, value in given_arguments if name not in ("target", "best")})
    if isinstance(make, type):
        with users_code(f"{target} can't be made", key):
            return bound, bound()
    if next(iter(arguments_of(make) or ()), "") == "y_true":
        raise UserCodeError(
            f"{target} takes y_true first, as scikit-learn's functions do, needed is a function of the model's output "
            "and the target; for a metric of the whole held-out set, a class with update(output, target) and "
            "compute(), which calls it",
            key,
        )
    return bound, None
