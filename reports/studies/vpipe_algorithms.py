"""Print how far vPipe's algorithms are from the optimum: `python -m reports.studies.vpipe_algorithms`.

The output is `vpipe_algorithms.md`: Algorithm 3 beside plain Kernighan-Lin and networkx's on graphs of the paper's
Table 4, Algorithm 3 on consecutive layers beside the best cuts, Algorithm 2 beside the best policies, and cuts and
policies together. Times are CPU seconds of this process, medians of interleaved runs.
"""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import networkx  # type: ignore[import-untyped]  # comes with torch; only compared with
import yaml

from pipebench.cluster import Cluster, Level
from pipebench.errors import PlanError
from pipebench.formats import UNKNOWN
from pipebench.planner.cost_models import COST_MODELS
from pipebench.planner.flat import SearchStage
from pipebench.planner.partition import LayerChain, TimedGraph, algorithm_3_consecutive, best_consecutive, timed_graph
from pipebench.planner.planner import Planner
from pipebench.planner.plans import Request
from pipebench.planner.stage_problem import StageProblem
from pipebench.planner.swap_recompute import algorithm_2, best_policies
from pipebench.profile.model import LayerProfile, Profile
from pipebench.schedule.modes import KEEP, RECOMPUTE, SWAP
from reports.studies.cuts_and_policies import best_cuts_and_policies, lasts_s
from reports.studies.halved_parts import Parts, algorithm_3, plain
from reports.studies.kernighan_lin import neighbours_of
from reports.studies.markdown import table
from reports.studies.planned_models import recipe_rows

PUBLISHED = Path(__file__).parents[1] / "published" / "vpipe_tpds21.yaml"
PARTS = 16  # of Table 4
RUNS = 3  # of each algorithm on each graph
INSTANCES = 100  # of each random kind
DRAWS = 4  # graphs per model of Table 4
CHAIN, WORKERS = 16, 4  # layers and workers of the chains on which cuts and policies are compared together
MEGABYTE = 1e6

HEAD = """# vPipe's algorithms beside the optimum

`python -m reports.studies.vpipe_algorithms` makes this page. No pipeline is run here. Times are CPU seconds on one
core, medians of runs in turn; the paper's are of another machine.
"""
TABLE_4 = f"""
## Table 4: Algorithm 3 and Kernighan-Lin, {PARTS} parts

*Drawn* graphs have exactly as many nodes and edges as Table 4 says: blocks of branches that begin where the block
before ends (AmoebaNet: or the one before that) and end together; a fifth of the layers take most of the time. Numbers
are means of {DRAWS} draws. Those of the zoo are its models of `recipes/vpipe/`, at operator granularity, with analytic
times of a 2080 Ti. *Cost* is what crosses between parts, MB per minibatch, edge by edge; the slowest part is over the
mean. networkx's `kernighan_lin_bisection` halves again and again from the order of time stamps, too; it balances the
number of layers, not their time.
"""
REGRET_3 = """
## Algorithm 3 on consecutive layers

A pipeline runs parts of consecutive layers. How much slower is the slowest part than that of the best cuts?
Random chains of 12 to 300 layers in 2 to 16 parts, times exponential or uniform, and the graphs above in 8 and 16.
*95 %* is the 95th percentile, given for 20 cases or more.
"""
REGRET_2 = """
## Algorithm 2

The extra seconds of a backward so that the stage fits in memory, over the seconds of the stage's forward and backward:
with the paper's form of the algorithm, and with the search that plans use. Random stages of 8 layers, of which all
policies are tried, and of 40; 4 to 8 minibatches are in flight, and memory is between what recomputing everything and
keeping everything takes. A stage for which the paper's form finds no policies that fit counts in that column only.
"""


REGRET_BOTH = """
## Cuts and policies together

Objective (3) under (1) and (2): the slowest stage's forward and backward including what its policies add, over the
optimum of all cuts and policies. SR cuts by the layers' own times; `plan: auto` cuts again by the times that policies
lead to. Random chains of 16 layers on 4 workers of mode pipedream, on fast links, whose memory is half to nine tenths
of what keeping everything takes.
"""


class Subject(NamedTuple):
    """Graphs to cut."""

    name: str  # on the page
    graphs: tuple[TimedGraph, ...]  # several random draws, or the one of a model


class Shape(NamedTuple):
    """The shape of a drawn graph."""

    nodes: int  # of Table 4
    edges: int  # of Table 4
    blocks: int  # of branches
    reach: int  # a block begins where one of this many blocks before it ends


