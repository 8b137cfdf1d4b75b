"""Memory of plans that swap: predictions against live tensors of the virtual engine, over time."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipebench.cluster import Cluster, Level
from pipebench.engine.setup import Setup
from pipebench.model.graph import trace
from pipebench.model.plan import recut
from pipebench.planner.memory import MemoryRule
from pipebench.planner.state_graph import prefixes
from pipebench.schedule.programs import most_in_flight
from pipebench.simulate.costs import stage_costs
from pipebench.simulate.kinds import AGAIN, HELD, KINDS
from pipebench.simulate.memory_meter import MemoryMeter
from pipebench.simulate.meter import Meter
from pipebench.simulate.simulation import TimelineEvent
from pipebench.simulate.steady import simulate_all
from tests.models import ConvNet, RandomNet, SkipNet
from tests.simulate.test_memory import live, memories_of, momentum, profile_of, setup_of
from tests.support import Blobs, Mlp, flat_cluster, make_engine, make_setup

COLUMNS: tuple[Mapping[str, Any], ...] = (
    {},
    {"depth": 5},
    {"weights": "one", "microbatches": 2, "accumulate": 2},
    {"weights": "one", "order": "all-forwards", "microbatches": 2},
    {"weights": "stash-vertical-sync"},
    {"weights": "double-buffer", "accumulate": 3},
    {"weights": "correct"},
    {"precision": "bf16"},
)
_MINIBATCHES = 12


def random_setup(seed: int) -> Setup:
    """Return any small model, plan and policies, and lanes on which a copy takes nothing, a little, or too long."""
    draw = random.Random(seed)
    model = draw.choice((Mlp, SkipNet, ConvNet, lambda: RandomNet([[0], [0, 1], [1, 2], [0, 2, 3], [3, 4]])))()
    num_layers, num_stages = len(trace(model).layers), draw.randint(1, 4)
    starts = sorted(draw.sample(range(1, num_layers), num_stages - 1))
    replicas = [draw.choice((1, 1, 2)) for _ in range(num_stages)]
    columns = dict(draw.choice(COLUMNS))
    if columns.get("weights") == "double-buffer":
        replicas = [1] * num_stages
        columns["accumulate"] = max(num_stages, 2)
    policies = [draw.choice(("keep", "swap", "recompute")) for _ in range(num_layers)]
    cluster = replace(flat_cluster(sum(replicas)), pcie_bytes_per_s=draw.choice((1e12, 2e3, 2e2)))
    setup = setup_of(model, (starts, replicas), {**columns, "memory": policies, "cluster": cluster})
    return replace(setup, costs=stage_costs(profile_of(setup), setup.plan))


def measured_peaks(setup: Setup) -> list[int]:
    """Train a segment; return the most bytes that the live tensors of every worker's replicas took.

    What an instruction makes is there from its start on, what it is done with until its end: a copy in beside a
    backward has its room while that still has its own.
    """
    changes: list[list[tuple[float, int]]] = [[] for _ in range(setup.pipeline.num_workers)]

    def held(worker: int) -> dict[tuple[int, str], int]:
        replicas = engine.workers[worker].replicas
        return {(stage, kind): n for stage, replica in replicas.items() for kind, n in live(replica).items()}

    def observe(event: TimelineEvent) -> None:
        before, now = known[event.worker], held(event.worker)
        moved = [now[key] - before[key] for key in now]
        changes[event.worker] += [(event.start_s, change) for change in moved if change > 0]
        changes[event.worker] += [(event.end_s, change) for change in moved if change < 0]
        known[event.worker] = now

    engine = make_engine(setup, observe)
    known = [held(worker) for worker in range(setup.pipeline.num_workers)]
    first = [sum(each.values()) for each in known]
    engine.train(0, _MINIBATCHES)
    assert engine.num_bytes == engine.network.num_bytes
    peaks = []
    for start, own in zip(first, changes, strict=True):
        ordered = [change for _, change in sorted(own, key=lambda each: each[0])]
        peaks.append(int(start + max(0, *np.cumsum(ordered))))
    return peaks


def predicted_peaks(setup: Setup, *besides: str, num_minibatches: int = _MINIBATCHES) -> list[int]:
    """Return the simulated peaks of the kinds that replicas hold between instructions."""
    memory = MemoryMeter(setup.pipeline, memories_of(setup), setup.costs)
    simulate_all(setup, num_minibatches, Meter(setup.pipeline, memory))
    rows = [KINDS.index(kind) for kind in (*HELD, *besides)]
    return [int(curve.num_bytes[rows].sum(axis=0).max()) for curve in memory.timeline().curves]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", range(40))
def test_the_predicted_peak_is_that_of_the_live_tensors(seed: int) -> None:
    """Within a twentieth, whatever layers of any plan swap and run again; and the bytes that are swapped, exactly."""
    setup = random_setup(seed)
    for predicted, measured in zip(predicted_peaks(setup), measured_peaks(setup), strict=True):
        assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_server_holds_pushed_weights_while_its_replica_computes(num_workers: int) -> None:
    """In runs of one minibatch, too; pushes arrive in a forward of 7 s, in a backward of 14 s, or between."""
    for num_minibatches in (1, 2, 6):
        for push_s in (0.001, 4.0, 10.0, 19.0, 30.0):
            cluster = Cluster("flat", "unit", None, (Level("server", num_workers, 1456 / push_s, 1e-3),))
            setup = make_setup(
                Mlp(), ([], [num_workers]), weights="newest-pulled", sync="asynchronous", depth=1, cluster=cluster,
                dataset=Blobs(num_train=48), make_optimizer=momentum,
            )  # fmt: skip
            engine = make_engine(setup)
            engine.train(0, num_minibatches)
            assert predicted_peaks(setup, num_minibatches=num_minibatches) == engine.peak_bytes, push_s


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(40))
def test_no_stage_exceeds_the_closed_form(seed: int) -> None:
    """Stages are balanced by it (vPipe eq. 1): to the byte where everything is kept, else never too little."""
    draw = random.Random(seed)
    model = draw.choice((Mlp, SkipNet, ConvNet))()
    num_layers, num_stages = len(trace(model).layers), draw.randint(1, 4)
    starts = sorted(draw.sample(range(1, num_layers), num_stages - 1))
    some = draw.choice((("keep",), ("keep", "swap", "recompute")))
    columns = draw.choice(({}, {"weights": "one", "microbatches": 2, "accumulate": 2}))
    cluster = replace(flat_cluster(num_stages), pcie_bytes_per_s=1e12)
    chosen = {"memory": [draw.choice(some) for _ in range(num_layers)], "cluster": cluster}
    setup = setup_of(model, (starts, [1] * num_stages), {**columns, **chosen})
    setup = replace(setup, costs=stage_costs(profile_of(setup), setup.plan))
    size, depths = setup.costs.most_samples, most_in_flight(setup.pipeline)
    predicted = [
        memory.most_bytes(size, depth, 1 if columns else depth)
        for memory, depth in zip(memories_of(setup), depths, strict=True)
    ]
    simulated = predicted_peaks(setup)
    assert all(a >= b for a, b in zip(predicted, simulated, strict=True))
    if some == ("keep",) and not columns:
        assert predicted == simulated


class Encoder(nn.Module):
    """A Transformer's encoder of four blocks, on values instead of words; single precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(3)
        blocks = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(4)]
        self.blocks = nn.Sequential(nn.Unflatten(1, (12, 16)), *blocks, nn.Flatten(), nn.Linear(12 * 16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, 192] to [samples, 4]."""
        return self.blocks(x)


def encoder_setup(memory: Sequence[str] | str, weights: str = "one", microbatches: int = 2) -> Setup:
    """Return four blocks on two stages of two replicas."""
    model, data = Encoder(), Blobs(num_train=46, shape=(192,), dtype=torch.float32)
    graph = trace(model)
    policies = [memory] * len(graph.layers) if isinstance(memory, str) else memory
    setup = make_setup(
        model, ([len(graph.layers) // 2], [2, 2]), graph=graph, dataset=data, make_optimizer=momentum, weights=weights,
        microbatches=microbatches, memory=policies,
    )  # fmt: skip
    return replace(setup, costs=stage_costs(profile_of(setup), setup.plan))


@pytest.mark.parametrize("memory", ["keep", "recompute"])
@pytest.mark.parametrize(("weights", "microbatches"), [("one", 2), ("one", 1), ("stash", 1)])
def test_engine_simulator_and_planner_agree_on_the_peak(memory: str, weights: str, microbatches: int) -> None:
    """What a backward computes again counts while it is there: it is most of what a stage that recomputes needs."""
    setup = encoder_setup(memory, weights, microbatches)
    engine = make_engine(setup)
    engine.train(0, _MINIBATCHES)
    predicted, depths = predicted_peaks(setup, AGAIN), most_in_flight(setup.pipeline)
    size = setup.costs.most_samples // microbatches
    rows = profile_of(setup).layers[size]
    states = prefixes(rows)
    policies = [policy for stage in setup.plan.stages for policy in stage.memory]
    states = states.recomputing(policies) if memory == "recompute" else states
    for index, stage in enumerate(setup.plan.stages):
        workers = setup.pipeline.places[index]
        held = max(engine.peak_bytes[worker] for worker in workers)
        assert max(predicted[worker] for worker in workers) == pytest.approx(held, rel=0.05)
        rule = MemoryRule(0, 1 if weights == "one" else None, 1.0)
        planned = rule.num_bytes(states, stage.start, stage.stop, depths[index])
        cuts = [states.sent_bytes[cut] for cut in (stage.start, stage.stop) if 0 < cut < len(rows) - 1]
        inputs = 4 * 192 * size if memory == "recompute" and index == 0 else 0  # a profile doesn't know their size
        assert planned - 2 * sum(cuts) + depths[index] * inputs == pytest.approx(held, rel=0.05)
    if memory == "recompute":
        between = predicted_peaks(setup)
        assert all(most > 1.5 * least for most, least in zip(engine.peak_bytes, between, strict=True))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(12))
def test_the_peak_that_an_engine_reports_equals_the_simulated_one(seed: int) -> None:
    """Whatever layers of any plan run again or are kept; copies overlap with passes on the simulator's clock alone."""
    draw = random.Random(f"reported {seed}")
    setup = random_setup(seed)
    policies = [draw.choice(("keep", "recompute")) for stage in setup.plan.stages for _ in stage.memory]
    setup = setup.under(recut(setup.graph, setup.plan, [stage.start for stage in setup.plan.stages[1:]], policies))
    engine = make_engine(replace(setup, costs=stage_costs(profile_of(setup), setup.plan)))
    engine.train(0, _MINIBATCHES)
    assert predicted_peaks(setup, AGAIN) == [pytest.approx(held, rel=0.05) for held in engine.peak_bytes]
