"""The table of metrics: a row per number that a run logs, with its unit, the runs that have it, and its uses.

Tracking, reports and predictions read the table. A metric without a row causes a warning, which fails tests. A data set
defines its own metrics (`top1`, `bleu`); the table has only their `best_*` and `final_*`.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from enum import Flag, auto
from fnmatch import fnmatchcase
from itertools import chain
from numbers import Real
from typing import Any, NamedTuple

from pipebench.hooks import EXTENSIONS, hooks

SECONDS, BYTES, SHARE, RATE, COUNT, UPDATES, OWN = "s", "bytes", "share", "samples/s", "count", "updates", "its own"
LOWER, HIGHER, NEITHER = "lower", "higher", ""
# Which runs have a metric.
ALL = "all runs"
TRAINED = "runs that train"
TARGET = "runs that train and reach their target"
SIMULATED = "simulated runs"
MEASURED = "runs in processes"
SWAPPED = "runs whose layers swap"  # 0 for others
MOVED = "runs whose layers may move"  # 0 for others


class Use(Flag):
    """Uses of a metric."""

    NOWHERE = 0
    COLUMN = auto()  # a column of MLflow's table of runs, in this order
    MEDIAN = auto()  # a group of seeds logs the median of its runs, under the same name
    SPREAD = auto()  # a group of seeds also logs mean, standard deviation, smallest and largest
    PREDICTED = auto()  # a run in processes also logs the simulator's value, as `predicted_<name>`
    ZERO = auto()  # 0 if a run doesn't log it: nothing was sent, swapped or moved
    CLOCKED = auto()  # depends on the run's clock: runs on the wall clock log it as `wall_<name>`, see `ranked`


COLUMN, MEDIAN, SPREAD, PREDICTED, ZERO = Use.COLUMN, Use.MEDIAN, Use.SPREAD, Use.PREDICTED, Use.ZERO
CLOCKED = Use.CLOCKED


class Metric(NamedTuple):
    """A row of the table."""

    name: str  # as logged; a trailing `*` stands for any ending
    unit: str  # shares are fractions, never per cent
    better: str  # `lower`, `higher`, or "" if neither
    of: str  # runs that have it
    says: str  # description
    shown: Use = Use.NOWHERE  # uses


METRICS = (
    Metric("target_reached", COUNT, HIGHER, TRAINED, "1 if the target was reached, 0 if it was missed", COLUMN),
    Metric("time_to_accuracy_s", SECONDS, LOWER, TARGET,
           "the run's clock at the first evaluation that reached the target", COLUMN | SPREAD | CLOCKED),
    Metric("comm_bytes_per_sample", BYTES, LOWER, ALL,
           "bytes sent between workers per training sample, counted at the sender", COLUMN | MEDIAN | PREDICTED | ZERO),
    Metric("peak_memory_bytes_max", BYTES, LOWER, ALL, "the largest memory of a worker at any time", COLUMN | MEDIAN),
    Metric("allocated_peak_bytes_max", BYTES, LOWER, MEASURED,
           "the most that a worker's allocator held on its GPU: live tensors and workspaces of kernels"),
    Metric("reserved_peak_bytes_max", BYTES, LOWER, MEASURED, "the most that a worker's allocator reserved on its GPU"),
    Metric("host_peak_bytes_max", BYTES, LOWER, SWAPPED, "the most swapped activations on a worker's host", COLUMN),
    Metric("bubble_fraction", SHARE, LOWER, ALL,
           "fraction of the workers' training time in which they computed nothing", COLUMN | MEDIAN | PREDICTED),
    Metric("epochs_to_target", COUNT, LOWER, TARGET, "epochs trained when the target was reached", COLUMN | SPREAD),
    Metric("epoch_time_s", SECONDS, LOWER, ALL,
           "time to train an epoch, without evaluation and checkpoints", COLUMN | SPREAD | PREDICTED | CLOCKED),
    Metric("throughput_samples_per_s", RATE, HIGHER, ALL,
           "training samples over seconds of training", COLUMN | SPREAD | PREDICTED | CLOCKED),
    Metric("best_*", OWN, NEITHER, TRAINED, "the best value of a curve", COLUMN),
    Metric("prediction_error", SHARE, NEITHER, MEASURED, "measured epoch time over the predicted one, less 1", COLUMN),
    Metric("comm_stall_fraction", SHARE, LOWER, ALL,
           "fraction of the workers' time in which they waited for messages in transfer", COLUMN | PREDICTED),
    Metric("swap_stall_fraction", SHARE, LOWER, SWAPPED,
           "fraction of the workers' time in which they waited for copies from the host", COLUMN | ZERO),
    Metric("waiting_s", SECONDS, LOWER, MEASURED, "time in which workers waited, summed over workers", COLUMN),
    Metric("samples_per_update", COUNT, NEITHER, ALL, "training samples in an update of the first stage", COLUMN),
    Metric("weight_versions_max", COUNT, LOWER, TRAINED, "the most weight versions that a worker held at once", COLUMN),
    Metric("staleness_mean", UPDATES, LOWER, TRAINED,
           "updates between a worker's pull and its push, on average, with sync `asynchronous`", COLUMN),
    Metric("staleness_max", UPDATES, LOWER, TRAINED, "the most updates between a worker's pull and its push", COLUMN),
    Metric("num_workers", COUNT, NEITHER, ALL, "workers of the plan", COLUMN),
    Metric("num_devices", COUNT, NEITHER, ALL, "devices of all workers; several each if layers are sliced", COLUMN),
    Metric("comm_bytes_total", BYTES, LOWER, ALL,
           "bytes sent for training; those of buffers and evaluation are counted apart", COLUMN | ZERO),
    Metric("comm_bytes_per_sample_activation", BYTES, LOWER, ALL,
           "activations sent per training sample", COLUMN | PREDICTED | ZERO),
    Metric("comm_bytes_per_sample_gradient", BYTES, LOWER, ALL,
           "gradients of activations sent per training sample", COLUMN | PREDICTED | ZERO),
    Metric("comm_bytes_per_sample_all_reduce", BYTES, LOWER, ALL,
           "bytes sent per training sample to sum over replicas", COLUMN | PREDICTED | ZERO),
    Metric("comm_bytes_per_sample_parameter_server", BYTES, LOWER, ALL,
           "gradients pushed and weights pulled per training sample", COLUMN | PREDICTED | ZERO),
    Metric("comm_bytes_per_sample_reduce_scatter", BYTES, LOWER, ALL,
           "gradients that sharded replicas scatter per training sample", COLUMN | PREDICTED | ZERO),
    Metric("comm_bytes_per_sample_all_gather", BYTES, LOWER, ALL,
           "weights that sharded replicas gather per training sample", COLUMN | PREDICTED | ZERO),
    Metric("comm_bytes_per_sample_tensor", BYTES, LOWER, ALL,
           "bytes sent per training sample between the slices of layers", COLUMN | PREDICTED | ZERO),
    Metric("comm_bytes_level_*", BYTES, LOWER, ALL,
           "of the total, the bytes that cross a level of the cluster as the outermost on their way", COLUMN | ZERO),
    Metric("comm_bytes_activation", BYTES, LOWER, ALL, "of the total, activations", ZERO),
    Metric("comm_bytes_gradient", BYTES, LOWER, ALL, "of the total, gradients of activations", ZERO),
    Metric("comm_bytes_all_reduce", BYTES, LOWER, ALL, "of the total, sums over replicas", ZERO),
    Metric("comm_bytes_parameter_server", BYTES, LOWER, ALL, "of the total, gradients pushed and weights pulled", ZERO),
    Metric("comm_bytes_reduce_scatter", BYTES, LOWER, ALL, "of the total, gradients of sharded replicas", ZERO),
    Metric("comm_bytes_all_gather", BYTES, LOWER, ALL, "of the total, weights of sharded replicas", ZERO),
    Metric("comm_bytes_tensor", BYTES, LOWER, ALL, "of the total, what slices of layers send each other", ZERO),
    Metric("comm_bytes_buffers", BYTES, LOWER, ALL,
           "buffers, such as running statistics, that replicas average when the pipeline drains", ZERO),
    Metric("comm_bytes_evaluation", BYTES, LOWER, ALL, "bytes sent for evaluations", ZERO),
    Metric("effective_fraction", SHARE, HIGHER, ALL, "fraction of time that workers computed, without recomputation"),
    Metric("recompute_fraction", SHARE, LOWER, ALL, "fraction of time that workers ran a forward again"),
    Metric("pcie_out_fraction", SHARE, LOWER, ALL,
           "bytes sent over the devices' PCIe lanes, for swapping and messages, over what these could carry"),
    Metric("pcie_in_fraction", SHARE, LOWER, ALL, "bytes received over PCIe lanes, over what these could carry"),
    Metric("total_time_s", SECONDS, LOWER, ALL,
           "the run's clock at its end, evaluations and checkpoints included; simulated runs have neither"),
    Metric("time_to_accuracy_without_evaluation_s", SECONDS, LOWER, TARGET, "training time to the target"),
    Metric("time_to_accuracy_checkpoint_s", SECONDS, LOWER, TARGET, "time of checkpoints until the target was reached"),
    Metric("training_time_s", SECONDS, LOWER, TRAINED,
           "training time on the run's clock; with the next three it adds up to the total"),
    Metric("evaluation_time_s", SECONDS, LOWER, TRAINED, "time of all evaluations, on the run's clock"),
    Metric("checkpoint_time_s", SECONDS, LOWER, TRAINED, "time of all checkpoints, where any are written"),
    Metric("lost_time_s", SECONDS, LOWER, TRAINED, "time between the checkpoint that a restart loaded and the restart"),
    Metric("start_time_s", SECONDS, LOWER, TRAINED,
           "real time before the run's clock began: for the profile, the plan, connecting and warming up"),
    Metric("wall_time_s", SECONDS, LOWER, TRAINED, "real time of the run, since its clock began or it was resumed"),
    Metric("final_*", OWN, NEITHER, TRAINED, "the last value of a curve"),
    Metric("workers_counted_from_samples", COUNT, NEITHER, TRAINED,
           "samples trained before a resume, which rates and the workers' own numbers leave out"),
    Metric("planned_throughput_samples_per_s", RATE, HIGHER, SIMULATED, "throughput by the recipe's cost model"),
    Metric("steady_throughput_samples_per_s", RATE, HIGHER, SIMULATED, "throughput with the last cuts, if layers move"),
    Metric("slowest_throughput_samples_per_s", RATE, HIGHER, SIMULATED,
           "throughput of a search's slowest architecture"),
    Metric("least_throughput_samples_per_s", RATE, HIGHER, SIMULATED, "throughput in the slowest moment of a search"),
    Metric("ideal_throughput_samples_per_s", RATE, HIGHER, SIMULATED, "throughput of a search with balanced stages"),
    Metric("swap_bytes_out", BYTES, LOWER, SWAPPED, "bytes copied from devices to hosts", ZERO),
    Metric("swap_bytes_in", BYTES, LOWER, SWAPPED, "bytes copied from hosts to devices", ZERO),
    Metric("repartitions", COUNT, NEITHER, MOVED, "how often the cuts of stages changed", ZERO),
    Metric("migration_bytes", BYTES, LOWER, MOVED, "bytes of layers that moved to another worker", ZERO),
    Metric("migration_stall_s", SECONDS, LOWER, MOVED, "time in which moves at drains let nothing compute", ZERO),
    Metric("migration_peak_bytes_per_s", BYTES, LOWER, SIMULATED, "the highest rate at which layers moved", ZERO),
    Metric("predicted_*", OWN, NEITHER, MEASURED, "the simulator's value of the metric of that name"),
    Metric("compute_s", SECONDS, NEITHER, MEASURED, "time in which workers computed, summed over workers"),
    Metric("sending_s", SECONDS, LOWER, MEASURED, "time of handing over messages, summed over workers"),
    Metric("swapping_s", SECONDS, LOWER, MEASURED, "time of copies to and from hosts, summed over workers"),
    Metric("other_s", SECONDS, LOWER, MEASURED, "the rest of the workers' time, summed over workers"),
    Metric("overlapped_s", SECONDS, NEITHER, MEASURED,
           "time of NCCL's transfers before computing waited for them, summed over workers"),
    Metric("waiting_*", SECONDS, LOWER, MEASURED, "time of waiting for one kind of event, summed over workers"),
    Metric("comm_time_*", SECONDS, LOWER, MEASURED,
           "time of transfers of one kind, or over one level; transfers at the same time count each"),
    Metric("comm_transfers_*", COUNT, NEITHER, MEASURED, "transfers of one kind"),
)  # fmt: skip

# Curves of every run, beside those of its data set's metrics, which have other names.
CURVES = ("train_loss", "eval_loss", "virtual_time_s")
_WALL = "wall_"
_CLOCKED_NAMES = tuple(row.name for row in METRICS if CLOCKED in row.shown)
# Metrics of every stage: columns of `stages.csv`, and of reports as `stage_<index>_<name>`.
STAGE_METRICS = (
    Metric("num_layers", COUNT, NEITHER, ALL, "layers that compute"),
    Metric("replicas", COUNT, NEITHER, ALL, "workers that run the stage"),
    Metric("depth", COUNT, NEITHER, ALL, "the most minibatches in flight on a replica"),
    Metric("forward_s", SECONDS, LOWER, ALL, "forward time of a minibatch, or microbatch, by the profile"),
    Metric("backward_s", SECONDS, LOWER, ALL, "backward time of a minibatch, or microbatch, by the profile"),
    Metric("update_s", SECONDS, LOWER, ALL, "time of the optimizer's step, by the profile"),
    Metric("samples_per_update", COUNT, NEITHER, ALL, "training samples in an update of the stage"),
    Metric("lr", OWN, NEITHER, ALL, "the stage's learning rate, before the schedule and after warm-up"),
    Metric("effective_fraction", SHARE, HIGHER, SIMULATED,
           "fraction of time that its workers computed, without recomputation"),
    Metric("recompute_fraction", SHARE, LOWER, SIMULATED, "fraction of time that its workers ran a forward again"),
    Metric("parameter_bytes", BYTES, LOWER, ALL, "one version of its weights"),
    Metric("weight_versions_max", COUNT, LOWER, TRAINED, "the most weight versions that a replica held at once"),
    Metric("peak_memory_bytes", BYTES, LOWER, ALL, "the largest memory of a replica at any time"),
    Metric("host_peak_bytes", BYTES, LOWER, SWAPPED, "the most swapped activations on a replica's host"),
)  # fmt: skip

# Metrics summarised over a recipe's seeds, beside the best scores.
SPREAD_METRICS = tuple(row.name for row in METRICS if SPREAD in row.shown)


def known(name: str) -> Metric | None:
    """Return a metric's row in the table or among those of extensions; None if it has none."""
    of_extensions = (row for each in EXTENSIONS for rows in hooks("rows", [each]).values() for row in rows)
    return next((row for row in chain(METRICS, of_extensions) if fnmatchcase(name, row.name)), None)


