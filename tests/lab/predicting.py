"""Predicts recipes at any bandwidth of a lab's wires, by simulation with measurements of this machine."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pipebench.cluster import Cluster
from pipebench.errors import UserError
from pipebench.recipe.load import LoadedRecipe
from pipebench.run.deciding import decision_of, prepare_job
from pipebench.schedule.modes import AUTO
from pipebench.simulate.costs import HostCosts
from pipebench.train.job import Job
from pipebench.train.periods import Periods
from pipebench.train.simulated import predicted_metrics
from pipebench.typed_json import read
from tests.lab.measuring import MEASURED


@dataclass(frozen=True)
class Predicted:
    """The prediction of a recipe at a bandwidth."""

    plan: str  # in the papers' notation
    num_stages: int  # of the plan
    throughput_samples_per_s: float  # in training
    epoch_time_s: float  # of training
    comm_bytes_per_sample: float  # payload


@dataclass(frozen=True)
class LabSchedule:
    """Epochs and evaluations to a recipe's target, which don't depend on bandwidth: engines train the same weights."""

    epochs_to_target: float | None  # of the virtual engine's training; None if it doesn't reach the target
    evaluation_time_s: float  # of all evaluations until then, on the virtual clock

    def time_to_accuracy_s(self, predicted: Predicted) -> float | None:
        """Return the predicted time to the target."""
        if self.epochs_to_target is None:
            return None
        return self.epochs_to_target * predicted.epoch_time_s + self.evaluation_time_s


class Predictor:
    """Predicts recipes; predictions are cached.

    Args:
        recipes: by name, on the lab's cluster at any bandwidth, each with the profile's file as its `engine.timing`.
        hosts: CPU time of communication, by name of the recipe.
    """

    def __init__(self, recipes: Mapping[str, LoadedRecipe], hosts: Mapping[str, HostCosts]) -> None:
        self._recipes, self._hosts = recipes, hosts
        self._found: dict[tuple[str, float], Predicted] = {}
        self._fixed: dict[str, Job] = {}  # recipes whose plan doesn't depend on bandwidth

    def predict(self, name: str, bandwidth_bytes_per_s: float) -> Predicted:
        """Return the prediction of a recipe at a bandwidth.

        Raises:
            UserError: its plan has another number of workers than the lab.
        """
        key = (name, bandwidth_bytes_per_s)
        if key not in self._found:
            self._found[key] = self._predicted(name, bandwidth_bytes_per_s)
        return self._found[key]

    def _predicted(self, name: str, bandwidth_bytes_per_s: float) -> Predicted:
        loaded = self._recipes[name]
        cluster = cluster_at(loaded.cluster, bandwidth_bytes_per_s)
        job = self._fixed.get(name) or at_bandwidth(loaded, bandwidth_bytes_per_s)
        asked = loaded.recipe.parallelism
        if asked.cuts is not None or (asked.plan != AUTO and len(job.setup.plan.stages) == 1):
            self._fixed[name] = job
        setup = replace(job.setup, cluster=cluster, costs=replace(job.setup.costs, host=self._hosts[name]))
        metrics = predicted_metrics(setup, Periods.of(loaded.recipe.train, setup.sampler.minibatches_per_epoch))
        return Predicted(
            str(setup.plan), len(setup.plan.stages), metrics["throughput_samples_per_s"], metrics["epoch_time_s"],
            metrics["comm_bytes_per_sample"],
        )  # fmt: skip


def at_bandwidth(loaded: LoadedRecipe, bandwidth_bytes_per_s: float) -> Job:
    """Prepare a recipe, without weights, for wires of a bandwidth.

    Raises:
        UserError: its plan has another number of workers than the cluster.
    """
    cluster = cluster_at(loaded.cluster, bandwidth_bytes_per_s)
    job = prepare_job(replace(loaded, cluster=cluster), trains=False)
    workers = sum(decision_of(job).plan.replicas)
    if workers != cluster.num_workers:
        raise UserError(
            f"{loaded.source}: parallelism.plan: {job.setup.plan} has {workers} workers, and the lab has "
            f"{cluster.num_workers}: choose --hosts and --workers-per-host so that their product is {workers}"
        )
    return job


def cluster_at(cluster: Cluster, bandwidth_bytes_per_s: float) -> Cluster:
    """Return a lab's cluster with wires of a bandwidth."""
    wires = replace(cluster.levels[-1], bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    return replace(cluster, levels=(*cluster.levels[:-1], wires))


def read_measured(folder: Path) -> tuple[dict[str, Path], dict[str, HostCosts]]:
    """Return what `measuring` wrote, by recipe: files of profiles, and the CPU time of communication."""
    data = json.loads((folder / MEASURED).read_text())
    profiles = {name: folder / row["profile"] for name, row in data.items()}
    return profiles, {name: read(HostCosts, row["host"]) for name, row in data.items()}
