"""Distributed runs: the command that starts one, and the work of each process.

`pipebench run` plans, creates the run's folder and starts a process per worker. These processes run the same command as
workers. Under torchrun every process is a worker from the start, and rank 0 does what is to be done once. Plan and
profile, which must be the same in all processes, are in the run's folder.
"""

import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from pipebench.checkpoint.store import Checkpoints
from pipebench.distributed.control import LONGEST_WORK, Control, end_quietly
from pipebench.distributed.engine import DistributedEngine
from pipebench.distributed.heartbeat import Heartbeat, store_text
from pipebench.distributed.launch import INTERRUPTED, Process, Start, run_workers, spawned
from pipebench.distributed.launch_child import python_module
from pipebench.distributed.launch_join import RUN
from pipebench.distributed.launch_pipes import announcing_ready, progress_sender, ready_listener, receiving_progress
from pipebench.distributed.launch_worker import fail_silent, launched_by_us, on_stop_request
from pipebench.distributed.slices import ProcessSlices
from pipebench.distributed.world import World, check_world_size, join, shared_folder_check
from pipebench.engine.engine import OnLoss, OnUnit
from pipebench.engine.setup import ranks_of
from pipebench.errors import WorkersFailedError, print_notice
from pipebench.model.allocator import release_copies
from pipebench.model.device import torch_settings
from pipebench.profile.choose import is_measured
from pipebench.profile.model import Profile
from pipebench.recipe.load import LoadedRecipe
from pipebench.recipe.users_code import during
from pipebench.run.agreement import check_agreement, check_made_alike, check_same_data
from pipebench.run.collected_log import collected_log
from pipebench.run.deciding import decision_of, prepare_job, read_decision, store_decision, stored_decision
from pipebench.run.folder import RunFolder
from pipebench.run.identity import checkpoints_of, identity_of, resumed_from, samples_of
from pipebench.run.lock import locked
from pipebench.run.measuring import Together
from pipebench.run.recorder import EndedRunInterrupt, RunRecorder
from pipebench.run.request import RunRequest, with_seed
from pipebench.run.suite import Suite
from pipebench.show.answers import Run
from pipebench.show.console import print_link
from pipebench.show.progress import Silent, lasting
from pipebench.simulate.timeline import Timeline
from pipebench.tracking.entries import outcome_status
from pipebench.tracking.record import read_record, starts_of
from pipebench.tracking.run_log import RunLog, Tracking
from pipebench.train.checkpointing import CheckpointPolicy, load_checked
from pipebench.train.interfaces import OnPoint, ProgressSink
from pipebench.train.job import Decision, Job
from pipebench.train.loop import TrainingLoop
from pipebench.train.profiled_model import ProfiledModel, choose_device
from pipebench.train.result import RunResult

_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_FOLDER_KEY = "pipebench/run-folder"
_USER_ERROR, _FAILED = 2, 3
_LOG = logging.getLogger(__name__)
_LOCK_PATIENCE_S = 120.0  # NFS releases a dead host's locks after its lease of 90 s


def run_distributed(request: RunRequest, tracking: Tracking) -> Run:
    """Start a process per worker on this host, restart them if one dies, and return the result.

    This process locks the run's folder for all of them. It sends to MLflow, by `tracking`, what rank 0 records in the
    folder.

    Raises:
        WorkersFailedError: there is no result.
    """
    silent, decision = request.suite.is_quiet, request.decision
    job = prepare_job(request.loaded, prints_lines=True, silent=silent, trains=False, decision=decision)
    parent_id = request.parent.wait_for_id() if isinstance(request.parent, RunLog) else request.parent
    folder = request.suite.resumed or request.make_folder(parent_mlflow_run_id=parent_id)
    with (
        locked(folder.path),
        tracking.following(folder.record_path) as log,
        announcing_ready(tracking.wait_until_ready) as ready,
    ):
        return _launch(request, job, folder, log, ready)


