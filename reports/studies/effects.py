"""Print what each effect of the clusters of 2019 is worth on PipeDream's Table 1: `python -m reports.studies.effects`.

The output is `effects.md`. One effect at a time is taken out of clusters or recipes; the fitted constants stay.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipebench.cluster import PER_PAIR, Cluster
from pipebench.formats import UNKNOWN
from pipebench.recipe.load import load_file
from pipebench.report.catalog import find_report
from pipebench.report.definition import Report
from pipebench.report.load import load_report
from pipebench.report.recipes import ReportRun
from pipebench.report.scores import geometric_mean_error, rank_correlation
from pipebench.tracking.identity import recipe_hash
from pipebench.train.engines import simulate
from pipebench.train.prepare import prepare
from reports.studies.markdown import table

REPORT, COLUMN, MEASURE = "table1", "calibrated", "epoch_speedup"
RUNS = ("dp", "pipedream")  # the measure is the first run's epoch time over the second's
OWN = ("dp", "chosen")  # the same with the plan that the planner chooses

HEAD = """# What each effect is worth on Table 1 of PipeDream

`python -m reports.studies.effects` makes this page.

Table 1's epoch-time speed-ups on the clusters of 2019, simulated without one effect at a time. The constants stay as
they were fitted with all of them, so that the table says what an effect does and not how well others can stand in for
it. Rows that hold by construction are left out.
"""


@dataclass(frozen=True)
class Effect:
    """An effect, and the change of clusters, command lines or rows that takes it away."""

    name: str  # of the row of the page
    level: str = ""  # the level of the clusters that changes
    keys: Mapping[str, Any] = field(default_factory=dict)  # its changed fields
    where: str | tuple[str, ...] = ""  # beginnings of the names of the clusters that change
    runs: tuple[str, ...] = RUNS  # the runs whose clusters change
    words: tuple[str, ...] = ()  # overrides that are left out of the command lines
    rows: Mapping[str, str] = field(default_factory=dict)  # rows of the report that replace rows, by the latter's name

    def without(self, cluster: Cluster) -> Cluster:
        """Return a cluster without the effect."""
        if not self.level or not cluster.name.startswith(self.where):
            return cluster
        levels = (replace(each, **self.keys) if each.name == self.level else each for each in cluster.levels)
        return replace(cluster, levels=tuple(levels))


NO_P2P, NO_COPIES = {"p2p_bytes_per_s": None}, {"host_copy_bytes_per_s": None}
SUMS_BY_GLOO = Effect(
    "Gloo's rate for sums of pipelines' stages inside servers: NCCL's",
    "server",
    {"stage_ring_bytes_per_s": None},
    runs=("pipedream", "chosen"),
)
EFFECTS = (
    Effect("nothing: all effects"),
    Effect("limits of a flow between servers", "cluster", {"flow_bytes_per_s": None}),
    Effect("NCCL's limit on PCIe", "server", {"ring_bytes_per_s": None}),
    Effect("Gloo's limit between servers", "cluster", NO_P2P),
    Effect(
        "rings' rate for sums of pipelines' stages, too: Gloo's messages'",
        "cluster",
        {"stage_ring_bytes_per_s": 0.259e9},
        ("cluster-a", "cluster-b"),
    ),
    SUMS_BY_GLOO,
    Effect("Gloo's limit inside servers", "server", NO_P2P),
    Effect("Gloo's limit inside servers of B", "server", NO_P2P, "cluster-b"),
    Effect("copies that the GPU waits for, inside servers", "server", NO_COPIES),
    Effect("copies that the GPU waits for, inside servers of B", "server", NO_COPIES, "cluster-b"),
    Effect("Gloo's limit and copies inside servers of B", "server", {**NO_P2P, **NO_COPIES}, "cluster-b"),
    Effect("copies that the GPU waits for, between servers", "cluster", NO_COPIES),
    Effect("connections per value inside servers: one per pair", "server", {"connections": PER_PAIR}),
    Effect("a parameter server's limit", "cluster", {"ring_bytes_per_s": None}, "cluster-c"),
    Effect("values relayed stage by stage", words=("parallelism.relay=true",)),
    Effect("lengths that vary: all of 30", words=("dataset.lengths=declared",)),
    Effect(
        "the artifact's cuts of GNMT: the planner's, a stage per worker",
        rows={"gnmt16-4x4-a": "gnmt16-4x4-a-16-stages", "gnmt8-3x4-a": "gnmt8-3x4-a-12-stages"},
    ),
    Effect("AWD LM's chunks of 35: of 70", rows={"awd-lm-1x4-a": "awd-lm-1x4-a-70"}),
    Effect("AWD LM's hypothesis: 80 per GPU, chunks of 70", rows={"awd-lm-1x4-a": "awd-lm-1x4-a-per-gpu"}),
    Effect("S2VT's hypothesis: a ring, during the backward", rows={"s2vt-4x1-c": "s2vt-4x1-c-ring"}),
)


class Rows:
    """Simulates the speed-ups of the report's rows without an effect; the same run is simulated once.

    Args:
        report: Table 1's.
        asked: its runs, by row and run.
    """

    def __init__(self, report: Report, asked: Mapping[tuple[str, str], ReportRun]) -> None:
        self._report, self._asked = report, asked
        self._simulated: dict[str, tuple[float, str]] = {}  # seconds of an epoch and plan, by recipe and cluster

    @property
    def names(self) -> list[str]:
        """Rows with a published number that doesn't hold by construction."""
        return [name for name in self.all_names if MEASURE not in self._report.row(name).by_construction]

    @property
    def all_names(self) -> list[str]:
        """Rows with a published number."""
        rows = (row.name for row in self._report.rows if MEASURE in row.published)
        return [name for name in rows if all((name, run) in self._asked for run in RUNS)]

    def published(self, row: str) -> float:
        """Return a row's published number."""
        return float(self._report.row(row).published[MEASURE].value)

    def published_plan(self, row: str) -> str:
        """Return the plan that the paper prints."""
        return str(self._report.row(row).published["plan"].value)

    def value(self, row: str, effect: Effect, runs: tuple[str, str] = RUNS) -> float:
        """Return a row's speed-up without an effect."""
        (dp_s, _), (pipedream_s, _) = (self._run(effect.rows.get(row, row), run, effect) for run in runs)
        return dp_s / pipedream_s

    def plan(self, row: str, effect: Effect) -> str:
        """Return the plan that the planner chooses for a row without an effect."""
        return self._run(row, OWN[1], effect)[1]

    def _run(self, row: str, run: str, effect: Effect) -> tuple[float, str]:
        asked = self._asked[row, run]
        loaded = load_file(asked.loaded.path, [word for word in asked.words[1:] if word not in effect.words])
        cluster = effect.without(loaded.cluster) if run in effect.runs else loaded.cluster
        key = f"{recipe_hash(loaded)} {cluster}"
        if key not in self._simulated:
            result, _ = simulate(prepare(loaded.recipe, cluster, trains=False))
            self._simulated[key] = float(result.metrics["epoch_time_s"]), result.plan
        return self._simulated[key]


