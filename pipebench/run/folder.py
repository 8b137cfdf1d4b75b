"""The folder of a distributed run, with all that its processes and later commands need.

pipebench-runs/quickstart-1f0c9a7e/
    run.json        the run's facts
    recipe.yaml     the recipe with all keys filled in that don't follow from the plan
    lock            locked by the process that trains the run
    checkpoints/
    record/         logged data, results included
"""

import math
import os
import re
import secrets
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pipebench.errors import RecipeError, UserError, nearest, print_notice
from pipebench.files import read_bytes
from pipebench.files import replace as replace_file
from pipebench.formats import listed, num_epochs
from pipebench.recipe.leaves import Leaves, dotted
from pipebench.recipe.load import LoadedRecipe, load_each, only_one
from pipebench.recipe.plain import flattened
from pipebench.run.ownership import require_own, require_own_code
from pipebench.tracking.record import RECORD, RESULTS_FOLDER, mlflow_run_id, read_record
from pipebench.train.result import INTERRUPTED, REACHED, RunResult
from pipebench.typed_json import Finite, JsonError, Within, read, shown, write

if TYPE_CHECKING:
    from pipebench.checkpoint.store import Checkpoints

RUNS = Path("pipebench-runs")
_RUN, _RECIPE = "run.json", "recipe.yaml"
_EPOCHS = "train.max_epochs"
_DIGITS = re.compile(r"-[0-9a-f]{8}", re.ASCII)  # follows the recipe's name in a run's id

# A checkpoint's weights, position in the data and clock depend on these: fixed in a resumed run.
_FIXED = (
    "model", "dataset", "train.seed", "train.minibatch_size", "train.streams", "train.optimizer.name",
    "train.optimizer.target", "engine.kind",
)  # fmt: skip


@dataclass(frozen=True)
class RunFacts:
    """The identity of a run."""

    run_id: str  # the recipe's name and eight hexadecimal digits: the folder's name
    name: str  # in MLflow
    suite: str  # the MLflow experiment
    seed: Annotated[int, Within(0, 2**63 - 1, f"a whole number from 0 to {2**63 - 1}")]  # overrides the recipe's
    words: tuple[str, ...]  # the command line's recipe and overrides
    parent_mlflow_run_id: str | None  # of its comparison or group of seeds
    verbose: bool  # workers log every instruction
    started_at_s: Finite | None  # seconds since the epoch when its first processes were ready; None before
    # Folders that are searched first for targets' modules. Those below the working directory are relative to the run's
    # folder, so that a copy of the working directory is self-contained. Empty in older runs
    code_folders: tuple[str, ...] = ()
    silent: bool = False  # whether workers that the launcher starts print no result


