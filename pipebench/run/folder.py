"""The folder of a distributed run: what its processes and later commands need to know of it.

pipebench-runs/quickstart-1f0c9a7e/
    run.json        who the run is
    recipe.yaml     the recipe with everything filled in that doesn't follow from the plan, a recipe of its own
    lock            held by the process that trains it
    checkpoints/
    record/         what it has logged, its result among it
"""

import os
import re
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pipebench.errors import UserError, nearest
from pipebench.files import read_bytes
from pipebench.files import replace as replace_file
from pipebench.recipe.load import LoadedRecipe, load
from pipebench.run.ownership import require_own, require_own_code
from pipebench.tracking.record import RECORD, RESULTS_FOLDER, mlflow_run_id, read_record
from pipebench.train.result import RunResult
from pipebench.typed_json import Finite, JsonError, Within, read, shown, write

if TYPE_CHECKING:
    from pipebench.checkpoint.store import Checkpoints

RUNS = Path("pipebench-runs")
_RUN, _RECIPE = "run.json", "recipe.yaml"
_DIGITS = re.compile(r"-[0-9a-f]{8}", re.ASCII)  # what makes a run's id of its recipe's name

# What a checkpoint's weights, position in the data and clock depend on: the same in a run that goes on.
_FIXED = (
    "model", "dataset", "train.seed", "train.minibatch_size", "train.streams", "train.optimizer.name",
    "train.optimizer.target", "engine.kind",
)  # fmt: skip


@dataclass(frozen=True)
class RunFacts:
    """Who a run is.

    Attributes:
        run_id: the recipe's name and eight hexadecimal digits: the folder's name.
        name: what the run is called in MLflow.
        suite: the MLflow experiment.
        seed: the run's, whatever the recipe says.
        words: the command line's recipe and overrides.
        parent_mlflow_run_id: of the comparison or the group of seeds it belongs to.
        verbose: whether workers log every instruction.
        started_at_s: seconds since the epoch when its first processes were ready; None before.
        code_folders: where the modules of the recipe's targets were found first; those in the working directory as they
            are seen from the run's folder, so that a copy of all of it finds its own.
    """

    run_id: str
    name: str
    suite: str
    seed: Annotated[int, Within(0, 2**63 - 1, f"a whole number from 0 to {2**63 - 1}")]
    words: tuple[str, ...]
    parent_mlflow_run_id: str | None
    verbose: bool
    started_at_s: Finite | None
    code_folders: tuple[str, ...] = ()  # a run before recipes could name code by folder has none


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run; it exists."""

    path: Path

    @property
    def run_id(self) -> str:
        """Return the run's id."""
        return self.path.name

    @property
    def recipe_path(self) -> Path:
        """Return the recipe file, a recipe of its own."""
        return self.path / _RECIPE

    @property
    def record_path(self) -> Path:
        """Return where everything that the run logs is recorded."""
        return self.path / RECORD

    @property
    def mlflow_run_id(self) -> str | None:
        """MLflow's id of the run, None if it has none."""
        return mlflow_run_id(self.record_path)

    def result(self) -> RunResult | None:
        """Return what the run came to; None if it hasn't ended, or has gone on since.

        Raises:
            UserError: the record can't be read.
        """
        record = read_record(self.record_path)
        return None if record is None else record.result

    def recipe(self, overrides: Sequence[str] = ()) -> LoadedRecipe:
        """Return the recipe, which finds the code it names where the run did.

        Raises:
            UserError: the folder isn't whole, or an override is wrong.
        """
        self.read_bytes(_RECIPE)
        loaded = load(str(self.recipe_path), overrides)
        own = (Path(os.path.normpath(self.path / folder)) for folder in self.read().code_folders)
        folders = dict.fromkeys((*own, *loaded.folders))
        return replace(loaded, folders=tuple(folders))

    @cached_property
    def checkpoints(self) -> "Checkpoints":
        """Return the run's checkpoints."""
        from pipebench.checkpoint.store import Checkpoints

        return Checkpoints(self.path / "checkpoints")

    def read(self) -> RunFacts:
        """Return who the run is.

        Raises:
            UserError: run.json can't be read.
        """
        path = self.path / _RUN
        try:
            facts = read(RunFacts, self.read_bytes(_RUN))
        except JsonError as error:
            raise UserError(f"{path}: isn't the description of a run of pipebench: {error}") from None
        if facts.run_id != self.run_id:
            raise UserError(f"{path}: run_id: got {shown(facts.run_id)}, allowed is the folder's name, {self.run_id}")
        return facts

    def read_bytes(self, name: str) -> bytes:
        """Return what is in one of the run's files.

        Raises:
            UserError: it can't be read.
        """
        return read_bytes(self.path / name)

    def update(self, **changes: Any) -> RunFacts:
        """Change some facts and return all; readers find the old or the new ones, never half of them.

        Raises:
            UserError: run.json can't be read.
            OSError: it can't be written.
        """
        facts = replace(self.read(), **changes)
        self.write(facts)
        return facts

    def say_how_to_go_on(self, changes: Sequence[str]) -> None:
        """Print the command that goes on with the run, if there is a checkpoint of it.

        Args:
            changes: the overrides that it went on with before, beside its recipe.
        """
        if self.checkpoints.steps():
            command = shlex.join(["pipebench", "run", "--resume", self.run_id, *changes])
            print(f"pipebench: its checkpoints are kept: {command}", file=sys.stderr, flush=True)

    def write(self, facts: RunFacts) -> None:
        """Write who the run is; it is there whole, or not at all.

        Raises:
            OSError: it can't be written.
        """
        replace_file(self.path / _RUN, f"{write(facts)}\n".encode())


