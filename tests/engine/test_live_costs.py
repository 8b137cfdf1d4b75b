"""The costs of layers that move during training: seconds on the virtual clock, bytes on the links."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from pipebench.cluster import Cluster, Level
from pipebench.engine.virtual import VirtualEngine
from pipebench.extensions.moves.engine import moves_of, moving
from pipebench.extensions.moves.repartition_plan import Repartition
from pipebench.extensions.moves.simulated_engine import SimulatedEngine
from pipebench.extensions.moves.throughput import Finishes, throughput
from pipebench.model.plan import recut
from pipebench.schedule.operations import MIGRATION, Op
from pipebench.simulate.meter import Meter
from pipebench.simulate.network import Network
from pipebench.simulate.simulation import TimelineEvent
from tests.engine.moved_segment import simulate_moves
from tests.engine.test_live_moves import SEVERAL
from tests.models import ConvNet
from tests.support import Blobs, Mlp, make_setup

Starts = tuple[int, ...]
FAST = 1e12  # bytes/s: nothing to wait for


def timed(
    starts: Starts,
    moves: Sequence[Repartition],
    count: int,
    *,
    bytes_per_s: float = FAST,
    update_s_per_byte: float = 0.0,
    model: Any = None,
    **more: Any,
) -> tuple[VirtualEngine, list[TimelineEvent], Meter]:
    """Train with a forward of 1 s and a backward of 2 s per layer; return the timeline."""
    p = len(starts) + 1
    cluster = Cluster("flat", "unit", None, (Level("server", p, bytes_per_s, 0.0),))
    setup = make_setup(
        model or Mlp(), (starts, [1] * p), cluster=cluster, dataset=more.pop("dataset", Blobs(num_train=4 * count)),
        make_optimizer=lambda q: torch.optim.SGD(q, 0.1, 0.9),
    )  # fmt: skip
    profile = replace(setup.profile, update_floor_s=0.0, update_s_per_byte=update_s_per_byte, state_bytes_per_byte=1)
    setup = moving(replace(setup, profile=profile))
    setup = setup.under(setup.plan)
    events: list[TimelineEvent] = []
    meter = Meter(setup.pipeline)
    engine = VirtualEngine(setup, Network(cluster, setup.devices, meter.transfer), events.append, meter=meter)
    for move in moves:
        moves_of(engine).announce(move)
    engine.train(0, count)
    return engine, events, meter


def done_s(events: Sequence[TimelineEvent]) -> list[float]:
    """Return the times at which minibatches were finished: the ends of their backwards on the input stage."""
    return [e.end_s for e in events if e.instruction.op is Op.BACKWARD and e.instruction.stage == 0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("before", "after"), SEVERAL)
def test_bytes_equal_those_computed_from_shapes(before: Starts, after: Starts) -> None:
    """Counted independently: with each unit a version and the layers' inputs, then the layers' whole state."""
    at, d = 9, len(before) + 1
    engine, events, _ = timed(before, [Repartition(at, after)], 20)
    assert engine.num_bytes == Counter({key: n for key, n in engine.network.num_bytes.items() if n})
    rows = engine.setup.profile.layers[4]
    wanted = 0
    for left, (old, new) in enumerate(zip(before, after, strict=True)):
        block = range(*sorted((old, new)))
        parameters = sum(size for i in block for size in rows[i].parameter_sizes.values())
        read = sum(rows[v].output_bytes for v in {v for i in block for v in rows[i].reads} - {*block})
        units = d - left - 1
        wanted += bool(block) * (units * (parameters + read) + 2 * parameters)
    assert engine.num_bytes[MIGRATION, "server"] == wanted
    given = Counter(e.instruction.op for e in events if e.instruction.op in (Op.GIVE, Op.TAKE, Op.GIVE_UNIT))
    assert given[Op.GIVE] == given[Op.TAKE] == sum(a != b for a, b in zip(before, after, strict=True))


def test_buffers_move_too() -> None:
    data = Blobs(num_train=80, shape=(2, 8, 8), dtype=torch.float32)
    engine, _, _ = timed((3, 6), [Repartition(9, (1, 4))], 20, model=ConvNet(), dataset=data)
    counted = {key: n for key, n in engine.network.num_bytes.items() if n}
    assert engine.num_bytes == Counter(counted)
    assert engine.num_bytes[MIGRATION, "server"] > 0


class HalfTrained(nn.Module):
    """Seven layers, of which two linear ones aren't trained, and three sums read constants."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(3, 6, dtype=torch.float64))
        self.linears = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(3))
        self.head = nn.Linear(6, 4, dtype=torch.float64)
        self.linears[0].requires_grad_(False)
        self.linears[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        for linear in self.linears:
            x = linear(x) + self.table.sum()
        return self.head(x)


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("after", [(1, 3), (3, 6)])
def test_untrained_parameters_and_constants_move_too(after: Starts, live: bool) -> None:
    """Simulated transfers lacked parameters that aren't trained, and constants; only the engine's bytes had them."""
    setup = timed((2, 4), [], 0, model=HalfTrained(), dataset=Blobs(num_train=80))[0].setup
    trained, simulated = VirtualEngine(setup, Network(setup.cluster)), SimulatedEngine(setup)
    for engine in (trained, simulated):
        if live:
            moves_of(engine).announce(Repartition(9, after))
        engine.train(0, 20)
        if not live:
            engine.replan(recut(setup.graph, setup.plan, after))
    key = MIGRATION, "server"
    assert trained.num_bytes[key] == trained.network.num_bytes[key] == simulated.totals.num_bytes[key] > 0


def test_throughput_before_and_after() -> None:
    """The first worker has 5 of 7 layers: a minibatch takes 15 s; then 4 layers: 12 s; then 3: 9 s."""
    _, events, _ = timed((5, 6), [Repartition(15, (4, 6))], 60)
    _, more, _ = timed((5, 6), [Repartition(15, (4, 6)), Repartition(30, (3, 5))], 60)
    once, twice = done_s(events), done_s(more)
    assert once[:10] == twice[:10]
    took, later = ([b - a for a, b in itertools.pairwise(done)] for done in (once, twice))
    assert took[4:9] == pytest.approx([15.0] * 5)
    assert took[40:50] == pytest.approx([12.0] * 10)
    assert later[45:50] == pytest.approx([9.0] * 5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("before", "after"), [((5, 6), (4, 6)), ((1, 4), (2, 4)), ((3, 6), (3, 5)), ((2, 3), (2, 4))])
def test_moves_over_fast_links_cost_only_recomputed_forwards(before: Starts, after: Starts) -> None:
    """With fast links, no worker takes longer than under the slower plan, plus its recomputed forwards."""
    at, count = 15, 40
    _, events, meter = timed(before, [Repartition(at, after)], count)
    stayed = max(done_s(timed(cuts, [], count)[1])[-1] for cuts in (before, after))
    again_s = sum(e.end_s - e.start_s for e in events if e.instruction.op is Op.FORWARD_AGAIN)
    assert again_s > 0
    assert done_s(events)[-1] <= stayed + again_s
    assert meter.again_s == again_s


def test_only_the_receiver_of_layers_waits_for_a_slow_link() -> None:
    slow, events, meter = timed((2, 4), [Repartition(15, (3, 4))], 40, bytes_per_s=100.0)
    waits = [e for e in events if e.instruction.op in (Op.TAKE, Op.TAKE_UNIT) and e.end_s > e.start_s]
    assert [str(e.instruction) for e in waits] == ["0T15<1"]
    assert waits[0].stall_s > 0
    moved = [each for each in meter.timeline().transfers if each.kind == MIGRATION]
    assert [each.label for each in moved] == ["M13", "M14", "M15"]
    assert waits[0].end_s == pytest.approx(moved[-1].end_s)
    assert slow.num_bytes[MIGRATION, "server"] == sum(each.num_bytes for each in moved)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("before", "after"), SEVERAL)
