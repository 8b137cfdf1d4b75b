"""Preflight: is everything here that this run uses? Validation has passed; nothing has started."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

from pipebench.errors import Fault, RecipeError
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.load import LoadedRecipe
from pipebench.recipe.options import import_target, make_dataset, options

_WORDS = ("auto", "measured", "analytic")


def preflight(loaded: LoadedRecipe, *, trains: bool = True) -> None:
    """Check environment variables, data, device and files that a run of this recipe needs.

    Args:
        loaded: a recipe.
        trains: False if it is only planned or profiled: like a simulation, that needs the data's sizes alone, unless
            times are measured here.

    Raises:
        RecipeError: with everything that is missing.
    """
    if loaded.pending:
        raise RecipeError(loaded.pending)
    engine, cluster = loaded.recipe.engine, loaded.recipe.cluster
    local = load_cluster(cluster.name, cluster.servers, loaded.path.parent).device == "local"
    measured = engine.timing == "measured" or (engine.timing == "auto" and local)
    needs_data = (trains and engine.kind != "simulated") or measured
    checks = (*([_dataset] if needs_data else []), *_CHECKS)
    problems = (problem for check in checks for problem in check(loaded))
    faults = [Fault(loaded.origin(key), key, problem) for key, problem in problems]
    if faults:
        raise RecipeError(faults)


def _dataset(loaded: LoadedRecipe) -> Iterator[tuple[str, str]]:
    try:
        make_dataset(loaded.recipe.dataset).check()
    except (OSError, ImportError, ValueError) as error:
        yield "dataset", _one_line(error)


def _device(loaded: LoadedRecipe) -> Iterator[tuple[str, str]]:
    import torch

    if loaded.recipe.engine.device == "cuda" and not torch.cuda.is_available():
        yield "engine.device", "got cuda, and torch sees no CUDA device here; allowed are cpu and auto"


def _timing(loaded: LoadedRecipe) -> Iterator[tuple[str, str]]:
    timing = loaded.recipe.engine.timing
    if timing in _WORDS:
        return
    try:
        with Path(timing).open("rb"):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        yield "engine.timing", f"the profile file {timing!r} can't be read: {reason}"


def _target(loaded: LoadedRecipe) -> Iterator[tuple[str, str]]:
    model = loaded.recipe.model
    if not model.get("target"):
        return
    try:
        inspect.signature(import_target(model["target"])).bind(**options(model))
    except ImportError as error:
        yield "model.target", f"{model['target']} can't be imported: {_one_line(error)}"
    except TypeError as error:
        yield "model", f"the options don't suit {model['target']}: {_one_line(error)}"


_CHECKS: tuple[Callable[[LoadedRecipe], Iterator[tuple[str, str]]], ...] = (_device, _timing, _target)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
