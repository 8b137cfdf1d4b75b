"""Print how the planner's bottleneck stands against the simulator: `python -m reports.studies.planner_vs_simulator`.

The output is `planner_vs_simulator.md`. A plan whose bottleneck differs from its simulated time is simulated again
without one effect at a time that a bottleneck can't express (`CAUSES`); the first effect whose removal takes away half
of the difference is its cause.
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipebench.cluster import Cluster
from pipebench.errors import PlanError
from pipebench.planner.cost_models import COST_MODELS, CostModel
from pipebench.planner.fixed import plan_fixed
from pipebench.planner.flat import FlatProblem, SearchStage, plan_flat
from pipebench.planner.hierarchical import HierarchicalProblem, plan_hierarchical
from pipebench.planner.planner import Planner
from pipebench.planner.plans import PlanEstimate, Request
from pipebench.planner.predict import PlannedWorkload
from pipebench.report.scores import rank_correlation
from pipebench.schedule.programs import programs
from pipebench.simulate.agenda import Action
from pipebench.simulate.network import Connection, Message, Network, ReductionGroup
from pipebench.simulate.sharing import Resource
from pipebench.simulate.simulation import Simulation
from reports.studies.markdown import table
from reports.studies.planned_models import Subject, analytic, cluster, flat, measured, missing

NUM_WORKERS = 16
SHAPES = ((1,) * 2, (1,) * 4, (1,) * 8, (1,) * 16, (15, 1), (12, 4), (8, 8), (4, 12), (4,) * 4, (2, 1, 1))
_SAME = 1e-6  # relative: two plans whose times differ by less are not a pair
_SMALL = 0.05  # relative: smaller differences between bottleneck and simulator get no cause

HEAD = """# The planner's bottleneck against the simulator's steady state

`python -m reports.studies.planner_vs_simulator` makes this page.
Models: VGG-16 with 128 images and GNMT-8 with 32 sentences as
the PipeDream artifact measured them on a V100; ResNet-50 with 128 images, AlexNet with 256, GNMT-16 with 64 pairs of
sentences and AWD LM with 80 chunks of text, from the full-size recipes, computed for a V100. Clusters of 16 V100s:
one level of 10 Gbit/s, cluster-a (4 servers of 4), cluster-b (2 servers of 8). Memory has no limit.

The rule for the plans, fixed before any was simulated: data parallelism; 2, 4, 8 and 16 straight stages, 15-1, 12-4,
8-8, 4-12, 4-4-4-4 and 2-1-1, cut where the cost model wants them; and everything the planner considers: the flat plan
and the straight one at every level's links, the hierarchical plan; `*` is the one it chooses. Equal plans count once.
Pairs are two plans of one model on one cluster, unless they take the same time.

Errors are bottleneck over simulated, less one. Kendall's tau is 1 - 2 x (pairs ordered differently) / pairs.
"""

CAUSES = {
    "rings": "transfers share ports with rings, and each slows the other down",
    "queues": "transfers share ports with each other, in bursts, and those of one connection go one by one",
    "duration": "the time of the transfers themselves, on loops longer than the planner follows (values that skip "
    "stages, stages that wait for the gradients of several others)",
    "rounds": "no transfer: rounds of different widths interlock, and a ring that starts late in a backward ends after "
    "it",
    "charged": "the planner charges a value at every cut that it crosses; the simulator sends it once, or past them",
}
READING = """
What the causes mean, and how they are found (the first whose removal takes away half of the difference):

"""


@dataclass(frozen=True)
class Row:
    """One plan with its bottleneck, its simulated time and the cause of their difference."""

    subject: Subject  # the model
    cluster: Cluster  # the cluster it is planned for
    found_by: str  # the part of the rule that made the plan, with `*` if it is the one that the planner chooses
    plan: PlanEstimate  # with the simulator's time
    cause: str  # of the difference between bottleneck and simulated time, a key of `CAUSES`; empty if that is small

    @property
    def error(self) -> float:
        """Bottleneck over simulated, less one."""
        return self.plan.bottleneck_s / self.plan.minibatch_s - 1

    @property
    def text(self) -> str:
        """The plan in a few words."""
        size = f" of {len(self.plan.stages)}" if str(self.plan.plan) == "straight" else ""
        return f"{self.plan.plan}{size} ({self.found_by})"


class _RingsApart(Network):
    """All-reduces have ports of their own, so that they and transfers don't slow each other down."""

    def __init__(self, cluster: Cluster, devices: Sequence[int]) -> None:
        super().__init__(cluster, devices)
        self._others = Network(cluster, devices)
        self._others.agenda = self.agenda
        self._others.sharing = self.sharing

    def group(self, sync: str, kind: str, workers: Sequence[int], number: int = 0) -> ReductionGroup:
        return self._others.group(sync, kind, workers, number)

    def sum_up(self, group: ReductionGroup, label: str, num_bytes: int, now_s: float, done: Action) -> None:
        self._others.sum_up(group, label, num_bytes, now_s, done)