def tables(rows: Rows, names: list[str]) -> Iterator[str]:
    """Yield the page's two tables: scores per effect, and speed-ups per effect and row."""
    published = [rows.published(name) for name in names]
    values = [(effect.name, [rows.value(name, effect) for name in names]) for effect in EFFECTS]
    scores = []
    for name, each in values:
        ratios = [value / known for value, known in zip(each, published, strict=True)]
        rank = rank_correlation(each, published)
        scores.append((name, f"{geometric_mean_error(ratios):.1%}", UNKNOWN if rank is None else f"{rank:.2f}"))
    yield "\n" + table(("without", "error", "rank correlation"), scores, ("---", "--:", "--:"))
    yield "\nRow by row, an empty cell where nothing changes:\n"
    all_effects = values[0][1]
    lines = [("published", *(f"{known:.2f}" for known in published))]
    for name, each in values:
        cells = (
            f"{value:.2f}" if each is all_effects or abs(value / usual - 1) > 5e-4 else ""
            for value, usual in zip(each, all_effects, strict=True)
        )
        lines.append((name, *cells))
    yield table(("without", *names), lines, ("---", *["--:"] * len(names)))


OWN_HEAD = """
## The planner's own choice, with its sums by Gloo

Where stages' sums are as fast as NCCL's, what the planner chooses for GNMT replicates stages inside servers; the
paper's plans are straight. *Hypothesis:* section 4 says that pipelines use Gloo for all communication, sums of
replicated stages included, and data parallelism NCCL. So sums of a pipeline's stages inside a server get what Gloo's
messages get there, 1.85 GB/s (`stage_ring`), as NVLink and copies from GPU to GPU aren't Gloo's; between servers both
are a TCP connection's. No number is fitted for it; the rate was there before, chosen in view of Figure 14a, and the
hypothesis was made with these errors in view. It was not made for the plans, nor for stated plans, none of which
changes.
"""


def own_choice(rows: Rows, names: list[str], by_construction: list[str]) -> Iterator[str]:
    """Yield the planner's own plans and speed-ups with NCCL's and with Gloo's rate, and the errors of both."""
    effects = (SUMS_BY_GLOO, EFFECTS[0])
    yield OWN_HEAD
    found: dict[str, list[float]] = {}
    lines = []
    for name in (*names, *by_construction):
        found[name] = [rows.value(name, effect, OWN) for effect in effects]
        pairs = ((f"{value:.2f}", rows.plan(name, each)) for value, each in zip(found[name], effects, strict=True))
        lines.append((name, f"{rows.published(name):.2f}, {rows.published_plan(name)}", *itertools.chain(*pairs)))
    for over, some in (("error, not by construction", names), ("error, all rows", [*names, *by_construction])):
        errors = (geometric_mean_error([found[name][i] / rows.published(name) for name in some]) for i in (0, 1))
        cells = ((f"{error:.1%}", "") for error in errors)
        lines.append((over, f"{len(some)} rows", *itertools.chain(*cells)))
    head = ("row", "published, its plan", "with NCCL's rate", "plan", "with Gloo's rate", "plan")
    yield table(head, lines, ("---", "--:", "--:", "---", "--:", "---"))


def main() -> None:
    """Print the page."""
    report, asked = load_report(find_report(REPORT))
    rows = Rows(report, {(each.row, each.run): each for each in asked if each.column == COLUMN})
    by_construction = [name for name in rows.all_names if name not in rows.names]
    print(HEAD + "\n".join([*tables(rows, rows.names), *own_choice(rows, rows.names, by_construction)]))


if __name__ == "__main__":
    main()
