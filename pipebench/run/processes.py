"""A run in processes: what the command line does to start it, and what every process does.

`pipebench run` is the parent: it plans, makes the run's folder, and starts a process per worker, which run the same
command and find themselves to be workers. Under torchrun every process is a worker from the start, and rank 0 does what
is to be done once. What all must agree on (plan, profile) is written into the run's folder.
"""

import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipebench.distributed.control import Control
from pipebench.distributed.engine import DistributedEngine
from pipebench.distributed.host import host_costs
from pipebench.distributed.launch import INTERRUPTED, run_workers
from pipebench.distributed.launch_join import RUN
from pipebench.distributed.launch_worker import fail_stalled, launched_by_us, on_stop_request
from pipebench.distributed.world import World, check_world_size, join, shared_folder_check
from pipebench.engine.setup import ranks_of
from pipebench.errors import UserError, WorkersFailedError, printable
from pipebench.files import replace as replace_file
from pipebench.model.device import torch_settings
from pipebench.profile.measure import measured_profile
from pipebench.profile.model import Profile
from pipebench.profile.stored import read_profile, write_profile
from pipebench.profile.together import mean_profile
from pipebench.recipe.load import LoadedRecipe
from pipebench.recipe.schema import Recipe
from pipebench.run import folder as run_folder
from pipebench.run.decision import decision_of, keep_decision, kept_decision, read_decision
from pipebench.run.folder import RunFolder
from pipebench.run.recording import collected_log, recipe_yaml
from pipebench.schedule.notation import format_plan
from pipebench.show.progress import Silent
from pipebench.simulate.costs import NO_HOST_COSTS
from pipebench.tracking import Tracking, default_uri
from pipebench.tracking.store import Store
from pipebench.train.checkpointing import CheckpointPolicy
from pipebench.train.interfaces import OnLoss, OnUnit
from pipebench.train.loop import TrainingLoop
from pipebench.train.prepare import Job, ProfiledModel, travelling_sizes
from pipebench.train.result import INTERRUPTED as STOPPED
from pipebench.train.result import RunResult
from pipebench.train.resume import load_checked, newest, nothing_to_go_on_from
from pipebench.typed_json import read, write

_LOG = logging.getLogger("pipebench.run")
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_FOLDER_KEY = "pipebench/run-folder"
# What a checkpoint's weights, position in the data and clock depend on: the same in a run that goes on.
_FIXED = (
    "model", "dataset", "train.seed", "train.minibatch_size", "train.streams", "train.optimizer.name",
    "train.optimizer.target", "engine.kind",
)  # fmt: skip
_USER_ERROR = 2
_MEASURED = "measured"


@dataclass(frozen=True)
class RunRequest:
    """What the command line asks for one run in processes.

    Attributes:
        words: the recipe and its overrides, for the processes' own command line.
        suite: names the MLflow experiment.
        verbose: log every instruction.
        resumed: the folder of the run to go on with; None for a new run.
    """

    words: tuple[str, ...]
    suite: str
    verbose: bool
    resumed: RunFolder | None = None

    @property
    def changes(self) -> tuple[str, ...]:
        """What a run that goes on does otherwise than its recipe says."""
        return self.words if self.resumed is not None else ()


def run_in_processes(
    loaded: LoadedRecipe, job: Job, name: str, request: RunRequest, parent_run_id: str | None
) -> RunResult:
    """Start a process per worker on this host, restart them when one dies, and return what the run came to.

    Args:
        loaded: the recipe.
        job: the same, planned.
        name: what the run is called.
        request: see there.
        parent_run_id: MLflow's id of the comparison the run belongs to.

    Raises:
        WorkersFailedError: there is no result.
    """
    recipe = job.recipe
    folder = request.resumed or _create(loaded, recipe.train.seed, name, request, parent_run_id)
    if kept_decision(folder, request.changes) is None:
        keep_decision(folder, decision_of(job), request.changes)
    if request.resumed is not None:
        folder.update(verbose=request.verbose)
    before = folder.read_bytes(folder.result_path.name) if folder.result_path.exists() else None
    folder.result_path.unlink(missing_ok=True)
    resume = ["--resume", str(folder.path)] if request.resumed else []
    command = [sys.executable, "-m", "pipebench", "run", *resume, *request.words]
    workers = job.setup.pipeline.num_workers
    code = run_workers(command, workers, folder.path, max_restarts=recipe.engine.max_restarts, verbose=request.verbose)
    if code or not folder.result_path.exists():
        if code == _USER_ERROR:  # nothing has run: the record of what ran before stands
            if before is not None:
                replace_file(folder.result_path, before)
        else:
            _close_record(folder, code)
            folder.say_how_to_go_on(request.changes)
        raise WorkersFailedError(code or 3)
    result = read(RunResult, folder.result_path.read_bytes())
    if result.outcome == STOPPED:
        folder.say_how_to_go_on(request.changes)
    return result


