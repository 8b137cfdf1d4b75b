"""What a lab is asked for and what it finds, as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipebench.train.result import RunResult
from tests.lab.predicting import Predicted

_UNITS = (("Gbit", 1e9), ("Mbit", 1e6), ("kbit", 1e3), ("bit", 1.0))


@dataclass(frozen=True)
class Case:
    """A recipe as the lab runs it."""

    name: str  # the recipe's; in a sweep with what varies
    path: Path  # its file
    words: tuple[str, ...]  # overrides
    mode: str  # its mode of parallelism


@dataclass(frozen=True)
class Options:
    """What `python -m tests.lab` is asked for."""

    num_hosts: int  # hosts of the lab
    workers_per_host: int  # processes on each
    bandwidths: tuple[float, ...]  # of the wires, bytes per second, headers included
    climbs: bool  # whether the crossover is looked for, too
    folder: Path  # where everything is written; absolute


@dataclass(frozen=True)
class Wire:
    """What a wire gave two plain sockets."""

    bandwidth_bytes_per_s: float | None  # what it was limited to; None: to nothing
    goodput_bytes_per_s: float  # payload per second, in one direction
    latency_s: float  # half of a small message's way there and back


@dataclass(frozen=True)
class Passed:
    """What a run sent over all wires, in bytes."""

    wire_bytes: int  # what the interfaces counted from the run's start to its end, each piece at its sender
    num_pieces: int  # in so many pieces, of up to 64 kB: what a kernel hands an interface at once
    payload_bytes: int  # what the run says it sent from host to host: training, buffers, evaluation

    @property
    def header_bytes(self) -> int:
        """Of Ethernet, IP and TCP with its timestamps: 66 per piece, those that only acknowledge included."""
        return 66 * self.num_pieces

    @property
    def other_bytes(self) -> int:
        """What is neither: torchrun's rendezvous, the store's heartbeats, messages' own headers, facts at drains."""
        return self.wire_bytes - self.payload_bytes - self.header_bytes


@dataclass(frozen=True)
class Run:
    """A recipe that trained at a bandwidth."""

    case: Case  # the recipe
    bandwidth_bytes_per_s: float  # of the wires
    predicted: Predicted  # before it ran
    predicted_time_to_accuracy_s: float | None  # likewise; None without a target
    result: RunResult  # what it came to
    passed: Passed  # what passed the wires

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
    """Where a pipeline and data parallelism are predicted to be equally fast."""

    pipeline: str  # the recipe that is the fastest pipeline there
    data_parallel: str  # the fastest of those whose replicas hold the whole model
    bandwidth_bytes_per_s: float  # where
    ladder: tuple[float, ...]  # bandwidths around it, each 1.5 times the one before


@dataclass(frozen=True)
class Findings:
    """All that a lab found."""

    options: Options  # what was asked for
    cases: tuple[Case, ...]  # the recipes, in order
    free: Wire  # the wires without a limit
    wires: tuple[Wire, ...]  # with each
    # Recipe to what is predicted of it at many bandwidths, ascending.
    curves: Mapping[str, Sequence[tuple[float, Predicted]]]
    runs: tuple[Run, ...]  # at the bandwidths asked for, in the order in which they ran
    crossing: LinkFinding | None  # None if none is predicted, or it wasn't looked for
    climbed: tuple[Run, ...]  # the runs at its ladder


def label(bandwidth_bytes_per_s: float) -> str:
    """Return a bandwidth as the command line takes it.

    >>> label(1.25e8), label(7.03e6)
    ('1Gbit', '56.24Mbit')
    """
    bits = 8 * bandwidth_bytes_per_s
    unit, size = next(each for each in _UNITS if bits >= each[1])
    return f"{bits / size:.10g}{unit}"
