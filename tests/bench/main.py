"""`nox -s bench`: overhead of the engine over its arithmetic, and speed of simulator, planner, loading and commands.

Every ratio is speed of ours over speed of the reference; the A/A row compares the reference with itself, which shows
the noise of the machine.
"""

import argparse
import copy
import platform
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

from pipebench.cluster import Cluster, Level
from pipebench.engine.setup import Setup
from pipebench.engine.virtual import VirtualEngine
from pipebench.model.device import torch_settings
from pipebench.model.heap import keep_freed_blocks
from pipebench.model.plan import make_plan
from pipebench.model.sampling import Sampler
from pipebench.model.stage import Stage, cut_stage
from pipebench.planner.predict import PlannedWorkload
from pipebench.recipe.schema import EngineRecipe
from pipebench.schedule.notation import format_plan
from pipebench.schedule.pipeline import Pipeline, chain
from pipebench.schedule.programs import programs
from pipebench.simulate.costs import Costs, Crossing, SimulatedBucket, StageCosts
from pipebench.simulate.network import Network
from pipebench.simulate.simulation import Simulation
from pipebench.simulate.steady import simulate_segment
from pipebench.zoo.mnist5k import mnist5k
from pipebench.zoo.vgg import vgg16
from tests.bench.loading import epoch_table, loading_table
from tests.bench.pairs import NUM_PAIRS, Ratio, compare, median_and_range, seconds
from tests.bench.planning import planning_tables
from tests.bench.starting import starting_table
from tests.support import make_engine, make_setup

BATCH, STEPS = 64, 6
MODEL = f"VGG-16 with BatchNorm, width 0.25, {BATCH} digits of 32x32"


def model() -> nn.Module:
    """Return the benchmark's model, always with the same weights."""
    torch.default_generator.manual_seed(0)
    return vgg16(width=0.25, batch_norm=True, dropout=0.0, num_classes=10, in_channels=1, image_size=32, init="kaiming")


def sgd(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01, 0.9, weight_decay=5e-4, fused=True)


def setup(starts: Sequence[int], weights: str, depth: int | None = None) -> Setup:
    return make_setup(
        model(), (starts, [1] * (len(starts) + 1)), weights=weights, depth=depth, dataset=mnist5k(),
        minibatch_size=BATCH, make_optimizer=sgd, lr=lambda stage, before, own: 0.01,
    )  # fmt: skip


def runner(engine: VirtualEngine) -> Callable[[], None]:
    """Return a function that trains `STEPS` minibatches."""

    def run() -> None:
        engine.train(0, STEPS)

    return run


def plain_loop(given: Setup) -> Callable[[], None]:
    """Return a plain training loop on the same minibatches."""
    module, data = model(), mnist5k()
    optimizer = sgd(list(module.parameters()))

    def run() -> None:
        for k in range(STEPS):
            fields = data.fetch("train", given.sampler.indices(k), ["image", "label"])
            optimizer.zero_grad()
            loss = functional.cross_entropy(module(fields["image"]), fields["label"])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return run


def bare_stages(given: Setup) -> Callable[[], None]:
    """Return a loop with the arithmetic of the stages, without weight versions, schedule, mailboxes or a clock."""
    stages: list[Stage] = [cut_stage(given.graph, given.plan, i) for i in range(len(given.plan.stages))]
    modules = [copy.deepcopy(stage.module).train() for stage in stages]
    optimizers = [sgd(list(module.parameters())) for module in modules]
    data = mnist5k()

    def run() -> None:
        for k in range(STEPS):
            fields = data.fetch("train", given.sampler.indices(k), ["image", "label"])
            value = fields["image"]
            kept: list[tuple[torch.Tensor, torch.Tensor]] = []
            for module in modules:
                value = value.detach().requires_grad_(bool(kept))
                out = module(value)[0]
                kept.append((value, out))
                value = out
            loss = functional.cross_entropy(value, fields["label"], reduction="sum") / BATCH
            heads: list[tuple[torch.Tensor, torch.Tensor | None]] = [(loss, None)]
            for index in reversed(range(len(modules))):
                optimizers[index].zero_grad()
                torch.autograd.backward(*heads.pop())
                if index > 0:
                    heads.append((kept[index - 1][1], kept[index][0].grad))
                optimizers[index].step()

    return run