def resumed(run: str, overrides: Sequence[str]) -> tuple[RunFolder, LoadedRecipe]:
    """Return a run's folder and its recipe with some keys changed, to go on from its last checkpoint.

    Raises:
        UserError: there is no such run, it has no checkpoint, or a key was changed that its weights depend on.
    """
    folder = run_folder.find(run)
    if not folder.checkpoints.steps():
        raise UserError(f"--resume: run {folder.run_id} has no checkpoint; run its recipe anew")
    before = folder.recipe()
    loaded = folder.recipe(overrides)
    changed = [key for key in _FIXED if _value(before.recipe, key) != _value(loaded.recipe, key)]
    if changed:
        raise UserError(
            f"command line: {changed[0]}: a run that goes on keeps it, because its weights or its clock depend on it; "
            f"allowed are changes outside {', '.join(_FIXED)}"
        )
    return folder, loaded


def work(loaded: LoadedRecipe, request: RunRequest) -> None:
    """Do one process's part of a run.

    Args:
        loaded: the recipe; the same in all processes.
        request: see there.

    Raises:
        UserError: the processes don't fit the plan, or don't share a folder.
        PeerLostError: another process is gone.
    """
    engine = loaded.recipe.engine
    world = join(engine.device, limit_s=engine.join_limit_s, operation_limit_s=max(1800.0, 2 * engine.stall_limit_s))
    _remark(world)
    folder = _folder(world, loaded, request)
    shared_folder_check(world, folder.path)
    facts = folder.read()
    recipe = replace(loaded.recipe, train=replace(loaded.recipe.train, seed=facts.seed))
    with collected_log(facts.verbose) as log_text, torch_settings(engine):
        job = _prepared(loaded, recipe, world, folder, request)
        check_world_size(world.size, job.setup.pipeline.num_workers, str(job.setup.plan))
        policy = _keeping(world, folder, job, goes_on=request.resumed is not None)
        process = _Process(world, folder, job, policy)
        if world.rank == 0:
            _first(loaded, process, log_text, request.changes)
        else:
            process.train(Silent(), lambda point: None)
    world.close()


def _remark(world: World) -> None:
    """Tell once, on rank 0, what is to be known of how the processes reach each other."""
    if world.remark and world.rank == 0 and not _is_restart(world):
        print(f"pipebench: {world.remark}", file=sys.stderr, flush=True)


class _Process:
    """One process of a run, ready to train."""

    def __init__(self, world: World, folder: RunFolder, job: Job, policy: CheckpointPolicy) -> None:
        self.world, self.folder, self.job, self.policy = world, folder, job, policy
        setup, engine = job.setup, job.recipe.engine
        worker = ranks_of(setup).index(world.rank)
        self._control = Control(
            world.store, worker, world.size, setup.pipeline, stall_limit_s=engine.stall_limit_s, on_stall=fail_stalled,
            multiple_of=setup.sampler.streams or 1,
        )  # fmt: skip

    def train(self, progress: Any, on_point: Any) -> tuple[RunResult, Any]:
        """Train to the target, watched."""
        engines: list[DistributedEngine] = []

        def make(on_loss: OnLoss, on_unit: OnUnit) -> DistributedEngine:
            made = DistributedEngine(
                self.job.setup, self.world, control=self._control, on_loss=on_loss, on_unit=on_unit
            )
            engines.append(made)
            self._control.start()
            on_stop_request(self._control.request_stop)
            return made

        try:
            found = TrainingLoop(self.job, make, progress, on_point, self.policy).run()
        finally:
            self._control.close()
        for engine in engines:  # waits for all: the store may end with rank 0's process
            engine.close()
        return found


def _first(loaded: LoadedRecipe, process: _Process, log_text: Any, changes: Sequence[str]) -> None:
    """Do rank 0's part: train, record, print, and leave the result in the run's folder."""
    from pipebench.run.runner import recorded_run

    folder = process.folder
    facts = folder.read()
    if not _is_restart(process.world):
        folder.update(started_at_s=time.time())
    tracking = Tracking(facts.suite)
    result = recorded_run(
        loaded, process.job, facts.name, tracking, facts.parent_mlflow_run_id, log_text, process.train,
        mlflow_run_id=facts.mlflow_run_id, on_run_id=folder.keep_mlflow_run_id,
        on_result=lambda result: replace_file(folder.result_path, write(result).encode()),
    )  # fmt: skip
    if result.outcome == STOPPED and not launched_by_us():  # else the launcher says it
        folder.say_how_to_go_on(changes)


