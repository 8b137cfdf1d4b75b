"""Preflight: checks before a run that all it needs is there, such as data, devices and environment variables."""

import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from pipebench.errors import Fault, RecipeError, UserCodeError
from pipebench.files import FileError, read_text
from pipebench.recipe.engines import engine_kind
from pipebench.recipe.load import LoadedRecipe, fault_of
from pipebench.recipe.make import make_dataset
from pipebench.recipe.named import KINDS, OPTIMIZER, SCHEDULE, given_arguments
from pipebench.recipe.options import OF_PAIRS, options, target_options, target_problems
from pipebench.recipe.ranges import MEASURED, TIMINGS
from pipebench.recipe.rules_zoo import dataset_problems, model_problems, one_line
from pipebench.recipe.targets import import_target, targets_of
from pipebench.recipe.users_code import users_code
from pipebench.zoo.late import torch


def preflight(loaded: LoadedRecipe, *, trains: bool = True) -> None:
    """Check environment variables, data, device and files that a run of this recipe needs.

    Args:
        loaded: the recipe.
        trains: False to plan or profile only. Like a simulation, these need only the sizes of the data unless times are
            measured.

    Raises:
        RecipeError: names everything that is missing.
    """
    if loaded.pending:
        raise RecipeError(loaded.pending)
    engine = loaded.recipe.engine
    local = loaded.cluster.device == "local"
    of_file = loaded.recipe.model.get("profile") is not None
    measured = not of_file and (engine.timing in MEASURED or (engine.timing == "auto" and local))
    needs_data = (trains and engine_kind(loaded.recipe).trains) or measured
    _refuse(loaded, _targets(loaded))  # first, since the other checks call targets
    own = [_own_dataset] if loaded.recipe.dataset.get("target") is not None else []
    checks = (*own, *([_dataset] if needs_data else []), _device, _timing, *([_tracking, _compiler] if trains else []))
    _refuse(loaded, (problem for check in checks for problem in check(loaded)))


def check_model(loaded: LoadedRecipe) -> None:
    """Check the values of the options of the zoo's model, for a recipe that was loaded without `builds`.

    Raises:
        RecipeError: the model refuses them; names the file that gave the last option.
    """
    given = [file for key, file in loaded.origins.items() if key.startswith("model.")]
    faults = [Fault(given[-1], key, problem) for key, problem in model_problems(loaded.recipe.model)]
    if faults:
        raise RecipeError(faults)


def _refuse(loaded: LoadedRecipe, problems: Iterator[tuple[str, str]]) -> None:
    """Raise a RecipeError with all problems, if there are any, each in the file that gave its key."""
    faults: list[Fault] = []
    cause: UserCodeError | None = None
    try:
        for key, problem in problems:
            faults.append(Fault(loaded.origin(key), key, problem))
    except UserCodeError as error:
        cause = error
        faults.append(fault_of(loaded, error))
    if faults:
        raise RecipeError(faults) from cause


def _targets(loaded: LoadedRecipe) -> Iterator[tuple[str, str]]:
    """Import the recipe's targets and compare their arguments with their parameters."""
    recipe = loaded.recipe
    given: dict[str, tuple[Any, ...]] = {
        "model": (options(recipe.model), ()),
        "dataset": (target_options(recipe.dataset), (), OF_PAIRS),
        "train.optimizer": (given_arguments(recipe.train.optimizer), KINDS[OPTIMIZER].passed),
        "train.schedule": (given_arguments(recipe.train.schedule), KINDS[SCHEDULE].passed),
    }
    for key, target in targets_of(asdict(recipe)):
        try:
            make = import_target(target, loaded.folders)
        except UserCodeError as error:
            raise UserCodeError(error.problem, key) from error.__cause__
        section = key.removesuffix(".target")
        if section in given:
            for name, problem in target_problems(make, *given[section]):
                yield f"{section}.{name}", f"{problem} ({target})"


def _own_dataset(loaded: LoadedRecipe) -> Iterator[tuple[str, str]]:
    """Make the user's own data set, and apply the rules that data sets of the zoo are checked by."""
    recipe = loaded.recipe
    yield from dataset_problems(recipe, loaded.cluster, make_dataset(recipe.dataset))


def _dataset(loaded: LoadedRecipe) -> Iterator[tuple[str, str]]:
    dataset = loaded.recipe.dataset
    if dataset.get("target") is not None:
        with users_code(f"{dataset['target']} makes data that can't be used", "dataset.target"):
            make_dataset(dataset).check()
        return
    try:
        make_dataset(dataset).check()
    except (OSError, ImportError, ValueError) as error:
        yield "dataset", one_line(error)


def _device(loaded: LoadedRecipe) -> Iterator[tuple[str, str]]:
    if loaded.recipe.engine.device == "cuda" and not torch.cuda.is_available():
        yield "engine.device", "got cuda, but torch finds no CUDA device here; allowed are cpu and auto"


def _compiler(loaded: LoadedRecipe) -> Iterator[tuple[str, str]]:
    engine = loaded.recipe.engine
    if not engine.compile or not engine_kind(loaded.recipe).trains:
        return
    on_gpu = engine.device != "cpu" and torch.cuda.is_available()
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # torch's own choice
    if on_gpu and find_spec("triton") is None:
        yield "engine.compile", "got true, which needs the package triton on GPUs; allowed is false"
    elif on_gpu and not any(map(which, (os.environ.get("CC", "gcc"), "clang"))):
        yield "engine.compile", "got true, which needs a C compiler on GPUs, and gcc isn't here; allowed is false"
    elif not on_gpu and which(compiler) is None:
        yield (
            "engine.compile",
            f"got true, which needs a C++ compiler on CPUs, and {compiler} isn't here; allowed is false",
        )
    elif not (header := _python_header()).exists():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        missing = f"{header} isn't here (on Debian the package {package} has it)"
        yield "engine.compile", f"got true, which compiles with Python's headers, and {missing}; allowed is false"


def _python_header() -> Path:
    """Return the path of Python's header, which the code that torch compiles includes."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme), "Python.h")


def _tracking(loaded: LoadedRecipe) -> Iterator[tuple[str, str]]:
    for name in loaded.recipe.tracking:
        if find_spec(name) is None:
            yield "tracking", f"got {name}, which needs the package {name}: pip install {name}"


def _timing(loaded: LoadedRecipe) -> Iterator[tuple[str, str]]:
    timing, of_file = loaded.recipe.engine.timing, loaded.recipe.model.get("profile")
    for key, path in (("engine.timing", None if timing in TIMINGS else timing), ("model.profile", of_file)):
        try:
            if path is not None:
                read_text(path)
        except FileError as error:
            yield key, f"the profile file {path!r} {error.problem}"