def _launch(request: RunRequest, job: Job, folder: RunFolder, log: RunLog, ready: Mapping[str, int]) -> Run:
    """Start the workers of a run whose folder exists; see `run_distributed`."""
    suite, setup = request.suite, job.setup
    release_copies(torch.device("cpu"), setup.graph.root)  # no GPU's: `decided_apart` measures there
    if stored_decision(folder, suite.changes) is None:
        store_decision(folder, decision_of(job), suite.changes)
    if suite.resumed is not None:
        folder.result()  # raises an error now if the record is unreadable, rather than at the end
        folder.update(verbose=suite.verbose, silent=suite.silent)
    resume = ["--resume", str(folder.path)] if suite.resumed else []
    start = _start(suite, ["run", *resume, *request.words], choose_device(job.recipe.engine.device).type)
    num_starts = len(starts_of(folder.record_path))
    with receiving_progress(suite.on_progress) as passed:
        code = run_workers(
            start,
            setup.pipeline.num_workers * setup.costs.slices,
            folder.path,
            max_restarts=job.recipe.engine.max_restarts,
            verbose=suite.verbose,
            passed={**passed, **ready},
        )
    # Before workers have begun to record, the record has the result of the run that this one goes on with.
    has_ended = code == 0 or (code == INTERRUPTED and len(starts_of(folder.record_path)) > num_starts)
    result = folder.result() if has_ended else None
    if result is None:
        if code == 0:
            why = "was the disk full, or was it removed?"
            print(f"pipebench: error: {folder.record_path} has no result: {why}", file=sys.stderr)
        elif code != _USER_ERROR:  # after a user's mistake nothing has run, and an earlier record stays
            folder.say_how_to_go_on(suite.changes)
        # A user who interrupts shouldn't wait for MLflow: the next command ends the record, by `close_orphaned`.
        if code not in (_USER_ERROR, INTERRUPTED):
            close_record(folder, log)
        raise WorkersFailedError(code or _FAILED)
    return _ended(request, job, folder, log, result, interrupted=code == INTERRUPTED)


def _ended(
    request: RunRequest, job: Job, folder: RunFolder, log: RunLog, result: RunResult, *, interrupted: bool
) -> Run:
    """Return a run whose result is recorded; raises an EndedRunInterrupt if a signal ended its workers then.

    They may have been drawing pictures. A user who interrupts shouldn't wait for MLflow, either.
    """
    suite, run = request.suite, Run(result, folder.mlflow_run_id, record=folder.record_path)
    prints = suite.prints and not request.is_one_of_many
    try:
        if interrupted:
            raise KeyboardInterrupt
        end_record(folder, result, log)
        if prints:
            print_link(log.where())
    except KeyboardInterrupt as error:
        raise EndedRunInterrupt(run) from error
    finally:
        folder.finish(result, suite.changes, job.recipe.train.checkpoint_keep, prints=prints)
    return replace(run, mlflow_run_id=folder.mlflow_run_id)


def close_record(folder: RunFolder, log: RunLog) -> None:
    """Send what is unsent of a run whose processes have failed, and its end; if MLflow fails, the record stays."""
    try:
        # The run has begun, even if its record has been removed.
        if log.run_id is not None or read_record(folder.record_path) is not None:
            log.log_file()
            log.finish(status="FAILED")
    except Exception as error:  # any disk failure: the launcher's report stands
        _LOG.debug("the record of %s could not be closed: %s", folder.run_id, error)


def end_record(folder: RunFolder, result: RunResult, log: RunLog) -> None:
    """Wait until MLflow has the end of a run. The record lacks the end if the disk was full."""
    record = read_record(folder.record_path)
    if record is None or record.status is None:
        log.finish(status=outcome_status(result))
    else:
        log.settle()


def _start(suite: Suite, words: Sequence[str], device_type: str) -> Start:
    """Return a function that starts a worker, with the words of a command: a copy of the template, or a new process.

    Workers on GPUs are new processes, because CUDA can't be used in copies of a process that has used it.
    """
    template, spawn = suite.template, spawned([*python_module("pipebench"), *words])
    if template is None or device_type != "cpu":
        return spawn

    def start(settings: Mapping[str, str], passed: Mapping[str, int]) -> Process:
        try:
            return template.start(words, settings, passed)
        except OSError:  # the system may have ended the template when memory ran out
            return spawn(settings, passed)

    return start