@dataclass(frozen=True)
class RunFolder:
    """The existing folder of one run."""

    path: Path

    @property
    def run_id(self) -> str:
        """Return the run's id."""
        return self.path.name

    @property
    def recipe_path(self) -> Path:
        """Return the recipe's file."""
        return self.path / _RECIPE

    @property
    def record_path(self) -> Path:
        """Return the folder of everything that the run logs."""
        return self.path / RECORD

    @property
    def mlflow_run_id(self) -> str | None:
        """MLflow's id of the run, or None."""
        return mlflow_run_id(self.record_path)

    def result(self) -> RunResult | None:
        """Return the run's result, None if it hasn't ended or was resumed; raises a UserError if unreadable."""
        record = read_record(self.record_path)
        return None if record is None else record.result

    def recipe(self, overrides: Sequence[str] = ()) -> LoadedRecipe:
        """Return the recipe, with the run's code folders; raises a UserError for a missing file or bad override."""
        self.read_bytes(_RECIPE)
        loaded = only_one(load_each(self.recipe_path, overrides), "--resume goes on with one run")
        own = (Path(os.path.normpath(self.path / folder)) for folder in self.read().code_folders)
        folders = dict.fromkeys((*own, *loaded.folders))
        return replace(loaded, folders=tuple(folders))

    @cached_property
    def checkpoints(self) -> "Checkpoints":
        """Return the run's checkpoints."""
        from pipebench.checkpoint.store import Checkpoints

        return Checkpoints(self.path / "checkpoints")

    def read(self) -> RunFacts:
        """Return the run's facts; raises a UserError if run.json is unreadable."""
        path = self.path / _RUN
        try:
            facts = read(RunFacts, self.read_bytes(_RUN))
        except JsonError as error:
            raise UserError(f"{path}: isn't the description of a run of pipebench: {error}") from None
        if facts.run_id != self.run_id:
            problem = f"run_id: got {shown(facts.run_id)}, allowed is the folder's name, {self.run_id}"
            raise UserError(f"{path}: {problem}; if the folder was renamed, give it its name back")
        return facts

    def read_bytes(self, name: str) -> bytes:
        """Return the content of one of the run's files; raises a UserError if unreadable."""
        return read_bytes(self.path / name)

    def update(self, **changes: Any) -> None:
        """Change facts atomically; raises a UserError if run.json is unreadable, an OSError if it can't be written."""
        self.write(replace(self.read(), **changes))

    def say_how_to_go_on(self, changes: Sequence[str]) -> None:
        """Print the command that resumes the run if it has a checkpoint; `changes` are its previous overrides."""
        if self.checkpoints.steps():
            command = shlex.join(["pipebench", "run", "--resume", self.run_id, *changes])
            print_notice(f"its checkpoints are kept: {command}")

    def finish(self, result: RunResult, changes: Sequence[str], keep: int, *, prints: bool) -> None:
        """Say how to resume an interrupted run, or how to export the weights; remove the checkpoints if `keep` is 0."""
        if result.outcome == INTERRUPTED:
            self.say_how_to_go_on(changes)
        elif keep == 0:
            self.checkpoints.remove()
        elif prints and (steps := self.checkpoints.steps()):
            earlier = f" (earlier: --step {' or '.join(map(str, steps[:-1]))})" if len(steps) > 1 else ""
            print(f"  weights  pipebench export {self.run_id}{earlier}", flush=True)

    def write(self, facts: RunFacts) -> None:
        """Write the run's facts atomically; raises an OSError."""
        replace_file(self.path / _RUN, f"{write(facts)}\n".encode())


def records(besides: RunFolder | None = None) -> list[Path]:
    """Return the folders in the working directory that may hold a run's record, except that of run `besides`."""
    own = None if besides is None else besides.record_path
    found = [*sorted(RUNS.glob(f"*/{RECORD}")), *sorted(Path(RESULTS_FOLDER).glob("*"))]
    return [each for each in found if each.absolute() != own]


def new_run_id(recipe: str) -> str:
    """Return an id for a run of a recipe, given its name."""
    return f"{recipe}-{secrets.token_hex(4)}"


def create(facts: RunFacts, recipe_yaml: str) -> RunFolder:
    """Create a run's folder in the working directory; raises a UserError if that isn't writable."""
    folder = RunFolder(RUNS.absolute() / facts.run_id)
    facts = replace(facts, code_folders=tuple(_seen_from(folder.path, each) for each in facts.code_folders))
    try:
        folder.path.mkdir(parents=True)
        folder.recipe_path.write_text(recipe_yaml, encoding="utf-8")
        folder.write(facts)
    except OSError as error:
        raise UserError(f"{folder.path}: the run's folder can't be made: {error.strerror}") from error
    return folder


def _seen_from(run: Path, folder: str) -> str:
    """Return a folder relative to a run's if it is below the working directory, else unchanged."""
    found = os.path.realpath(folder)
    near = Path(found).is_relative_to(Path.cwd()) and os.path.realpath(run) == str(run)
    return os.path.relpath(found, run) if near else found


def find(run: str) -> RunFolder:
    """Find a run's folder in the working directory.

    `run` is its id or MLflow run id, an unambiguous recipe name or start of an id, or the folder's path.

    Raises:
        UserError: none or several match; names the nearest or all.
    """
    if "/" in run and os.path.isfile(os.path.join(run, _RUN)):
        return RunFolder(Path(run).absolute())
    known = {path.parent.name: RunFolder(path.parent.absolute()) for path in sorted(RUNS.glob(f"*/{_RUN}"))}
    if run in known:
        return known[run]
    of_mlflow = [folder for folder in known.values() if run and folder.mlflow_run_id == run]
    if of_mlflow:
        return of_mlflow[0]
    named = [run_id for run_id in known if run_id.startswith(run) and _DIGITS.fullmatch(run_id[len(run) :])]
    # A recipe's full name wins over longer names that begin with it.
    starting = named or [run_id for run_id in known if run and run_id.startswith(run)]
    if len(starting) == 1:
        return known[starting[0]]
    if starting:
        raise UserError(f"run: got {run!r}, with which {len(starting)} runs begin: {listed(starting, 5)}")
    if not known:
        raise UserError(f"run: got {run[:80]!r}, but {RUNS}/ in the working directory holds no run")
    allowed = f"allowed are the runs in {RUNS}/ ({listed(list(known), 5)}) and their MLflow run ids"
    raise UserError(f"run: got {run[:80]!r}, {allowed}{nearest(run[:80], known)}")


