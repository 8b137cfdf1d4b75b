"""PipeDream's Figure 15 in miniature: predicted against measured throughput of many configurations of one model.

Paper: PipeDream (SOSP'19), section 5.5. Differs: two processes on one machine, or three on fewer cores; modes with a
flush, too. Everything is done in several rounds, each of which measures the machine, predicts and then runs: the speed
of a shared machine drifts within minutes by more than the error that is wanted. A case's error is the median of the
rounds.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipebench.cluster import Cluster, Level
from pipebench.profile.model import Profile
from pipebench.profile.stored import read_profile, write_profile
from pipebench.simulate.steady import simulate_segment
from tests.bench.processes import machine, workers
from tests.bench.processes.machine import Machine
from tests.bench.processes.ours import Ours
from tests.bench.processes.subject import Case, Subject, cut_at, make_setup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROUNDS = 3
NUM_MINIBATCHES = 24  # a multiple of every number of replicas, and of those accumulated
_WARM_UP, _SEGMENTS = 8, 3  # minibatches; segments that are timed in a round
CLOSE = 0.05  # relative: the error wanted, and the difference from which an order counts
_LEFT = (0.2, 0.35, 0.5, 0.65, 0.8)  # shares of the layers' time in the first stage
_STYLES = {  # by mode: colour and marker
    "pipedream": ("#0072B2", "o"),
    "pipedream-flush": ("#009E73", "s"),
    "gpipe": ("#E69F00", "^"),
    "dp": ("#D55E00", "D"),
    "pipedream-2bw": ("#56B4E9", "P"),
    "model": ("#CC79A7", "v"),
}
_WIDTH_IN, _HEIGHT_IN = 7.0, 6.0


@dataclass(frozen=True)
class Point:
    """A case with its throughputs over a segment, fill and drain included, in every round."""

    case: Case  # the configuration
    predicted: tuple[float, ...]  # by the simulator [samples/s]
    measured: tuple[float, ...]  # median of the round's segments [samples/s]

    @property
    def predicted_samples_per_s(self) -> float:
        return statistics.median(self.predicted)

    @property
    def measured_samples_per_s(self) -> float:
        return statistics.median(self.measured)

    @property
    def errors(self) -> tuple[float, ...]:
        """Predicted over measured throughput, less one, in every round."""
        return tuple(p / m - 1 for p, m in zip(self.predicted, self.measured, strict=True))

    @property
    def error(self) -> float:
        return statistics.median(self.errors)


@dataclass(frozen=True)
class Agreement:
    """How well predictions fit measurements.

    Attributes:
        correlation: Pearson's, of predicted and measured throughput.
        mean_error: mean of the absolute relative errors.
        largest_error: largest absolute relative error.
        pairs: number of pairs of cases whose measured throughputs differ by more than `CLOSE`.
        wrong_pairs: number of those that are predicted in the other order.
    """

    correlation: float
    mean_error: float
    largest_error: float
    pairs: int
    wrong_pairs: int


def cases(profile: Profile, subject: Subject, num_processes: int = 2) -> list[Case]:
    """Return the configurations: balanced and unbalanced cuts, depths, modes, microbatches and replicas."""
    size = subject.minibatch_size
    if num_processes == 3:
        thirds = (cut_at(profile, size, 1 / 3), cut_at(profile, size, 2 / 3))
        return [
            *(Case("pipedream", thirds, (1, 1, 1), depth) for depth in (None, 1, 2)),
            Case("pipedream", thirds[1:], (2, 1)),
            Case("pipedream", thirds[:1], (1, 2)),
            *(Case("gpipe", thirds, (1, 1, 1), microbatches=m) for m in (2, 4, 8)),
            *(Case("pipedream-flush", thirds, (1, 1, 1), microbatches=m) for m in (4, 8)),
            Case("gpipe", thirds[1:], (2, 1), microbatches=4),
            Case("dp", (), (3,)),
        ]
    cuts = list(dict.fromkeys(cut_at(profile, size, share) for share in _LEFT))
    early, middle, late = cuts[1], cut_at(profile, size), cuts[-2]
    return [
        *(Case("pipedream", (cut,), (1, 1)) for cut in cuts),
        *(Case("pipedream", (middle,), (1, 1), depth) for depth in (1, 3)),
        *(Case("gpipe", (cut,), (1, 1), microbatches=4) for cut in (cuts[0], middle, cuts[-1])),
        *(Case("gpipe", (middle,), (1, 1), microbatches=m) for m in (2, 8)),
        *(Case("gpipe", (cut,), (1, 1), microbatches=m) for cut, m in ((early, 8), (late, 2))),
        *(Case("pipedream-flush", (cut,), (1, 1), microbatches=4) for cut in (cuts[0], middle, cuts[-1])),
        *(Case("pipedream-flush", (middle,), (1, 1), microbatches=m) for m in (2, 8)),
        *(Case("pipedream-flush", (cut,), (1, 1), microbatches=m) for cut, m in ((early, 2), (late, 8))),
        *(Case("dp", (), (2,), accumulate=count) for count in (1, 2, 4)),
        Case("pipedream-2bw", (middle,), (1, 1), accumulate=2),
        Case("model", (middle,), (1, 1)),
    ]


def predicted_s(subject: Subject, case: Case, found: Machine, num_minibatches: int) -> float:
    setup = make_setup(subject, case, found.profile_of(case), found.cluster, found.host)
    return simulate_segment(setup, num_minibatches).end_s


def points(
    subject: Subject, num_processes: int, environment: Mapping[str, str], rounds: int = ROUNDS
) -> tuple[list[Point], Machine]:
    """Measure the machine, predict every case, then run all of them, one after another; in several rounds.

    Returns:
        The points, and the first round's measurements of the machine, which decide the cuts.
    """
    given: list[Case] = []
    machines: list[Machine] = []
    predicted: list[list[float]] = []
    measured: list[list[float]] = []
    for _ in range(rounds):
        found = machine.measure(subject, num_processes, dict(environment))
        machines.append(found)
        given = given or cases(found.profile, subject, num_processes)
        predicted.append([predicted_s(subject, case, found, NUM_MINIBATCHES) for case in given])
        (level,) = found.cluster.levels
        arguments = {
            "subject": asdict(subject),
            "given": [asdict(case) for case in given],
            "profile": write_profile(found.profile),
            "link": [level.bandwidth_bytes_per_s, level.latency_s],
        }
        measured.append(workers.run(measure_here, num_processes, arguments, environment=environment)[0])
    samples = NUM_MINIBATCHES * subject.minibatch_size
    columns = zip(given, zip(*predicted, strict=True), zip(*measured, strict=True), strict=True)
    return [Point(c, tuple(samples / s for s in p), tuple(samples / s for s in m)) for c, p, m in columns], machines[0]


def measure_here(
    subject: dict[str, Any], given: list[dict[str, Any]], profile: str, link: tuple[float, float]
) -> list[float]:
    """Return every case's seconds of a segment, of the slowest process, median of several; a job for workers.

    An engine is closed before the next one is made, since threads of idle connections wake now and then.
    """
    medians = []
    for fields in given:
        case = Case(**{**fields, "starts": tuple(fields["starts"]), "replicas": tuple(fields["replicas"])})
        cluster = Cluster("loopback", "local", None, (Level("machine", case.num_workers, *link),))
        engine = Ours(make_setup(Subject(**subject), case, read_profile(profile), cluster))
        engine.train(_WARM_UP * case.num_workers)
        taken = [workers.together(lambda made=engine: made.train(NUM_MINIBATCHES)).slowest_s for _ in range(_SEGMENTS)]  # type: ignore[misc]
        medians.append(statistics.median(taken))
        engine.close()
    return medians


def by_mode(found: Sequence[Point]) -> dict[str, list[float]]:
    """Return the errors of the cases by mode."""
    errors: dict[str, list[float]] = {}
    for point in found:
        errors.setdefault(point.case.mode, []).append(point.error)
    return errors


def agreement(found: Sequence[Point]) -> Agreement:
    """Return how well the predictions of two or more cases fit."""
    predicted = [point.predicted_samples_per_s for point in found]
    measured = [point.measured_samples_per_s for point in found]
    errors = [abs(point.error) for point in found]
    apart = [
        (a, b)
        for a, b in itertools.combinations(found, 2)
        if max(a.measured_samples_per_s, b.measured_samples_per_s)
        > (1 + CLOSE) * min(a.measured_samples_per_s, b.measured_samples_per_s)
    ]
    wrong = [
        (a, b)
        for a, b in apart
        if (a.measured_samples_per_s < b.measured_samples_per_s)
        != (a.predicted_samples_per_s < b.predicted_samples_per_s)
    ]
    return Agreement(
        statistics.correlation(predicted, measured), statistics.mean(errors), max(errors), len(apart), len(wrong)
    )


def draw(found: Sequence[Point], heading: str, path: Path) -> None:
    figure(found, heading).savefig(path, dpi=110, format="png", metadata={"Software": "pipebench bench"})


def figure(found: Sequence[Point], heading: str) -> "Figure":
    """Return a plot of measured over predicted throughput, a mark per case, with the diagonal and the error wanted."""
    from matplotlib.figure import Figure

    fit = agreement(found)
    made = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), layout="constrained")
    axes = made.subplots()
    top = 1.08 * max(max(p.predicted_samples_per_s, p.measured_samples_per_s) for p in found)
    axes.plot((0, top), (0, top), color="#333333", linewidth=0.8)
    low, high = (0, top * (1 - CLOSE)), (0, top * (1 + CLOSE))
    axes.fill_between((0, top), low, high, color="#BBBBBB", alpha=0.35, linewidth=0, label=f"within {CLOSE:.0%}")
    _draw_points(axes, found)
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)
    axes.set_xlabel("predicted by the simulator [samples/s]")
    axes.set_ylabel("measured [samples/s]")
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    axes.set_title(
        f"{heading}\n{len(found)} cases, correlation {fit.correlation:.3f}, "
        f"error {fit.mean_error:.1%} on average and {fit.largest_error:.1%} at most",
        fontsize=9,
    )
    return made


def _draw_points(axes: "Axes", found: Sequence[Point]) -> None:
    for mode in dict.fromkeys(point.case.mode for point in found):
        own = [point for point in found if point.case.mode == mode]
        colour, marker = _STYLES.get(mode, ("#333333", "x"))
        axes.scatter(
            [point.predicted_samples_per_s for point in own],
            [point.measured_samples_per_s for point in own],
            color=colour,
            marker=marker,
            s=36,
            label=mode,
        )