class _PortsApart(Network):
    """Every message has ports of its own, so that messages don't wait for each other."""

    def send(
        self, connection: Connection, num_bytes: int, now_s: float, label: str = "", values: float = 1.0
    ) -> Message:
        uses = tuple((Resource(port.capacity), weight) for port, weight in connection.uses)
        apart = Connection(connection.kind, connection.ends, connection.level, uses)
        return super().send(apart, num_bytes, now_s, label, values)


class _Instant(Network):
    """Messages take no time."""

    def send(
        self, connection: Connection, num_bytes: int, now_s: float, label: str = "", values: float = 1.0
    ) -> Message:
        level = replace(connection.level, latency_s=0.0)
        return super().send(Connection(connection.kind, connection.ends, level, ()), 0, now_s, label)


def steady_s(workload: PlannedWorkload, count: int, network: type[Network]) -> float:
    """Return the seconds per minibatch in the steady state, that is over minibatches `count` to 2 `count`."""
    size, ends = workload.sampler.size(0), []
    for number in (count, 2 * count):
        simulation = Simulation(
            workload.pipeline,
            programs(workload.pipeline, number),
            workload.costs,
            network(workload.cluster, workload.devices),
            lambda _: size,
        )
        for _ in simulation:
            pass
        ends.append(simulation.end_s)
    return (ends[1] - ends[0]) / count


def plans(planner: Planner) -> Iterator[tuple[str, PlanEstimate]]:
    """Yield the plans of the rule that the page states, each with the part of the rule that makes it."""
    work, model, where = planner.work, planner.request.model, planner.request.cluster
    count = where.num_workers
    yield "data parallel", planner.estimate("", (SearchStage(0, len(work.states) - 1, count),))
    for replicas in SHAPES:
        if sum(replicas) > count:
            continue
        try:
            yield "shape", planner.estimate("", plan_fixed(work, model, where, replicas))
        except PlanError:  # fewer layers than stages
            continue
    for level in where.levels:
        for width in (None, 1):
            stages = plan_flat(FlatProblem(work, model, level, count, None, width))
            assert stages is not None  # without a limit on memory there is a plan
            yield f"flat, {level.name}{', straight' if width else ''}", planner.estimate("", stages)
    if len(where.levels) > 1:
        nested = plan_hierarchical(HierarchicalProblem(work, model, where.levels))
        assert nested is not None
        seconds = None if model.has_ports else nested.bottleneck_s
        yield "hierarchical", planner.estimate("", nested.stages, nested.devices, bottleneck_s=seconds)


def judge(subject: Subject, where: Cluster, model: CostModel) -> list[Row]:
    """Plan one model for one cluster by the page's rule; return a row per different plan."""
    planner = Planner(Request(subject.profile, where, model, subject.size), "pipedream")
    chosen = planner.best()
    rows: list[Row] = []
    known = set()
    for found_by, unpredicted in plans(planner):
        key = (unpredicted.order, unpredicted.plan.stages)
        if key in known:
            continue
        known.add(key)
        mark = "*" if key == (chosen.order, chosen.plan.stages) else ""
        plan = planner.with_prediction(unpredicted)
        rows.append(Row(subject, where, found_by + mark, plan, _cause(planner, plan)))
    return rows


def _cause(planner: Planner, plan: PlanEstimate) -> str:
    """Return the cause of the difference between a plan's bottleneck and its simulated time; "" if that is small."""
    excess = plan.minibatch_s / plan.bottleneck_s - 1
    if abs(plan.bottleneck_s / plan.minibatch_s - 1) < _SMALL:
        return ""
    if excess < 0:
        return "charged"
    workload, count = planner.workload(plan)
    for name, network in (("rings", _RingsApart), ("queues", _PortsApart), ("duration", _Instant)):
        if steady_s(workload, count, network) / plan.bottleneck_s - 1 < excess / 2:
            return name
    return "rounds"