def find_trusted(run: str, *, trusts: bool) -> RunFolder:
    """Find a run's folder like `find`; raises a UserError if another user owns it, unless `trusts`."""
    folder = find(run)
    if not trusts:
        require_own(folder.path, (_RUN, _RECIPE))
    return folder


def resumed(
    run: str, overrides: Sequence[str], *, trusts: bool = False, prints: bool = True
) -> tuple[RunFolder, LoadedRecipe]:
    """Return the folder and the recipe of a run to resume from its last checkpoint.

    Args:
        run: see `find`.
        overrides: of the recipe, as `key=value`.
        trusts: whether the run's code is executed even if another user owns it.
        prints: whether to print what code is executed.

    Raises:
        UserError: there is no such run, another user owns it, it has no checkpoint, an override changes a key on which
            its weights depend, it has trained for more epochs, or nothing is left to train with other keys.
    """
    folder = find_trusted(run, trusts=trusts)
    if not folder.checkpoints.steps():
        raise UserError(f"--resume: run {folder.run_id} has no checkpoint; run its recipe anew")
    before = folder.recipe()
    try:
        loaded = folder.recipe(overrides)
    except RecipeError:  # the cause may be a fixed key on which others depend, as an optimizer's options on its name
        _refuse_changed(_fixed_in(overrides, before.flat))
        raise
    _refuse_changed(key for key in _FIXED if attrgetter(key)(before.recipe) != attrgetter(key)(loaded.recipe))
    epochs, trained = loaded.recipe.train.max_epochs, folder.checkpoints.epochs()
    if epochs < trained:
        raise UserError(
            f"{loaded.origin(_EPOCHS)}: {_EPOCHS}: got {epochs}, but run {folder.run_id} has trained "
            f"{num_epochs(trained)} already; allowed is {math.ceil(trained)} or more"
        )
    if overrides and _is_over(folder, before, loaded, trained):
        raise UserError(
            f"--resume: run {folder.run_id} has trained all it had to, {num_epochs(trained)}: nothing is left to train "
            f"with other keys; {_EPOCHS} and train.target say for how long it goes on"
        )
    require_own_code(loaded, trusts=trusts, prints=prints)
    return folder, replace(loaded, goes_on=True)


def _is_over(folder: RunFolder, before: LoadedRecipe, loaded: LoadedRecipe, trained: float) -> bool:
    """Return whether a run has ended and nothing is left to train with other keys."""
    result = folder.result()
    if result is None or result.outcome == INTERRUPTED or before.recipe.train.target != loaded.recipe.train.target:
        return False
    return result.outcome == REACHED or trained >= loaded.recipe.train.max_epochs


def _refuse_changed(keys: Iterable[str]) -> None:
    """Raise a UserError for the first of these keys, which are fixed."""
    for key in keys:
        raise UserError(
            f"command line: {key}: a run that goes on keeps it, because its weights or its clock depend on it; "
            f"allowed are changes outside {', '.join(_FIXED)}"
        )


def _fixed_in(overrides: Sequence[str], before: Mapping[str, str]) -> Iterator[str]:
    """Yield the fixed keys that overrides change; `before` has the recipe's texts by full key."""
    leaves = Leaves()
    leaves.add_overrides(overrides)
    given = dict(flattened({dotted(key): leaf.value for key, leaf in leaves.found.items()}))
    changed = [key for key, text in given.items() if before.get(key) != text]
    return (fixed for fixed in _FIXED if any(f"{key}.".startswith(f"{fixed}.") for key in changed))