def test_a_simulated_segment_takes_as_long_as_a_trained_one(before: Starts, after: Starts) -> None:
    """The clock, bytes and busy time are those of training, from any minibatch of the run on."""
    moves = [Repartition(9, after), Repartition(17, before)]
    engine, _, meter = timed(before, moves, 25, bytes_per_s=1000.0)
    setup = replace(engine.setup.under(recut(engine.setup.graph, engine.setup.plan, before)))
    totals = simulate_moves(setup, moves, 0, 25)
    assert (totals.end_s, totals.busy_s, totals.stall_s) == (engine.clock_s, meter.busy_s, meter.stall_s)
    assert totals.again_s == meter.again_s > 0
    assert {key: n for key, n in totals.num_bytes.items() if n} == dict(engine.num_bytes)


def test_throughput_over_time() -> None:
    """Four samples in 15 s on the first worker's 5 layers, then in 9 s on its 3."""
    setup = timed((5, 6), [], 1, dataset=Blobs(num_train=240))[0].setup
    finishes = Finishes()
    moves = [Repartition(15, (4, 6)), Repartition(21, (3, 5))]
    totals = simulate_moves(setup, moves, 0, 60, Meter(setup.pipeline, finishes))
    assert sum(unit.samples for unit in finishes.units) == 240
    rates = throughput(finishes.units, 45.0, totals.end_s)
    assert rates[1:5] == pytest.approx([12 / 45] * 4)
    assert rates[-4:-1] == pytest.approx([20 / 45] * 3)
    assert min(rates[1:-1]) >= 8 / 45


def test_updates_take_the_time_of_the_layers_they_update() -> None:
    """1 s per byte: a layer counts for its new stage from the first update after a backward there."""
    engine, events, _ = timed((2, 6), [Repartition(15, (3, 4))], 30, update_s_per_byte=1.0)
    rows = engine.setup.profile.layers[4]
    for stage, (before, after, first) in enumerate((((0, 2), (0, 3), 13), ((2, 6), (3, 4), 13), ((6, 7), (4, 7), 14))):
        took = [e.end_s - e.start_s for e in events if e.instruction.op is Op.UPDATE and e.instruction.stage == stage]
        num_bytes = [sum(sum(r.parameter_sizes.values()) for r in rows[slice(*own)]) for own in (before, after)]
        between = [first] if stage == 1 else []  # layer 2 has left, layer 4 hasn't
        assert took[:first] == [pytest.approx(num_bytes[0])] * first
        assert took[first:][: len(between)] == [
            pytest.approx(sum(sum(r.parameter_sizes.values()) for r in rows[3:6])) for _ in between
        ]
        assert took[first + len(between) :] == [pytest.approx(num_bytes[1])] * (30 - first - len(between))