def work(loaded: LoadedRecipe, suite: Suite) -> None:
    """Do one process's part of a run.

    Raises:
        UserError: the processes don't fit the plan, or don't share a folder.
        PeerLostError: another process has failed.
    """
    engine = loaded.recipe.engine
    # Longer than any work that the watchdog allows, since that is what reports a hanging process.
    operation_s = max(1800.0, 2 * LONGEST_WORK * engine.stall_limit_s)
    with ExitStack() as held:
        # Before NCCL starts: for deterministic runs, torch turns off NCCL's sums in switches (NVLS), which differ from
        # call to call.
        held.enter_context(torch_settings(engine))

        def start_heartbeat(world: World) -> None:
            """Start heartbeats between hosts, before groups are made. On one host the system reports failures."""
            if not world.place.one_host:
                limit_s = engine.silence_limit_s
                held.enter_context(Heartbeat(world.store, world.place, limit_s=limit_s, on_silence=fail_silent))

        with lasting(loaded.recipe.name, "waiting for all workers to join", shown=os.environ.get("RANK", "0") == "0"):
            world = join(engine.device, limit_s=engine.join_limit_s, operation_limit_s=operation_s, met=start_heartbeat)
        restarted = _is_restart(world)
        _remark(world, restarted=restarted)
        folder = _folder(world, RunRequest(loaded, loaded.recipe.name, suite), restarted=restarted)
        held.enter_context(_held_by_first(world, folder, restarted=restarted))
        _record_and_train(loaded, suite, world, folder, restarted=restarted)
    world.close()


def _held_by_first(world: World, folder: RunFolder, *, restarted: bool) -> AbstractContextManager[None]:
    """Hold a run's folder in rank 0, for all processes, unless `pipebench run` is the launcher.

    After a restart the host of the previous rank 0 may be gone. A file server releases its lock only after a while.
    """
    if world.rank > 0 or launched_by_us():
        return nullcontext()
    return locked(folder.path, patience_s=_LOCK_PATIENCE_S if restarted else 0.0)


def _record_and_train(loaded: LoadedRecipe, suite: Suite, world: World, folder: RunFolder, *, restarted: bool) -> None:
    """Do one process's part of a run whose folder exists."""
    shared_folder_check(world, folder.path)
    facts = folder.read()
    silent = facts.silent and launched_by_us()
    suite = replace(suite, name=facts.suite, verbose=facts.verbose, silent=silent, on_progress=progress_sender())
    request = RunRequest(with_seed(loaded, facts.seed), facts.name, suite, facts.parent_mlflow_run_id)
    with collected_log(facts.verbose) as collected, during(request.name):
        if not world.place.one_host:
            check_agreement(world, loaded)
        job = _prepared(request, world, folder)
        num_processes = job.setup.pipeline.num_workers * job.setup.costs.slices
        check_world_size(world.size, num_processes, str(job.setup.plan))
        identity = identity_of(folder, loaded, job, samples_of(job))
        if not world.place.one_host:
            check_same_data(world, identity)
        check_made_alike(world, loaded, job.setup, identity.samples)
        checkpoints = checkpoints_of(folder, job, identity)
        goes_on = suite.resumed is not None
        policy = _checkpoint_policy(world, folder, checkpoints, job, restarted=restarted, goes_on=goes_on)
        train = partial(_train, world, job, policy)
        if world.rank > 0:
            train(Silent(), lambda point: None)
        else:
            if not restarted:
                folder.update(started_at_s=time.time())
            tracking = Tracking(request.suite.name, ready_listener())
            recorder = RunRecorder(request, job, tracking, collected, folder.record_path, policy.samples_done)
            result = recorder.record(train).result
            if not launched_by_us():  # otherwise the launcher does so
                folder.finish(result, suite.changes, job.recipe.train.checkpoint_keep, prints=True)


def _remark(world: World, *, restarted: bool) -> None:
    """Print the world's remark on its connections, if any, on rank 0; and on every other host that it has joined."""
    is_other_host = world.rank > 0 and os.environ.get("LOCAL_RANK") == "0"
    joined = f"rank {world.rank} of {world.size} has joined; rank 0 prints progress and result" if is_other_host else ""
    remark = world.remark if world.rank == 0 else joined
    if remark and not restarted:
        print_notice(remark)


def _train(
    world: World, job: Job, policy: CheckpointPolicy, progress: ProgressSink, on_point: OnPoint
) -> tuple[RunResult, Timeline]:
    """Train this process's worker to the target, under the watchdog."""
    setup = job.setup
    slices = setup.costs.slices
    worker, own = divmod(world.rank, slices)
    gone = f"{store_text(world.place)} has closed the connection: torchrun, or rank 0, has ended there"
    control = Control(
        world.store, ranks_of(setup).index(worker) * slices + own, world.size, setup.pipeline, slices=slices,
        stall_limit_s=job.recipe.engine.stall_limit_s, multiple_of=setup.sampler.streams or 1,
        on_orphan=end_quietly if world.place.one_host else partial(fail_silent, gone, False),
    )  # fmt: skip
    engines: list[DistributedEngine] = []

    def make(on_loss: OnLoss, on_unit: OnUnit) -> DistributedEngine:
        with lasting(job.recipe.name, "connecting workers and warming up", shown=world.rank == 0):
            engines.append(DistributedEngine(setup, world, control, on_loss=on_loss, on_unit=on_unit))
        control.start()
        on_stop_request(control.request_stop)
        return engines[0]

    try:
        found = TrainingLoop(job, make, progress, on_point, policy).run()
    finally:
        control.close()
    engines[0].close()  # a barrier: the store may end with rank 0's process
    return found