def names(rows: Iterable[Metric]) -> Iterator[str]:
    """Yield the names of rows, except those that end in `*` and stand for several metrics."""
    return (row.name for row in rows if not row.name.endswith("*"))


def ranked(values: Mapping[str, float], clock: str) -> dict[str, float]:
    """Return metrics under their names in MLflow, so that it never ranks times of two clocks together.

    >>> ranked({"epoch_time_s": 2.0, "epoch_time_s_mean": 2.0, "bubble_fraction": 0.1}, "wall")
    {'wall_epoch_time_s': 2.0, 'wall_epoch_time_s_mean': 2.0, 'bubble_fraction': 0.1}
    """
    if clock != "wall":
        return dict(values)
    return {f"{_WALL}{name}" if name.startswith(_CLOCKED_NAMES) else name: value for name, value in values.items()}


def unranked(values: Mapping[str, float]) -> dict[str, float]:
    """Return metrics with the names that they had before `ranked`.

    >>> unranked({"wall_epoch_time_s": 2.0, "wall_time_s": 3.0})
    {'epoch_time_s': 2.0, 'wall_time_s': 3.0}
    """
    plain = {name: name.removeprefix(_WALL) for name in values}
    return {plain[name] if plain[name].startswith(_CLOCKED_NAMES) else name: value for name, value in values.items()}


def on_its_clock(values: Mapping[str, float], name: str) -> float | None:
    """Return a run's metric by its name, or by the name that `ranked` gives it; None if the run has neither.

    >>> on_its_clock({"wall_epoch_time_s": 2.0}, "epoch_time_s")
    2.0
    """
    return values.get(name, values.get(f"{_WALL}{name}"))


def as_number(value: Any) -> float | None:
    """Return a value as an int or float, which JSON can hold; None if it isn't a number.

    >>> [as_number(value) for value in (3, True, float("inf"), "3", None)]
    [3, 1.0, inf, None, None]
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return float(value) if isinstance(value, Real) else None  # `json` can't write NumPy's float32


def warn_of_unlisted(logged: Iterable[str]) -> None:
    """Warn of metrics without a row, which tracking drops from its tables and reports refuse.

    It is no error, since the run's result is worth more; tests turn warnings into errors.
    """
    if unlisted := sorted(name for name in logged if known(name) is None):
        warnings.warn(f"metrics without a row in pipebench/metrics.py: {', '.join(unlisted)}", stacklevel=2)
