"""The table of metrics: name, unit, runs that have it and uses of every number of a run, one row each.

Tracking, reports and predictions read the table. A metric without a row causes a warning, which fails tests. Metrics of
a data set (`top1`, `bleu`) belong to the data set; the table has only their `best_*` and `final_*`.
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
    MEDIAN = auto()  # a group of seeds has the median of its runs, under the same name
    SPREAD = auto()  # likewise, and mean, standard deviation, smallest and largest
    PREDICTED = auto()  # a run in processes also has the simulator's value, as `predicted_<name>`
    ZERO = auto()  # 0 if a run lacks it: nothing was sent, swapped or moved
    CLOCKED = auto()  # on the run's clock: MLflow has it of runs on the wall clock as `wall_<name>`, see `ranked`


COLUMN, MEDIAN, SPREAD, PREDICTED, ZERO = Use.COLUMN, Use.MEDIAN, Use.SPREAD, Use.PREDICTED, Use.ZERO
CLOCKED = Use.CLOCKED


class Metric(NamedTuple):
    """A row of the table."""

    name: str  # as logged; a trailing `*` stands for any ending
    unit: str  # shares are fractions, never per cent
    better: str  # `lower`, `higher`, or "" if neither
    of: str  # runs that have it
    says: str  # description
    shown: Use = Use.NOWHERE  # its uses


METRICS = (
    Metric("target_reached", COUNT, HIGHER, TRAINED, "1 if the target was reached, 0 if it was missed", COLUMN),
    Metric("time_to_accuracy_s", SECONDS, LOWER, TARGET,
           "the run's clock at the first evaluation that reached the target", COLUMN | SPREAD | CLOCKED),
    Metric("comm_bytes_per_sample", BYTES, LOWER, ALL,
           "sent between workers per training sample, counted at the sender", COLUMN | MEDIAN | PREDICTED | ZERO),
    Metric("peak_memory_bytes_max", BYTES, LOWER, ALL, "the most that a worker held at once", COLUMN | MEDIAN),
    Metric("allocated_peak_bytes_max", BYTES, LOWER, MEASURED,
           "the most that a worker's allocator held on its GPU: live tensors and workspaces of kernels"),
    Metric("reserved_peak_bytes_max", BYTES, LOWER, MEASURED, "the most that it had reserved there"),
    Metric("host_peak_bytes_max", BYTES, LOWER, SWAPPED, "the most that was on a worker's host", COLUMN),
    Metric("bubble_fraction", SHARE, LOWER, ALL,
           "of the workers' time in training in which they computed nothing", COLUMN | MEDIAN | PREDICTED),
    Metric("epochs_to_target", COUNT, LOWER, TARGET, "epochs trained when the target was reached", COLUMN | SPREAD),
    Metric("epoch_time_s", SECONDS, LOWER, ALL,
           "of training an epoch, without evaluation and checkpoints", COLUMN | SPREAD | PREDICTED | CLOCKED),
    Metric("throughput_samples_per_s", RATE, HIGHER, ALL,
           "training samples over seconds of training", COLUMN | SPREAD | PREDICTED | CLOCKED),
    Metric("best_*", OWN, NEITHER, TRAINED, "the best value of a curve", COLUMN),
    Metric("prediction_error", SHARE, NEITHER, MEASURED, "measured epoch time over the predicted one, less 1", COLUMN),
    Metric("comm_stall_fraction", SHARE, LOWER, ALL,
           "of the workers' time in which they waited for bytes on their way", COLUMN | PREDICTED),
    Metric("swap_stall_fraction", SHARE, LOWER, SWAPPED,
           "of the workers' time in which they waited for copies from the host", COLUMN | ZERO),
    Metric("waiting_s", SECONDS, LOWER, MEASURED, "that workers waited, summed over them", COLUMN),
    Metric("samples_per_update", COUNT, NEITHER, ALL, "training samples in an update of the first stage", COLUMN),
    Metric("weight_versions_max", COUNT, LOWER, TRAINED, "the most versions of its weights that a worker kept", COLUMN),
    Metric("staleness_mean", UPDATES, LOWER, TRAINED,
           "between a worker's pull and push, where nobody waits for replicas", COLUMN),
    Metric("staleness_max", UPDATES, LOWER, TRAINED, "the most of these", COLUMN),
    Metric("num_workers", COUNT, NEITHER, ALL, "of the plan", COLUMN),
    Metric("num_devices", COUNT, NEITHER, ALL, "of the workers, each of which may have several", COLUMN),
    Metric("comm_bytes_total", BYTES, LOWER, ALL,
           "sent for training; buffers and evaluation are counted apart", COLUMN | ZERO),
    Metric("comm_bytes_per_sample_activation", BYTES, LOWER, ALL, "of these, activations", COLUMN | PREDICTED | ZERO),
    Metric("comm_bytes_per_sample_gradient", BYTES, LOWER, ALL,
           "of these, gradients of activations", COLUMN | PREDICTED | ZERO),
    Metric("comm_bytes_per_sample_all_reduce", BYTES, LOWER, ALL,
           "of these, what replicas sum", COLUMN | PREDICTED | ZERO),
    Metric("comm_bytes_per_sample_parameter_server", BYTES, LOWER, ALL,
           "of these, gradients pushed and weights pulled", COLUMN | PREDICTED | ZERO),
    Metric("comm_bytes_per_sample_reduce_scatter", BYTES, LOWER, ALL,
           "of these, gradients of sharded replicas", COLUMN | PREDICTED | ZERO),
    Metric("comm_bytes_per_sample_all_gather", BYTES, LOWER, ALL,
           "of these, weights of sharded replicas", COLUMN | PREDICTED | ZERO),
    Metric("comm_bytes_per_sample_tensor", BYTES, LOWER, ALL,
           "of these, what the devices of workers with sliced layers sum and gather", COLUMN | PREDICTED | ZERO),
    Metric("comm_bytes_level_*", BYTES, LOWER, ALL,
           "of the total, what crosses a level of the cluster at most", COLUMN | ZERO),
    Metric("comm_bytes_activation", BYTES, LOWER, ALL, "of the total, activations", ZERO),
    Metric("comm_bytes_gradient", BYTES, LOWER, ALL, "of the total, gradients of activations", ZERO),
    Metric("comm_bytes_all_reduce", BYTES, LOWER, ALL, "of the total, what replicas sum", ZERO),
    Metric("comm_bytes_parameter_server", BYTES, LOWER, ALL, "of the total, gradients pushed and weights pulled", ZERO),
    Metric("comm_bytes_reduce_scatter", BYTES, LOWER, ALL, "of the total, gradients of sharded replicas", ZERO),
    Metric("comm_bytes_all_gather", BYTES, LOWER, ALL, "of the total, weights of sharded replicas", ZERO),
    Metric("comm_bytes_tensor", BYTES, LOWER, ALL, "of the total, what slices of layers sum and gather", ZERO),
    Metric("comm_bytes_buffers", BYTES, LOWER, ALL, "running statistics that replicas average at drains", ZERO),
    Metric("comm_bytes_evaluation", BYTES, LOWER, ALL, "sent for evaluations", ZERO),
    Metric("effective_fraction", SHARE, HIGHER, ALL,
           "of the workers' time in which they computed what wasn't computed before"),
    Metric("recompute_fraction", SHARE, LOWER, ALL, "of the workers' time in which they ran a forward again"),
    Metric("pcie_out_fraction", SHARE, LOWER, ALL, "of what devices' PCIe could send: swapped, and messages over PCIe"),
    Metric("pcie_in_fraction", SHARE, LOWER, ALL, "of what devices' PCIe could receive, likewise"),
    Metric("total_time_s", SECONDS, LOWER, ALL, "the run's clock at its end, evaluations and checkpoints included"),
    Metric("time_to_accuracy_without_evaluation_s", SECONDS, LOWER, TARGET, "of training until the target was reached"),
    Metric("time_to_accuracy_checkpoint_s", SECONDS, LOWER, TARGET, "of checkpoints until the target was reached"),
    Metric("training_time_s", SECONDS, LOWER, TRAINED,
           "of training, on the run's clock; the next three add up with it to the total"),
    Metric("evaluation_time_s", SECONDS, LOWER, TRAINED, "of all evaluations, on the run's clock"),
    Metric("checkpoint_time_s", SECONDS, LOWER, TRAINED, "of all checkpoints, where any are kept"),
    Metric("lost_time_s", SECONDS, LOWER, TRAINED,
           "between the checkpoint that a restart went on from and the restart"),
    Metric("start_time_s", SECONDS, LOWER, TRAINED,
           "here, before the run's clock began: the profile, the plan, connecting and warming up"),
    Metric("wall_time_s", SECONDS, LOWER, TRAINED,
           "that the run took here, from the start of its clock or since it was resumed"),
    Metric("final_*", OWN, NEITHER, TRAINED, "the last value of a curve"),
    Metric("workers_counted_from_samples", COUNT, NEITHER, TRAINED,
           "samples from which on the workers' own numbers count"),
    Metric("planned_throughput_samples_per_s", RATE, HIGHER, SIMULATED,
           "that the recipe's cost model expects of the plan"),
    Metric("steady_throughput_samples_per_s", RATE, HIGHER, SIMULATED, "of the last cuts alone, where layers move"),
    Metric("slowest_throughput_samples_per_s", RATE, HIGHER, SIMULATED, "of the slowest architecture of a search"),
    Metric("least_throughput_samples_per_s", RATE, HIGHER, SIMULATED, "of the slowest moment of a search"),
    Metric("ideal_throughput_samples_per_s", RATE, HIGHER, SIMULATED, "of a search whose stages were always balanced"),
    Metric("swap_bytes_out", BYTES, LOWER, SWAPPED, "copied to hosts", ZERO),
    Metric("swap_bytes_in", BYTES, LOWER, SWAPPED, "copied back from hosts", ZERO),
    Metric("repartitions", COUNT, NEITHER, MOVED, "how often stages were cut anew", ZERO),
    Metric("migration_bytes", BYTES, LOWER, MOVED, "of layers that moved to another worker", ZERO),
    Metric("migration_stall_s", SECONDS, LOWER, MOVED, "in which nothing was computed since layers moved", ZERO),
    Metric("migration_peak_bytes_per_s", BYTES, LOWER, SIMULATED, "of layers, at the peak", ZERO),
    Metric("predicted_*", OWN, NEITHER, MEASURED, "what the simulator says of the metric of that name"),
    Metric("compute_s", SECONDS, NEITHER, MEASURED, "that workers computed, summed over them"),
    Metric("sending_s", SECONDS, LOWER, MEASURED, "that workers spent on handing over messages"),
    Metric("swapping_s", SECONDS, LOWER, MEASURED, "that workers spent on copies to and from their hosts"),
    Metric("other_s", SECONDS, LOWER, MEASURED, "that workers spent on none of this"),
    Metric("overlapped_s", SECONDS, NEITHER, MEASURED,
           "of transfers by NCCL before computing waited for them, summed over workers"),
    Metric("waiting_*", SECONDS, LOWER, MEASURED, "that workers waited for one kind of thing"),
    Metric("comm_time_*", SECONDS, LOWER, MEASURED,
           "of transfers of a kind, or over a level; those that overlap count each"),
    Metric("comm_transfers_*", COUNT, NEITHER, MEASURED, "transfers of a kind"),
)  # fmt: skip

# Curves of every run, beside those of its data set's metrics, which have other names.
CURVES = ("train_loss", "eval_loss", "virtual_time_s")
_WALL = "wall_"
_CLOCKED_NAMES = tuple(row.name for row in METRICS if CLOCKED in row.shown)
# Metrics of every stage: columns of `stages.csv`, and of reports as `stage_<index>_<name>`.
STAGE_METRICS = (
    Metric("num_layers", COUNT, NEITHER, ALL, "that compute"),
    Metric("replicas", COUNT, NEITHER, ALL, "workers that run the stage"),
    Metric("depth", COUNT, NEITHER, ALL, "the most minibatches in flight on a replica"),
    Metric("forward_s", SECONDS, LOWER, ALL, "of what travels, by the profile"),
    Metric("backward_s", SECONDS, LOWER, ALL, "of what travels, by the profile"),
    Metric("update_s", SECONDS, LOWER, ALL, "of the optimizer, by the profile"),
    Metric("samples_per_update", COUNT, NEITHER, ALL, "training samples in one of its updates"),
    Metric("lr", OWN, NEITHER, ALL, "the stage's learning rate, before the schedule and after warm-up"),
    Metric("effective_fraction", SHARE, HIGHER, SIMULATED,
           "of its workers' time in which they computed what wasn't computed before"),
    Metric("recompute_fraction", SHARE, LOWER, SIMULATED, "of its workers' time in which they ran a forward again"),
    Metric("parameter_bytes", BYTES, LOWER, ALL, "of one version of its weights"),
    Metric("weight_versions_max", COUNT, LOWER, TRAINED, "the most versions of its weights that a replica kept"),
    Metric("peak_memory_bytes", BYTES, LOWER, ALL, "the most that a replica held at once"),
    Metric("host_peak_bytes", BYTES, LOWER, SWAPPED, "the most that was on a replica's host"),
)  # fmt: skip

# Metrics summarised over a recipe's seeds, beside the best scores.
SPREAD_METRICS = tuple(row.name for row in METRICS if SPREAD in row.shown)


def known(name: str) -> Metric | None:
    """Return the row of a metric, in the table or of an extension; None if there is none."""
    of_extensions = (row for each in EXTENSIONS for rows in hooks("rows", [each]).values() for row in rows)
    return next((row for row in chain(METRICS, of_extensions) if fnmatchcase(name, row.name)), None)


def names(rows: Iterable[Metric]) -> Iterator[str]:
    """Yield the names of rows that stand for one metric each."""
    return (row.name for row in rows if not row.name.endswith("*"))


def ranked(values: Mapping[str, float], clock: str) -> dict[str, float]:
    """Return metrics under the names by which MLflow ranks runs: seconds of two clocks never share one.

    >>> ranked({"epoch_time_s": 2.0, "epoch_time_s_mean": 2.0, "bubble_fraction": 0.1}, "wall")
    {'wall_epoch_time_s': 2.0, 'wall_epoch_time_s_mean': 2.0, 'bubble_fraction': 0.1}
    """
    if clock != "wall":
        return dict(values)
    return {f"{_WALL}{name}" if name.startswith(_CLOCKED_NAMES) else name: value for name, value in values.items()}


def unranked(values: Mapping[str, float]) -> dict[str, float]:
    """Return metrics that `ranked` named under their own names.

    >>> unranked({"wall_epoch_time_s": 2.0, "wall_time_s": 3.0})
    {'epoch_time_s': 2.0, 'wall_time_s': 3.0}
    """
    plain = {name: name.removeprefix(_WALL) for name in values}
    return {plain[name] if plain[name].startswith(_CLOCKED_NAMES) else name: value for name, value in values.items()}


def on_its_clock(values: Mapping[str, float], name: str) -> float | None:
    """Return a metric of a run under its name or that of `ranked`, None without either.

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

    Only a warning, as the run's result is worth more; tests turn warnings into errors.
    """
    if unlisted := sorted(name for name in logged if known(name) is None):
        warnings.warn(f"metrics without a row in pipebench/metrics.py: {', '.join(unlisted)}", stacklevel=2)