def _close_record(folder: RunFolder, code: int) -> None:
    """Set the MLflow status of a run whose rank 0 may have died before it could; where MLflow fails, it stays open."""
    try:
        facts = folder.read()
        if facts.mlflow_run_id is None:
            return
        store = Store(default_uri(), facts.suite)
        store.connect()
        status = "KILLED" if code == INTERRUPTED else "FAILED"
        store.end_run(facts.mlflow_run_id, status, time.time_ns() // 1_000_000)
    except Exception as error:  # whatever MLflow, the disk or the network can think of: the launcher's report stands
        _LOG.debug("MLflow's record of %s could not be closed: %s", folder.run_id, error)


def _create(
    loaded: LoadedRecipe, seed: int, name: str, request: RunRequest, parent_run_id: str | None = None
) -> RunFolder:
    return run_folder.create(
        name,
        recipe=loaded.recipe.name,
        recipe_yaml=recipe_yaml(loaded, seed),
        suite=request.suite,
        seed=seed,
        words=request.words,
        parent_mlflow_run_id=parent_run_id,
        verbose=request.verbose,
        code_folders=loaded.folders,
    )


def _folder(world: World, loaded: LoadedRecipe, request: RunRequest) -> RunFolder:
    """Return the run's folder: the launcher's, or, under torchrun, one that rank 0 makes and all restarts keep."""
    if launched_by_us():
        return RunFolder(Path(os.environ[RUN]))
    path = ""
    if world.rank == 0:
        store = world.connection
        restarted = os.environ.get(_RESTARTS, "0") != "0" and store.check([_FOLDER_KEY])
        if request.resumed is not None:
            path = str(request.resumed.path)
        elif restarted:
            path = store.get(_FOLDER_KEY).decode()
        else:
            path = str(_create(loaded, loaded.recipe.train.seed, loaded.recipe.name, request).path)
        store.set(_FOLDER_KEY, path)
    return RunFolder(Path(world.exchange(path)[0]))


def _prepared(loaded: LoadedRecipe, recipe: Recipe, world: World, folder: RunFolder, request: RunRequest) -> Job:
    """Prepare the recipe by what was decided; rank 0 decides where nobody has."""
    from pipebench.run.runner import prepare_job

    if world.rank == 0 and kept_decision(folder, request.changes) is None:
        keep_decision(folder, decision_of(prepare_job(loaded, recipe, trains=False)), request.changes)
    world.barrier()
    decision = read_decision(folder)
    replicas = decision.plan.replicas
    check_world_size(world.size, sum(replicas), format_plan(replicas))

    def measure(known: ProfiledModel, profile: Profile) -> Profile:
        return _measured_together(recipe, known, profile, world)

    together = decision.profile.source == _MEASURED and world.size > 1
    job = prepare_job(loaded, recipe, kept=decision, measure_again=measure if together else None)
    costs = replace(job.setup.costs, host=host_costs(world) if together else NO_HOST_COSTS)
    return replace(job, setup=replace(job.setup, device=world.device, costs=costs))


def _measured_together(recipe: Recipe, known: ProfiledModel, profile: Profile, world: World) -> Profile:
    """Measure the profile again, in all processes at the same time."""
    sizes = travelling_sizes(recipe, known.dataset)
    world.barrier()
    mine = measured_profile(
        known.graph, known.dataset, sizes, recipe.train.optimizer, world.device, profile.model, engine=recipe.engine
    )
    return mean_profile([read_profile(text) for text in world.exchange(write_profile(mine))])


def _keeping(world: World, folder: RunFolder, job: Job, *, goes_on: bool) -> CheckpointPolicy:
    """Return where checkpoints go and the one to begin with: the newest that is whole and fits, as rank 0 sees it."""
    restarted = _is_restart(world)
    found = None
    if world.rank == 0 and (restarted or goes_on):
        found, skipped = newest(folder.checkpoints, job)
        if found is None and not restarted:
            raise nothing_to_go_on_from(folder.run_id, skipped)
        for sentence in skipped:
            print(f"pipebench: {printable(sentence)}", file=sys.stderr, flush=True)
        where = "the beginning" if found is None else f"minibatch {found.step}"
        print(f"pipebench: {folder.run_id} goes on from {where}", file=sys.stderr, flush=True)
    chosen = world.exchange(None if found is None else [found.step, list(found.state.optimizer)])[0]
    since_s = folder.read().started_at_s
    if chosen is not None:
        found = found or load_checked(folder.checkpoints.at(chosen[0], check=False), set(chosen[1]))
        since_s = max(found.progress.saved_at_s, since_s or 0.0)
    lost_s = max(0.0, time.time() - since_s) if restarted and since_s is not None else 0.0
    return CheckpointPolicy(folder.checkpoints, found, world.exchange(lost_s)[0])


def _is_restart(world: World) -> bool:
    """Return whether a launcher has started these processes again by itself."""
    return (world.place.attempt or int(os.environ.get(_RESTARTS, "0"))) > 0


def _value(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value