SHAPES = {
    "BERT": Shape(976, 1262, 96, 1),
    "Transformer": Shape(662, 830, 60, 1),
    "AmoebaNet": Shape(4380, 5080, 72, 2),
    "GNMT": Shape(190, 228, 32, 1),
}


def drawn(shape: Shape, seed: int = 0) -> TimedGraph:
    """Draw a graph of blocks of branches with exactly the nodes and edges of `shape`."""
    draw = random.Random(seed)
    branches = [(shape.edges - shape.nodes + 1 + index) // shape.blocks for index in range(shape.blocks)]
    sizes = [(shape.nodes - 1 + index) // shape.blocks for index in range(shape.blocks)]
    seconds, edges, ends = [0.1], [], [0]
    for size, more in zip(sizes, branches, strict=True):
        first, exit_node = len(seconds), len(seconds) + size - 1
        begins = sorted(draw.sample(range(first + 1, exit_node), max(0, min(more - 1, size - 2))))
        residual = more - len(begins)  # edges from one block's end to the next one's
        for layer in range(first, exit_node + 1):
            seconds.append(draw.uniform(0.5, 1.5) if draw.random() < 0.2 else 0.05)
            begun_at = ends[-draw.randint(1, min(shape.reach, len(ends)))]
            num_bytes = draw.choice((1, 1, 2, 4)) * 250_000
            edges.append((begun_at if layer == first or layer in begins else layer - 1, layer, num_bytes))
            if layer in begins:
                edges.append((layer - 1, exit_node, num_bytes))
        edges += [(ends[-1], exit_node, 1_000_000)] * residual
        ends.append(exit_node)
    return TimedGraph(tuple(seconds), tuple(edges))


def of_zoo(model: str) -> Subject:
    """Return a model of `recipes/vpipe/` as a graph."""
    return Subject(f"{model}, zoo", (timed_graph(recipe_rows(f"vpipe/{model}/pipedream")),))


def by_networkx(graph: TimedGraph, num_parts: int) -> list[int]:
    """Return the part of every layer by repeated halving with networkx's bisection."""
    whole = networkx.Graph()
    whole.add_nodes_from(range(len(graph)))
    whole.add_weighted_edges_from(
        (a, b, num_bytes) for a, others in enumerate(neighbours_of(graph)) for b, num_bytes in others.items() if a < b
    )
    parts = [[*range(len(graph))]]
    while len(parts) < num_parts:
        halves = []
        for part in parts:
            start = (set(part[: len(part) // 2]), set(part[len(part) // 2 :]))
            found = networkx.algorithms.community.kernighan_lin_bisection(whole.subgraph(part), start, seed=0)
            halves += sorted(map(sorted, found))
        parts = halves
    part_of = [0] * len(graph)
    for index, part in enumerate(parts):
        for layer in part:
            part_of[layer] = index
    return part_of


def timed(runs: int, *ways: Callable[[], Any]) -> list[tuple[float, Any]]:
    """Run functions `runs` times, in turn; return the median CPU seconds and the last result of each."""
    taken: list[list[float]] = [[] for _ in ways]
    found: list[Any] = [None] * len(ways)
    for _ in range(runs):
        for index, way in enumerate(ways):
            began_s = time.process_time()
            found[index] = way()
            taken[index].append(time.process_time() - began_s)
    return [(statistics.median(seconds), each) for seconds, each in zip(taken, found, strict=True)]


def table_4(subjects: Sequence[Subject], runs: int) -> str:
    """Return the table that compares plain Kernighan-Lin, Algorithm 3 and networkx."""
    rows = []
    for subject in subjects:
        cuts = [cut_by_all(graph, runs) for graph in subject.graphs]
        own, first = [each[1] for each in cuts], subject.graphs[0]
        sizes = (
            len(first),
            len(first.edges),
            *(statistics.mean(sizes) for sizes in zip(*(each.coarse for each in own), strict=True)),
        )
        cells = [cell for way in zip(*cuts, strict=True) for cell in mean_cells(way)]
        times = [statistics.mean(each.seconds for each in way) for way in zip(*cuts, strict=True)]
        shown = (f"{sizes[0]:,} / {sizes[1]:,}", f"{sizes[2]:.0f} / {sizes[3]:.0f}")
        rows.append((subject.name, *shown, *cells, f"{times[0] / times[1]:.1f}x"))
    heads = (
        "model",
        "nodes / edges",
        "coarse: nodes / edges",
        "KL: s, passes",
        "cost, slowest",
        "Alg. 3: s, passes",
        "cost, slowest",
    )
    return table((*heads, "networkx: s", "cost, slowest", "Alg. 3 is faster"), rows)


class Cut(NamedTuple):
    """An algorithm's partition of a graph."""

    seconds: float  # CPU time
    cost_bytes: int  # of edges between parts
    slowest: float  # seconds of the slowest part over the mean
    passes: int | None = None  # the most that one halving took; None for networkx
    coarse: tuple[int, ...] = ()  # nodes and edges of Algorithm 3's coarse graph; () for the others


def cut_by_all(graph: TimedGraph, runs: int) -> list[Cut]:
    """Cut a graph by plain Kernighan-Lin, Algorithm 3 and networkx, in this order."""
    ways = (lambda: plain(graph, PARTS), lambda: algorithm_3(graph, PARTS), lambda: by_networkx(graph, PARTS))
    found = []
    for seconds, parts in timed(runs, *ways):
        part_of = parts.part_of if isinstance(parts, Parts) else parts
        passes = parts.passes if isinstance(parts, Parts) else None
        small = parts.coarse.graph if isinstance(parts, Parts) and parts.coarse is not None else None
        coarse = () if small is None else (len(small), len(small.edges))
        found.append(Cut(seconds, graph.cut_bytes(part_of), slowest(graph, part_of), passes, coarse))
    return found


def mean_cells(cuts: Sequence[Cut]) -> tuple[str, str]:
    """Return one algorithm's cells: mean seconds and most passes, mean cost and slowest part."""
    seconds, cost_bytes, slowest_part = (
        statistics.mean(getattr(cut, name) for cut in cuts) for name in ("seconds", "cost_bytes", "slowest")
    )
    passes = [cut.passes for cut in cuts if cut.passes is not None]
    most = f", {max(passes)}" if passes else ""
    return f"{seconds:.3f}{most}", f"{cost_bytes / MEGABYTE:.2f}, {slowest_part:.2f}"


def slowest(graph: TimedGraph, part_of: Sequence[int]) -> float:
    """Return the seconds of the slowest part over the mean of all parts."""
    seconds = [0.0] * (max(part_of) + 1)
    for layer, part in enumerate(part_of):
        seconds[part] += graph.seconds[layer]
    return max(seconds) * len(seconds) / sum(seconds)


def published() -> str:
    """Return the paper's Table 4."""
    entries = [each for each in yaml.safe_load(PUBLISHED.read_text())["entries"] if each["id"].startswith("t4-")]
    rows = []
    for values in (each["values"] for each in entries if "model" in each["values"]):
        sizes = (
            f"{values[kind]['nodes']:,} / {values[kind]['edges']:,}" for kind in ("original_graph", "coarsened_graph")
        )
        cells = (f"{values[who]['time_s']}, {values[who]['iterations']}" for who in ("kl", "vpipe"))
        costs = f"{values['kl']['cost']} / {values['vpipe']['cost']}"
        ratio = values["kl"]["time_s"] / values["vpipe"]["time_s"]
        rows.append((values["model"], *sizes, *cells, costs, f"{ratio:.1f}x"))
    heads = ("published", "nodes / edges", "coarse: nodes / edges", "KL: s, iterations", "vPipe: s, iterations")
    return table((*heads, "cost, 1e7 bytes per sample, KL / vPipe", "vPipe is faster"), rows)


@dataclass(frozen=True)
class Regret:
    """Distances of an algorithm's answers from the best, and CPU times of both."""

    kind: str  # of instances
    over: Sequence[float]  # of every instance, the answer's seconds over the best's, less one
    own_s: float  # mean CPU seconds of the algorithm
    best_s: float  # mean CPU seconds of finding the best

    @property
    def row(self) -> tuple[str, ...]:
        """Return a row of a table."""
        ordered = sorted(self.over)
        ranks = [statistics.mean(ordered), statistics.median(ordered), nearest_rank_95(ordered), ordered[-1]]
        shares = (UNKNOWN if value is None else f"{100 * value:.1f} %" for value in ranks)
        times = (f"{1e3 * seconds:.1f}" for seconds in (self.own_s, self.best_s))
        return self.kind, f"{len(ordered)}", *shares, *times


def nearest_rank_95(ordered: Sequence[float]) -> float | None:
    """Return the 95th percentile of sorted values by nearest rank; None for fewer than 20, whose is the largest."""
    return ordered[-(-19 * len(ordered) // 20) - 1] if len(ordered) >= 20 else None


def regret_3(subjects: Sequence[Subject], instances: int) -> str:
    """Return the table of Algorithm 3's regret on consecutive layers: its slowest part over the best cuts'."""
    kinds: dict[str, list[tuple[TimedGraph, int]]] = {"random": []}
    for seed in range(instances):
        draw = random.Random(seed)
        count = draw.choice((12, 30, 100, 300))
        exponential = draw.random() < 0.5
        times = tuple(draw.expovariate(1.0) if exponential else draw.random() for _ in range(count))
        edges = tuple((layer, layer + 1, draw.randrange(1000)) for layer in range(count - 1))
        kinds["random"].append((TimedGraph(times, edges), min(draw.choice((2, 4, 8, 16)), count // 2)))
    for subject in subjects:
        kinds[subject.name] = [(graph, parts) for graph in subject.graphs for parts in (8, 16)]
    rows = []
    for kind, cases in kinds.items():
        over, own_s, best_s = zip(*(compared(LayerChain(graph), parts) for graph, parts in cases), strict=True)
        rows.append(Regret(kind, over, statistics.mean(own_s), statistics.mean(best_s)).row)
    return table(("graphs", "cuts", "mean", "median", "95 %", "worst", "Alg. 3, ms", "best, ms"), rows)


def compared(line: LayerChain, parts: int) -> tuple[float, float, float]:
    """Return how much slower the slowest part of Algorithm 3 is than the best, and the CPU seconds of both."""
    (own_s, starts), (best_s, exact) = timed(
        1, lambda: algorithm_3_consecutive(line, parts), lambda: best_consecutive(line, parts)
    )
    return line.slowest_s(starts) / line.slowest_s(exact) - 1, own_s, best_s


def stage(seed: int, num_layers: int) -> StageProblem:
    """Draw a stage that doesn't fit in memory unless some layers are swapped or recomputed."""
    draw = random.Random(f"{num_layers} {seed}")
    made = []
    for index in range(num_layers + 1):
        num_bytes, forward_s = draw.randrange(1, 100) << 20, draw.expovariate(1.0) * 5e-3
        reads = (index - 1,) if index else ()
        saved_bytes = draw.choice((0, num_bytes, 2 * num_bytes))
        row = LayerProfile(f"layer{index}", "Linear", forward_s, 2 * forward_s, num_bytes, num_bytes, reads)
        made.append(replace(row, saved_bytes=saved_bytes))
    loss = LayerProfile("loss", "loss", 0.0, 0.0, 4, 4, (num_layers,))
    found = StageProblem((*made, loss), 0, num_layers, draw.randint(4, 8), 0.0, pcie_bytes_per_s=15.76e9)
    least, most = (found.outcome((policy,) * num_layers).num_bytes for policy in (RECOMPUTE, KEEP))
    return replace(found, limit_bytes=least + draw.random() * max(0.0, most - least))


def regret_2(instances: int) -> str:
    """Return the table of what policies by Algorithm 2, by the planner's search and at best add to a stage's time."""
    rows = []
    for num_layers in (8, 40):
        papers, searched, least, taken, exact, unfit = [], [], [], [], 0, 0
        for seed in range(instances):
            problem = stage(seed, num_layers)
            (paper_s, paper), (search_s, found) = timed(
                1, partial(algorithm_2, problem), partial(best_policies, problem)
            )
            taken.append((paper_s, search_s))
            exact += found.is_exact
            if not found.fits:
                continue
            if paper.fits:
                papers.append(paper.extra_s / problem.window_s)
                searched.append(found.extra_s / problem.window_s)
            else:
                unfit += 1
            if num_layers == 8:
                every = map(problem.outcome, itertools.product(problem.choices, repeat=num_layers))
                best_s = min(each.extra_s for each in every if each.fits)
                least.append(found.extra_s - best_s)
        above_best = f"{max(least):.1e} s" if least else "not looked at"
        means = (f"{100 * statistics.mean(each):.1f} %" for each in (papers, searched))
        times = (f"{1e3 * statistics.mean(each):.1f}" for each in zip(*taken, strict=True))
        rows.append((f"{num_layers} layers", f"{instances}", *means, f"{unfit}", f"{exact}", above_best, *times))
    heads = ("stages", "drawn", "longer, paper's form", "longer, search", "paper's form doesn't fit", "search is exact")
    return table((*heads, "search over the best, at most", "paper's form, ms", "search, ms"), rows)


def chain(seed: int) -> Profile:
    """Draw the profile of a chain of `CHAIN` layers."""
    draw = random.Random(f"chain {seed}")
    made = []
    for index in range(CHAIN):
        forward_s, num_bytes = draw.uniform(1e-3, 1e-2), draw.randrange(1, 100) << 20
        row = LayerProfile(f"layer{index}", "Linear", forward_s, 2 * forward_s, num_bytes >> 3, 0, (index - 1,)[:index])
        made.append(
            replace(row, saved_bytes=num_bytes, parameter_sizes={f"weight{index}": draw.randrange(1, 20) << 20})
        )
    loss = LayerProfile("loss", "loss", 0.0, 0.0, 4, 4, (CHAIN - 1,))
    return Profile("chain", "drawn", "file", f"chain {seed}", {1: (*made, loss)}, 0.0, 0.0, {}, {})


def regret_both(instances: int) -> str:
    """Return the table of the regret of planned cuts and policies over the best ones."""
    over: dict[str, list[float]] = {"SR": [], "plan: auto": []}
    taken: dict[str, list[float]] = {"SR": [], "plan: auto": []}
    best_took, exact, unfit = [], 0, 0
    for seed in range(instances):
        cluster = Cluster("drawn", "drawn", None, (Level("server", WORKERS, 1e12, 0.0),), pcie_bytes_per_s=15.76e9)
        asked = Request(chain(seed), cluster, COST_MODELS["overlap"], 1, chooses=(SWAP, RECOMPUTE))
        free = Planner(asked, "pipedream")
        share = random.Random(f"share {seed}").uniform(0.5, 0.9)
        limit = int(share * max(free.simulated_peaks(free.best()) or [0]))
        planner = Planner(replace(asked, cluster=replace(cluster, memory_bytes=limit)), "pipedream")
        problem_of = partial(stage_of, planner)
        ((best_s, best),) = timed(1, partial(best_cuts_and_policies, problem_of, range(1, CHAIN), CHAIN, WORKERS))
        ways: dict[str, Callable[[], Any]] = {
            "SR": partial(planner.for_replicas, (1,) * WORKERS),
            "plan: auto": planner.best,
        }
        if best is None:
            unfit += 1
            continue
        best_took.append(best_s)
        exact += best.is_exact
        for way, plan in ways.items():
            try:
                ((seconds, found),) = timed(1, plan)
            except PlanError:
                continue
            stages = enumerate(found.plan.stages)
            own_s = max(lasts_s(problem_of(part, each.start, each.stop).outcome(each.memory)) for part, each in stages)
            over[way].append(own_s / best.slowest_s - 1)
            taken[way].append(seconds)
    rows = [Regret(way, over[way], statistics.mean(taken[way]), statistics.mean(best_took)).row for way in over]
    note = f"Of {instances} chains {unfit} fit in no way, and the best of {exact} is known to be the best.\n"
    return table(("plans", "found", "mean", "median", "95 %", "worst", "plan, ms", "best, ms"), rows) + "\n\n" + note


def stage_of(planner: Planner, part: int, start: int, stop: int) -> StageProblem:
    """Return a stage of a straight pipeline."""
    in_flight = planner.in_flight((1,) * WORKERS, part, WORKERS)
    return planner.stage_problem(planner.memory(planner.memory_limit_bytes), SearchStage(start, stop, 1), in_flight)


def main(runs: int = RUNS, instances: int = INSTANCES, shapes: Sequence[str] = tuple(SHAPES)) -> None:
    """Print the page.

    Args:
        runs: of every algorithm on every graph; with 1, the zoo's models are left out, to be quick.
        instances: of every random kind.
        shapes: models of Table 4 whose graphs are drawn.
    """
    subjects = [Subject(f"{name}, drawn", tuple(drawn(SHAPES[name], seed) for seed in range(DRAWS))) for name in shapes]
    subjects += map(of_zoo, ("bert", "transformer", "amoebanet", "gnmt16") if runs > 1 else ())
    sections = (
        HEAD, TABLE_4, table_4(subjects, runs), published(), REGRET_3, regret_3(subjects, instances), REGRET_2,
        regret_2(instances), REGRET_BOTH, regret_both(instances),
    )  # fmt: skip
    print("\n".join(section.strip() + "\n" for section in sections), end="")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS, help=f"of each algorithm ({RUNS})")
    parser.add_argument("--instances", type=int, default=INSTANCES, help=f"of each random kind ({INSTANCES})")
    given = parser.parse_args()
    main(given.runs, given.instances)