def ratios() -> Iterator[Ratio]:
    """Measure every ratio, one after the other."""
    single = setup([], "one", depth=1)
    stages = make_plan(single.graph, [14, 27, 40], [1] * 4)
    starts = [stage.start for stage in stages.stages[1:]]
    stash, naive = setup(starts, "stash"), setup(starts, "none")
    yield compare(f"A/A: plain loop against itself; {MODEL}", plain_loop(single), plain_loop(single), 0.0)
    yield compare("single worker against a plain loop", runner(make_engine(single)), plain_loop(single), 0.98)
    yield compare("stashing on against off, 4 stages", runner(make_engine(stash)), runner(make_engine(naive)), 0.98)
    yield compare("virtual engine against bare arithmetic", runner(make_engine(stash)), bare_stages(stash), 0.952)


def simulator_rate(num_workers: int, num_instructions: int) -> tuple[int, float]:
    """Simulate 1F1B without a flush on a straight pipeline; return the number of instructions and the seconds."""
    pipeline = Pipeline((1,) * num_workers, chain(num_workers), "1f1b", False, num_workers)
    num_minibatches = num_instructions // (num_workers * 8)
    count = sum(sum(1 for _ in program) for program in programs(pipeline, num_minibatches))
    stages = tuple(StageCosts({1: 1.0}, {1: 2.0}, {1: 1.0}, {1: 0.1}, 0.1) for _ in range(num_workers))
    sizes: Crossing = {(e.source, e.target): {1: 1000} for e in pipeline.edges}
    network = Network(Cluster("flat", "unit", None, (Level("server", num_workers, 1e6, 1e-3),)))
    simulation = Simulation(
        pipeline, programs(pipeline, num_minibatches), Costs(stages, sizes, sizes), network, lambda _: 1
    )
    return count, seconds(lambda: deque(simulation, maxlen=0))


def largest_clusters() -> list[tuple[str, float]]:
    """Return plans of 4,096 workers and the seconds until their steady state is found and extrapolated."""
    found = []
    buckets = (SimulatedBucket(1 << 20, 0.3), SimulatedBucket(25 << 20, 1.0))
    for replicas in ((4096,), (4095, 1)):
        stages = tuple(StageCosts({1: 1e-3}, {1: 2e-3}, {1: 1e-3}, {1: 1e-5}, 1e-5, buckets) for _ in replicas)
        pipeline = Pipeline(replicas, chain(len(replicas)), "1f1b", False, 2)
        sizes: Crossing = {(e.source, e.target): {1: 100_000} for e in pipeline.edges}
        cluster = Cluster("large", "unit", None, (Level("server", 8, 1e10, 1e-5), Level("cluster", 512, 1.25e9, 5e-5)))
        workload = PlannedWorkload(
            pipeline, Costs(stages, sizes, sizes), cluster, tuple(range(4096)), Sampler(10**9, 1, 0)
        )
        took_s = seconds(partial(simulate_segment, workload, 100 * pipeline.period))
        found.append((format_plan(replicas), took_s))
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()  # there are no options, but `--help` shouldn't measure
    torch.set_num_threads(1)
    keep_freed_blocks()  # as runs do; both sides of a ratio share the process
    console = Console(width=140)
    console.print(f"torch {torch.__version__}, {platform.machine()}, 1 thread, {NUM_PAIRS} interleaved pairs")
    with torch_settings(EngineRecipe(threads=1)):
        for ratio in ratios():  # each takes a minute
            median, spread = median_and_range(ratio.values, ".3f")
            console.print(
                f"{ratio.what}: {median} ({spread})"
                + (f", target {ratio.target:.3f}: {ratio.verdict}" if ratio.target else "")
                + f"; {1000 * ratio.ours_s / STEPS:.1f} ms per minibatch"
            )
    rates = Table("simulator: 1F1B, straight", "instructions", "seconds (target < 3 for 1 M)", "per second")
    for num_workers in (4, 16, 64):
        count, took_s = simulator_rate(num_workers, 1_000_000)
        rates.add_row(f"{num_workers} workers", f"{count:,}", f"{took_s:.2f}", f"{count / took_s:,.0f}")
    console.print(rates)
    steady = setup([14, 27, 40], "stash")
    for num_minibatches in (100, 10_000, 1_000_000):
        took_s = seconds(partial(simulate_segment, steady, num_minibatches))
        console.print(f"an epoch of {num_minibatches:,} minibatches, steady state extrapolated: {1000 * took_s:.1f} ms")
    for plan, took_s in largest_clusters():
        console.print(
            f"4,096 workers, plan {plan}, 100 periods, steady state extrapolated: {took_s:.1f} s (target < 10)"
        )
    for table in (*planning_tables(), loading_table(), epoch_table(), starting_table()):
        console.print(table)


if __name__ == "__main__":
    main()