def _pairs(rows: Sequence[Row]) -> tuple[int, list[tuple[Row, Row]]]:
    """Return the number of pairs, and those that the bottleneck orders differently, the slower by it first."""
    number, found = 0, []
    for index, one in enumerate(rows):
        for other in rows[:index]:
            if (one.subject, one.cluster) != (other.subject, other.cluster):
                continue
            by_bottleneck = one.plan.bottleneck_s / other.plan.bottleneck_s
            simulated = one.plan.minibatch_s / other.plan.minibatch_s
            if abs(by_bottleneck - 1) < _SAME or abs(simulated - 1) < _SAME:
                continue
            number += 1
            if (by_bottleneck > 1) != (simulated > 1):
                found.append((one, other) if by_bottleneck > 1 else (other, one))
    return number, found


def _summary(rows: Sequence[Row]) -> str:
    lines = []
    models = list(dict.fromkeys(row.subject.model for row in rows))
    for name in (*models, "all"):
        own = [row for row in rows if name in ("all", row.subject.model)]
        predicted, simulated = [row.plan.bottleneck_s for row in own], [row.plan.minibatch_s for row in own]
        errors = [abs(row.error) for row in own]
        number, different = _pairs(own)
        lines.append(
            (
                *(name, len(own), f"{statistics.correlation(predicted, simulated):.3f}"),
                f"{rank_correlation(predicted, simulated):.3f}",
                f"{1 - 2 * len(different) / number:.3f}" if number else "-",
                *(f"{100 * statistics.median(errors):.1f} %", f"{100 * max(errors):.0f} %"),
                f"{len(different)} of {number}",
            )
        )
    head = ("model", "plans", "Pearson", "Spearman", "Kendall", "median error", "worst", "pairs ordered differently")
    return table(head, lines)


def _explained(different: Sequence[tuple[Row, Row]]) -> str:
    lines = []
    for slower, faster in different:
        worse = max(slower, faster, key=lambda row: abs(row.error))
        lines.append(
            (
                *(slower.subject.model, slower.cluster.name),
                *(
                    f"{row.text} {1e3 * row.plan.bottleneck_s:.1f} / {1e3 * row.plan.minibatch_s:.1f}"
                    for row in (slower, faster)
                ),
                f"{worse.cause}, {worse.plan.plan} {100 * worse.error:+.0f} %" if worse.cause else "closer than 5 %",
            )
        )
    head = ("model", "cluster", "slower by the planner, ms planner / simulator", "faster by the planner", "cause")
    return table(head, lines)


def _plans(rows: Sequence[Row]) -> str:
    lines = [
        (
            *(row.subject.model, row.cluster.name, row.text, f"{1e3 * row.plan.bottleneck_s:.2f}"),
            *(f"{1e3 * row.plan.minibatch_s:.2f}", f"{100 * row.error:+.1f} %", row.cause or "-"),
        )
        for row in rows
    ]
    return table(("model", "cluster", "plan", "planner, ms", "simulator, ms", "error", "cause"), lines)


def _counts(counter: Counter[str]) -> str:
    """Return `3 of one kind, 2 of another`, the most frequent first."""
    return ", ".join(f"{count} {name}" for name, count in sorted(counter.items(), key=lambda it: (-it[1], it[0])))


def main(subjects: Sequence[Subject] | None = None, clusters: Sequence[Cluster] | None = None) -> None:
    """Print the page; subjects and clusters are those of the head unless given."""
    if subjects is None:
        computed = [analytic(model) for model in ("resnet-50", "alexnet", "gnmt-16", "awd lm")]
        subjects = [each for each in (measured("vgg-16"), measured("gnmt-8"), *computed) if each is not None]
    clusters = clusters or (flat(NUM_WORKERS), cluster("cluster-a", 4), cluster("cluster-b", 2))
    print(HEAD)
    if missing():
        print(f"Left out, for want of `../shared/profiles`: {', '.join(missing())}.\n")
    rows: list[Row] = []
    for name, model in COST_MODELS.items():
        rows = [row for subject in subjects for where in clusters for row in judge(subject, where, model)]
        causes = _counts(Counter(row.cause for row in rows if row.cause)) or "none"
        print(f"## Under `{name}`\n\n{_summary(rows)}\n\nCauses of differences above 5 %: {causes}.\n")
        if model.has_ports:
            print(READING.strip() + "\n")
            print("\n".join(f"- *{cause}*: {text}." for cause, text in CAUSES.items()))
            print(f"\n### Pairs ordered differently\n\n{_explained(_pairs(rows)[1])}\n")
            detailed = rows
        else:
            print("The simulation is under this model's own rules (`CostModel.simulated`, `CostModel.links`).\n")
    print(f"## Every plan under `overlap`\n\n{_plans(detailed)}")


if __name__ == "__main__":
    main()
