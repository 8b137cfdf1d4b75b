"""What a lab is asked for and what it finds, as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipebench.train.result import RunResult
from tests.lab.predicting import Predicted

_UNITS = (("Gbit", 1e9), ("Mbit", 1e6), ("kbit", 1e3), ("bit", 1.0))


@dataclass(frozen=True)
class Case:
    """A recipe as the lab runs it.

    Attributes:
        name: the recipe's; in a sweep with what varies.
        path: its file.
        words: overrides.
        mode: its mode of parallelism.
    """

    name: str
    path: Path
    words: tuple[str, ...]
    mode: str


@dataclass(frozen=True)
class Options:
    """What `python -m tests.lab` is asked for.

    Attributes:
        num_hosts: hosts of the lab.
        workers_per_host: processes on each.
        bandwidths: of the wires, bytes per second, headers included.
        climbs: whether the crossover is looked for, too.
        folder: where everything is written; absolute.
    """

    num_hosts: int
    workers_per_host: int
    bandwidths: tuple[float, ...]
    climbs: bool
    folder: Path


@dataclass(frozen=True)
class Wire:
    """What a wire gave two plain sockets.

    Attributes:
        bandwidth_bytes_per_s: what it was limited to; None: to nothing.
        goodput_bytes_per_s: payload per second, in one direction.
        latency_s: half of a small message's way there and back.
    """

    bandwidth_bytes_per_s: float | None
    goodput_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Passed:
    """What a run sent over all wires, in bytes.

    Attributes:
        wire_bytes: what the interfaces counted from the run's start to its end, each piece at its sender.
        num_pieces: in so many pieces, of up to 64 kB: what a kernel hands an interface at once.
        payload_bytes: what the run says it sent from host to host: training, buffers, evaluation.
    """

    wire_bytes: int
    num_pieces: int
    payload_bytes: int

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
    """A recipe that trained at a bandwidth.

    Attributes:
        case: the recipe.
        bandwidth_bytes_per_s: of the wires.
        predicted: before it ran.
        predicted_time_to_accuracy_s: likewise; None without a target.
        result: what it came to.
        passed: what passed the wires.
    """

    case: Case
    bandwidth_bytes_per_s: float
    predicted: Predicted
    predicted_time_to_accuracy_s: float | None
    result: RunResult
    passed: Passed

    @property
    def throughput_samples_per_s(self) -> float:
        """Measured, in training."""
        return float(self.result.metrics["throughput_samples_per_s"])

    @property
    def time_to_accuracy_s(self) -> float | None:
        """Measured; None without a target, or if it wasn't reached."""
        found = self.result.metrics.get("time_to_accuracy_s")
        return None if found is None else float(found)


@dataclass(frozen=True)
class LinkFinding:
    """Where a pipeline and data parallelism are predicted to be equally fast.

    Attributes:
        pipeline: the recipe that is the fastest pipeline there.
        data_parallel: the fastest of those whose replicas hold the whole model.
        bandwidth_bytes_per_s: where.
        ladder: bandwidths around it, each 1.5 times the one before.
    """

    pipeline: str
    data_parallel: str
    bandwidth_bytes_per_s: float
    ladder: tuple[float, ...]


@dataclass(frozen=True)
class Findings:
    """All that a lab found.

    Attributes:
        options: what was asked for.
        cases: the recipes, in order.
        free: the wires without a limit.
        wires: with each.
        curves: recipe to what is predicted of it at many bandwidths, ascending.
        runs: at the bandwidths asked for, in the order in which they ran.
        crossing: None if none is predicted, or it wasn't looked for.
        climbed: the runs at its ladder.
    """

    options: Options
    cases: tuple[Case, ...]
    free: Wire
    wires: tuple[Wire, ...]
    curves: Mapping[str, Sequence[tuple[float, Predicted]]]
    runs: tuple[Run, ...]
    crossing: LinkFinding | None
    climbed: tuple[Run, ...]


def label(bandwidth_bytes_per_s: float) -> str:
    """Return a bandwidth as the command line takes it.

    >>> label(1.25e8), label(7.03e6)
    ('1Gbit', '56.24Mbit')
    """
    bits = 8 * bandwidth_bytes_per_s
    unit, size = next(each for each in _UNITS if bits >= each[1])
    return f"{bits / size:.10g}{unit}"