def _folder(world: World, request: RunRequest, *, restarted: bool) -> RunFolder:
    """Return the run's folder: the launcher's, or under torchrun one that rank 0 creates and restarts reuse."""
    if launched_by_us():
        return RunFolder(Path(os.environ[RUN]))
    path = ""
    if world.rank == 0:
        store = world.connection
        if request.suite.resumed is not None:
            path = str(request.suite.resumed.path)
        elif restarted and store.check([_FOLDER_KEY]):
            path = store.get(_FOLDER_KEY).decode()
        else:
            path = str(request.make_folder().path)
        store.set(_FOLDER_KEY, path)
    return RunFolder(Path(world.exchange(path)[0]))


def _prepared(request: RunRequest, world: World, folder: RunFolder) -> Job:
    """Prepare the recipe by its decision; rank 0 decides if there is none."""
    loaded, changes = request.loaded, request.suite.changes
    if world.rank == 0 and stored_decision(folder, changes) is None:
        store_decision(folder, decision_of(prepare_job(loaded, trains=False)), changes)
    world.barrier()
    return prepared_together(loaded, read_decision(folder), world)


def prepared_together(loaded: LoadedRecipe, decision: Decision, world: World) -> Job:
    """Prepare a decided recipe in all its processes; measurements run in all of them at the same time.

    Raises:
        UserError: the number of processes isn't the plan's number of workers.
    """
    replicas, slices = decision.plan.replicas, decision.profile.slices
    check_world_size(world.size, sum(replicas) * slices, "-".join(map(str, replicas)), slices)

    # A profile named by the recipe is used unchanged.
    together = is_measured(loaded.recipe, loaded.cluster) and world.size > 1 and slices == 1
    measuring = Together(loaded, world) if together else None
    group = ProcessSlices(slices, world.rank % slices) if slices > 1 else None
    with ExitStack() as building:
        building.enter_context(lasting(loaded.recipe.name, "building the model", shown=world.rank == 0))

        def measure(known: ProfiledModel, profile: Profile) -> Profile:
            assert measuring is not None
            building.close()
            return measuring.profile(known, profile)

        again = measure if measuring else None
        job = prepare_job(loaded, decision=decision, silent=True, measure_again=again, group=group)
    job = replace(job, setup=replace(job.setup, device=world.device))
    return job if measuring is None else measuring.in_use(job)


def _checkpoint_policy(
    world: World, folder: RunFolder, checkpoints: Checkpoints, job: Job, *, restarted: bool, goes_on: bool
) -> CheckpointPolicy:
    """Return where checkpoints go and the one to resume from: rank 0's newest whole one that fits."""
    found = None
    if world.rank == 0 and (restarted or goes_on):
        found = resumed_from(folder, checkpoints, job, required=not restarted)
    chosen = world.exchange(None if found is None else [found.step, list(found.state.optimizer)])[0]
    since_s = folder.read().started_at_s
    if chosen is not None:
        found = found or load_checked(checkpoints.at(chosen[0], check=False), set(chosen[1]), job)
        since_s = max(found.progress.saved_at_s, since_s or 0.0)
    lost_s = max(0.0, time.time() - since_s) if restarted and since_s is not None else 0.0
    return CheckpointPolicy(checkpoints, found, world.exchange(lost_s)[0])


def _is_restart(world: World) -> bool:
    """Return whether a launcher restarted these processes automatically.

    Each torchrun counts restarts on its own host. It doesn't count one after a failure on another host. But its store
    outlives the processes, and then has the run's folder. What is trained depends on rank 0's answer only; the others'
    answers decide only what they print.
    """
    if world.place.attempt is not None:
        return world.place.attempt > 0
    has_folder = world.rank == 0 and bool(world.connection.check([_FOLDER_KEY]))
    return has_folder or int(os.environ.get(_RESTARTS, "0")) > 0
