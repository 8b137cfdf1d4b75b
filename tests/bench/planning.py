"""`nox -s bench`: the seconds of planning random chains, against targets, and their growth with layers and workers."""

import math
import random
import statistics
from dataclasses import dataclass

from rich.table import Table

from pipebench.cluster import Cluster, Level
from pipebench.planner.cost_models import COST_MODELS, UnitWork
from pipebench.planner.flat import FlatProblem, plan_flat
from pipebench.planner.hierarchical import HierarchicalProblem, plan_hierarchical
from pipebench.planner.planner import Planner
from pipebench.planner.plans import Request
from pipebench.planner.state_graph import prefixes
from pipebench.profile.model import LayerProfile, Profile
from tests.bench.pairs import median_and_range
from tests.bench.pairs import seconds as seconds_of

SEEDS = range(5)
MODELS = ("overlap", "artifact")
NUM_LAYERS, NUM_SERVERS = (60, 120, 240, 480, 960, 1500), (1, 4, 16, 64, 256, 1024, 4096)
SERVER, CLUSTER = Level("server", 4, 10e9, 10e-6), Level("cluster", 4, 1.25e9, 50e-6)


@dataclass(frozen=True)
class Case:
    """A planning problem with a target."""

    layers: int  # of the chain
    cluster: str  # in words
    levels: tuple[Level, ...]  # of links, innermost first
    target_s: float  # most seconds that the search should take; infinite for none


def flat(num_workers: int) -> tuple[Level, ...]:
    return (Level("cluster", num_workers, 1.25e9, 50e-6),)


CASES = (
    Case(240, "2x8", (Level("server", 8, 10e9, 10e-6), Level("cluster", 2, 1.25e9, 50e-6)), 1.0),
    Case(1500, "16 flat", flat(16), 1.0),
    Case(1500, "4x4", (SERVER, CLUSTER), 2.0),
    Case(240, "16,384 flat", flat(16_384), 1.0),
    Case(10_000, "4x4", (SERVER, CLUSTER), 20.0),
)


def chain(num_layers: int, seed: int) -> Profile:
    """Return a chain whose times and sizes are exponentially distributed, on average 1 ms, 1 MB and 0.1 MB."""
    draw = random.Random(f"{num_layers} {seed}").expovariate
    rows = []
    for index in range(num_layers):
        forward_s, size = draw(3000), int(draw(1e-6)) + 1
        rows.append(
            LayerProfile(
                *(f"layer{index}", "Linear", forward_s, 2 * forward_s, size, size),
                reads=(index - 1,) if index else (),
                parameter_sizes={f"weight{index}": int(draw(1e-5)) + 4},
            )
        )
    loss = LayerProfile("loss", "loss", 0.0, 0.0, 0, 0, reads=(num_layers - 1,))
    return Profile(f"chain of {num_layers}", "random", "file", "random", {1: (*rows, loss)}, 0.0, 0.0, {}, {})


def seconds(profile: Profile, model: str, levels: tuple[Level, ...]) -> tuple[float, float, float]:
    """Return the seconds of summing the states, of the search, and of the whole planner with its simulations."""
    cost_model = COST_MODELS[model]
    rows = profile.layers[1]
    states_s = seconds_of(lambda: prefixes(rows))
    work = UnitWork(prefixes(rows))
    if len(levels) == 1:
        search_s = seconds_of(lambda: plan_flat(FlatProblem(work, cost_model, levels[0], levels[0].count)))
    else:
        search_s = seconds_of(lambda: plan_hierarchical(HierarchicalProblem(work, cost_model, levels)))
    request = Request(profile, Cluster("bench", "random", None, levels), cost_model, 1)
    return states_s, search_s, seconds_of(lambda: Planner(request, "pipedream").best())


def _cells(case: Case, model: str, seeds: range) -> list[str]:
    """Return medians and ranges of `seconds` over seeds and, for a case with a target, that and the verdict."""
    every = [seconds(chain(case.layers, seed), model, case.levels) for seed in seeds]
    cells = ["{} ({})".format(*median_and_range(column, ".3f")) for column in zip(*every, strict=True)]
    search = [search_s for _, search_s, _ in every]
    if math.isfinite(case.target_s):
        met = statistics.median(search) < case.target_s
        cells += [f"{case.target_s:g}", "met" if met else "missed" if min(search) > case.target_s else "undecided"]
    return cells


def planning_tables(seeds: range = SEEDS, most_layers: int = 10_000, most_servers: int = 4096) -> list[Table]:
    """Measure; return a table of targets and one of growth."""
    head = ("states, s", "search, s", "whole planner, s")
    targets = Table(f"planner, {len(seeds)} random chains each", "cost model", *head, "target, s", "verdict")
    growth = Table("planner, growth", "cost model", *head)
    for model in MODELS:
        for case in CASES:
            if case.layers <= most_layers:
                targets.add_row(f"{case.layers:,} layers, {case.cluster}", model, *_cells(case, model, seeds))
        grown = [Case(layers, "4x4", (SERVER, CLUSTER), math.inf) for layers in NUM_LAYERS if layers <= most_layers]
        grown += [
            Case(240, f"{4 * servers:,} flat", flat(4 * servers), math.inf)
            for servers in NUM_SERVERS
            if servers <= most_servers
        ]
        for case in grown:
            growth.add_row(f"{case.layers:,} layers, {case.cluster}", model, *_cells(case, model, seeds[:3]))
    return [targets, growth]
