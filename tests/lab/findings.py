"""Options and results of a lab, as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipebench.train.result import RunResult
from tests.lab.predicting import Predicted

_UNITS = (("Gbit", 1e9), ("Mbit", 1e6), ("kbit", 1e3), ("bit", 1.0))


@dataclass(frozen=True)
class Case:
    """A recipe with its overrides."""

    name: str  # the recipe's; in a sweep, with the values that vary
    path: Path  # the recipe's file
    words: tuple[str, ...]  # overrides
    mode: str  # of parallelism


@dataclass(frozen=True)
class Options:
    """The options of `python -m tests.lab`."""

    num_hosts: int  # of the lab
    workers_per_host: int  # processes on each host
    bandwidths: tuple[float, ...]  # of the wires, bytes per second, headers included
    climbs: bool  # whether runs around the predicted crossover are measured, too
    folder: Path  # for all files; absolute


@dataclass(frozen=True)
class Wire:
    """A wire as measured with two plain sockets."""

    bandwidth_bytes_per_s: float | None  # its limit; None for none
    goodput_bytes_per_s: float  # payload per second, in one direction
    latency_s: float  # half of the round trip of a small message


@dataclass(frozen=True)
class Passed:
    """The traffic of a run over all wires."""

    wire_bytes: int  # that the interfaces counted from the run's start to its end, at the senders
    num_pieces: int  # packets that the interfaces counted, of up to 64 kB each
    payload_bytes: int  # that the run logged as sent between hosts: training, buffers, evaluation

    @property
    def header_bytes(self) -> int:
        """Headers of Ethernet, IP and TCP with timestamps: 66 bytes per piece, acknowledgements included."""
        return 66 * self.num_pieces

    @property
    def other_bytes(self) -> int:
        """Neither payload nor headers: torchrun's rendezvous, the store's heartbeats, headers of messages, drains."""
        return self.wire_bytes - self.payload_bytes - self.header_bytes


@dataclass(frozen=True)
class Run:
    """A recipe that trained at a bandwidth."""

    case: Case  # the recipe
    bandwidth_bytes_per_s: float  # of the wires
    predicted: Predicted  # before the run
    predicted_time_to_accuracy_s: float | None  # before the run; None without a target
    result: RunResult  # of the run
    passed: Passed  # its traffic

    @property
    def throughput_samples_per_s(self) -> float:
        return float(self.result.metrics["throughput_samples_per_s"])

    @property
    def time_to_accuracy_s(self) -> float | None:
        """Measured; None without a target, or if it wasn't reached."""
        found = self.result.metrics.get("time_to_accuracy_s")
        return None if found is None else float(found)


@dataclass(frozen=True)
class LinkFinding:
    """The bandwidth at which a pipeline and data parallelism are predicted to be equally fast."""

    pipeline: str  # the recipe of the fastest pipeline there
    data_parallel: str  # the fastest recipe there whose replicas hold the whole model
    bandwidth_bytes_per_s: float  # of the crossing
    ladder: tuple[float, ...]  # bandwidths around it, each 1.5 times the one before


@dataclass(frozen=True)
class Findings:
    """The results of a lab."""

    options: Options  # of the command
    cases: tuple[Case, ...]  # the recipes, in order
    free: Wire  # the wires without a limit
    wires: tuple[Wire, ...]  # the wires at each limit
    # Predictions at many bandwidths, ascending, by recipe.
    curves: Mapping[str, Sequence[tuple[float, Predicted]]]
    runs: tuple[Run, ...]  # at the bandwidths of the options, in the order in which they ran
    crossing: LinkFinding | None  # None if none is predicted or the options don't ask for it
    climbed: tuple[Run, ...]  # the runs on its ladder


def label(bandwidth_bytes_per_s: float) -> str:
    """Return a bandwidth as the command line takes it.

    >>> label(1.25e8), label(7.03e6)
    ('1Gbit', '56.24Mbit')
    """
    bits = 8 * bandwidth_bytes_per_s
    unit, size = next(each for each in _UNITS if bits >= each[1])
    return f"{bits / size:.10g}{unit}"
