"""Measurements that the processes of a run make together before training; cached for the next run.

On CPUs all processes measure at the same time, as they compute in training: first single layers, then every worker's
program (in situ), then the cost of messages and sums. Workers that share a GPU measure in turns. Workers with GPUs of
their own don't disturb each other. There a profile is that of a kind of device: the launcher has measured its own kind,
and one worker of each other kind measures that one.

Rank 0's cache has earlier measurements by as many processes on the same cores.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import torch

from pipebench import typed_json
from pipebench.distributed.cores import numbered, processor_shares
from pipebench.distributed.host import host_costs, in_situ, in_turns
from pipebench.distributed.launch_pipes import ready_listener
from pipebench.distributed.world import World
from pipebench.engine.in_situ import InSituTimes, entries, fetches_itself, in_use, mean
from pipebench.profile.cache import code_hash, find, keep
from pipebench.profile.choose import measured_key, profile_for, profile_request
from pipebench.profile.devices import local_device_name
from pipebench.profile.measure import mean_profile, measured_profile
from pipebench.profile.model import Profile
from pipebench.profile.request import ProfileRequest
from pipebench.profile.stored import read_profile, write_profile
from pipebench.recipe.load import LoadedRecipe
from pipebench.recipe.ranges import ANEW
from pipebench.show.progress import lasting
from pipebench.simulate.costs import HostCosts, stage_costs
from pipebench.train.job import Job
from pipebench.train.profiled_model import ProfiledModel
from pipebench.train.request import travelling_sizes

T = TypeVar("T")
# Keys of `train` that determine which updates a run makes, but not how long an update takes
_UNTIMED = ("seed", "schedule", "target", "max_epochs", "evaluate_every", "checkpoint_every", "checkpoint_keep")
_LAUNCHER_S = 60.0  # to wait until the launcher is ready to record


@dataclass(frozen=True)
class _Form(Generic[T]):
    """The text form of a measurement, for other processes and the cache; `read` raises an error for other texts."""

    read: Callable[[str], T]
    write: Callable[[T], str]


_PROFILE = _Form(read_profile, write_profile)
_TIMES = _Form(lambda text: mean([json.loads(text)]), lambda times: json.dumps(entries(times)))
_HOST = _Form(partial(typed_json.read, HostCosts), typed_json.write)


class Together:
    """Measures a recipe's model for one run in all its processes; all call the same methods."""

    def __init__(self, loaded: LoadedRecipe, world: World) -> None:
        self._loaded, self._world = loaded, world
        self._is_first = world.rank == 0
        self._recipe = loaded.recipe
        self._kinds = world.exchange(local_device_name(world.device))
        self._shares = numbered(world.exchange(processor_shares(world.device)))
        gpus = [shares[-1]["name"] for shares in self._shares if shares[-1]["kind"] == "GPU"]
        self._alone = len({*gpus}) == world.size  # every worker has a GPU of its own
        self._layers_key: Mapping[str, object] = {}

    def profile(self, known: ProfiledModel, profile: Profile) -> Profile:
        """Return a model's profile at the sizes that travel, measured for a run that was planned with `profile`."""
        sizes = travelling_sizes(self._recipe, known.dataset)
        request = profile_request(self._recipe, known.graph, known.dataset, sizes)
        if self._alone:
            return self._by_kind(request, profile)
        key = measured_key(self._recipe, request, self._world.device)
        self._layers_key = {**key, "together": self._shares}
        with lasting(self._recipe.name, "measuring layers in all workers", shown=self._is_first) as say:
            measure = partial(
                measured_profile, request._replace(model=profile.model), self._world.device, engine=self._recipe.engine,
                on_progress=lambda work: say(f"{work}, in all workers"), whole_steps=False,
            )  # fmt: skip

            def together() -> Profile:
                mine = in_turns(self._world, measure)
                return mean_profile([read_profile(text) for text in self._world.exchange(write_profile(mine))])

            return self._once(self._layers_key, _PROFILE, together)

    def in_use(self, job: Job) -> Job:
        """Return a job with costs measured while all workers compute and communicate, on CPUs and shared GPUs."""
        if self._alone:
            return job  # an instruction alone on its GPU takes what its layers take
        setup, world = job.setup, self._world
        train = {key: value for key, value in asdict(self._recipe.train).items() if key not in _UNTIMED}
        lists = {"plan": repr(setup.plan), "pipeline": repr(setup.pipeline), "train": train, "compiled": setup.compiled}
        with lasting(job.recipe.name, "measuring stages while all workers compute", shown=self._is_first) as say:
            times = self._once({**self._layers_key, "code": code_hash(), **lists}, _TIMES, lambda: self._in_situ(job))
            say("measuring messages and sums while all workers compute")
            fetches = fetches_itself(setup)
            beside = {"together": self._shares, "code": code_hash(), "torch": torch.__version__, "fetches": fetches}
            host = self._once(beside, _HOST, lambda: host_costs(world, fetches=fetches))
        if not times:  # a stage was too large for its GPU: only times of single layers are known
            return replace(job, setup=replace(setup, costs=replace(setup.costs, host=host)))
        profile = in_use(job.profile, setup, times)
        costs = replace(stage_costs(profile, setup.plan, sharded=setup.pipeline.is_sharded), host=host)
        return replace(job, setup=replace(setup, profile=profile, costs=costs))

    def _in_situ(self, job: Job) -> InSituTimes:
        """Measure every worker's program in all processes; return nothing if one is too large for its GPU."""
        found = self._world.exchange(entries(in_situ(self._world, job.setup)))
        return mean(found) if all(found) else {}

    def _by_kind(self, request: ProfileRequest, profile: Profile) -> Profile:
        """Return the mean over the workers' devices, each kind measured by the first worker that has one."""
        kinds, rank = self._kinds, self._world.rank
        mine = None
        if kinds[rank] != profile.device and kinds.index(kinds[rank]) == rank:
            with lasting(self._recipe.name, f"measuring layers on {kinds[rank]}") as say:
                here = profile_for(self._recipe, self._loaded.cluster, request, self._world.device, say)
                mine = write_profile(here)
        found = {profile.device: profile}
        found |= {kinds[i]: read_profile(text) for i, text in enumerate(self._world.exchange(mine)) if text is not None}
        if {*kinds} == {profile.device}:
            return profile
        devices = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
        return replace(mean_profile([found[kind] for kind in kinds]), note=f"{profile.note}; mean over {devices}")

    def _once(self, key: Mapping[str, object], form: _Form[T], measure: Callable[[], T]) -> T:
        """Return what rank 0's cache has under a key, else what `measure` returns, the same in all processes."""
        looks = self._is_first and self._recipe.engine.timing != ANEW
        text = self._world.exchange(find(key, form.read) if looks else None)[0]
        if text is not None:
            return form.read(text)
        ready = ready_listener() if self._is_first else None
        if ready is not None:  # before, the launcher's imports would take cores from the measurement
            ready(_LAUNCHER_S)
        found = measure()
        if self._is_first and found:  # a stage that didn't fit beside another program may fit next time
            keep(key, form.write(found))
        return found