def records() -> list[Path]:
    """Return the folders in the working directory that may hold the record of a run."""
    return [*sorted(RUNS.glob(f"*/{RECORD}")), *sorted(Path(RESULTS_FOLDER).glob("*"))]


def new_run_id(recipe: str) -> str:
    """Return an id for a run of the recipe of this name."""
    return f"{recipe}-{secrets.token_hex(4)}"


def create(facts: RunFacts, recipe_yaml: str) -> RunFolder:
    """Make the folder of a new run in the working directory.

    Args:
        facts: who it is.
        recipe_yaml: the recipe with everything filled in.

    Raises:
        UserError: nothing can be written to the working directory.
    """
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
    """Return a folder of the working directory as it is seen from a run's, another as it is."""
    found = os.path.realpath(folder)
    near = Path(found).is_relative_to(Path.cwd()) and os.path.realpath(run) == str(run)
    return os.path.relpath(found, run) if near else found


def find(run: str) -> RunFolder:
    """Return the folder of a run in the working directory.

    Args:
        run: its id, the name of its recipe if no other run is of that, the start of an id that no other run has, its
            MLflow run id, or the folder's path.

    Raises:
        UserError: there is none, or there are several; names the nearest or all.
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
    # A recipe's own name means its runs, whatever other recipes' names begin with it.
    starting = named or [run_id for run_id in known if run and run_id.startswith(run)]
    if len(starting) == 1:
        return known[starting[0]]
    if starting:
        raise UserError(f"run: got {run!r}, with which {len(starting)} runs begin: {_listed(starting)}")
    if not known:
        raise UserError(f"run: got {run[:80]!r}, but {RUNS}/ in the working directory holds no run")
    allowed = f"allowed are the runs in {RUNS}/ ({_listed(list(known))}) and their MLflow run ids"
    raise UserError(f"run: got {run[:80]!r}, {allowed}{nearest(run[:80], known)}")


def find_trusted(run: str, *, trusts: bool) -> RunFolder:
    """Return the folder of a run whose code may be executed; see `find`.

    Args:
        run: see there.
        trusts: take it whoever's it is.

    Raises:
        UserError: there is none, or it belongs to another user.
    """
    folder = find(run)
    if not trusts:
        require_own(folder.path, (_RUN, _RECIPE))
    return folder


def resumed(
    run: str, overrides: Sequence[str], *, trusts: bool = False, tells: bool = True
) -> tuple[RunFolder, LoadedRecipe]:
    """Return a run's folder and its recipe with some keys changed, to go on from its last checkpoint.

    Args:
        run: see `find`.
        overrides: `key=value` texts.
        trusts: execute what it names whoever's it is.
        tells: say what is executed.

    Raises:
        UserError: there is no such run, it is another user's, it has no checkpoint, or a key was changed that its
            weights depend on.
    """
    folder = find_trusted(run, trusts=trusts)
    if not folder.checkpoints.steps():
        raise UserError(f"--resume: run {folder.run_id} has no checkpoint; run its recipe anew")
    before = folder.recipe()
    loaded = folder.recipe(overrides)
    changed = [key for key in _FIXED if attrgetter(key)(before.recipe) != attrgetter(key)(loaded.recipe)]
    if changed:
        raise UserError(
            f"command line: {changed[0]}: a run that goes on keeps it, because its weights or its clock depend on it; "
            f"allowed are changes outside {', '.join(_FIXED)}"
        )
    require_own_code(loaded, trusts=trusts, tells=tells)
    return folder, loaded


def _listed(run_ids: Sequence[str]) -> str:
    more = f" and {len(run_ids) - 5} more" if len(run_ids) > 5 else ""
    return ", ".join(run_ids[:5]) + more
