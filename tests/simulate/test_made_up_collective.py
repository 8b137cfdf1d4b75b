"""A way to sum that this test defines: the first member of a group adds up all buffers and sends the sum back.

It takes a name (`schedule/syncs.py`), what is sent and when (`simulate/sums.py`), the sum itself (`engine/ring.py`),
and nothing else. What planners' searches expect of a sum is `planner/cost_models.py`; it agrees with the simulator's.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from pipebench.cluster import Cluster, Level
from pipebench.engine.ring import SUMS
from pipebench.planner.cost_models import ring_s
from pipebench.schedule.syncs import ALL_REDUCE, SYNCS, Sync
from pipebench.simulate.network import Network
from pipebench.simulate.steady import simulate_segment
from pipebench.simulate.sums import ALGORITHMS, Groups, Links, Part, Phases, Port, SumAlgorithm
from tests.checkpoint.support import captured
from tests.checkpoint.test_round_trips import bits
from tests.support import Mlp, flat_cluster, make_engine, make_setup

STAR = "star"


def star_traffic(num_bytes: int, servers: Groups) -> Iterator[tuple[int, int, int]]:
    for member in range(1, sum(map(len, servers))):
        yield from ((member, 0, num_bytes), (0, member, num_bytes))


def star_phases(links: Links, ring: Sequence[int], servers: Groups) -> Phases:
    return [[_part(links, [(other, ring[0]) for other in ring[1:]])], [_part(links, [(ring[0], o) for o in ring[1:]])]]


def _part(links: Links, ways: Sequence[tuple[int, int]]) -> Part:
    ports, latency_s = Counter[Port](), 0.0
    for sender, receiver in ways:
        index, *both = links.path(sender, receiver)
        ports.update(both)
        latency_s = max(latency_s, links.cluster.levels[index].latency_s)
    return Part(1.0, tuple((links.port(port), float(count)) for port, count in ports.items()), latency_s, float("inf"))


def star_sum(buffers: Sequence[torch.Tensor], servers: Groups, count: Callable[[int, int, int], None]) -> torch.Tensor:
    total = buffers[0].clone()
    for member, buffer in enumerate(buffers[1:], 1):
        count(member, 0, buffer.nbytes)
        total += buffer
        count(0, member, total.nbytes)
    return total


@pytest.fixture(autouse=True)
def _made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SYNCS, STAR, Sync("the first replica adds up", STAR))
    monkeypatch.setitem(ALGORITHMS, STAR, SumAlgorithm(star_traffic, star_phases))
    monkeypatch.setitem(SUMS, STAR, star_sum)


def test_a_sum_takes_the_time_of_its_busiest_port() -> None:
    ends: list[float] = []
    network = Network(Cluster("flat", "unit", None, (Level("server", 4, 2.0, 0.5),)))
    network.sum_up(network.group(STAR, STAR, range(4)), "r", 12, 0.0, ends.append)
    network.agenda.play()
    assert ends == [2 * (3 * 12 / 2.0 + 0.5)]
    assert dict(network.num_bytes) == {(STAR, "server"): 2 * 3 * 12}


def test_an_engine_sums_by_the_new_way_and_sends_the_simulated_bytes() -> None:
    """With two members there is one order of additions, so the weights equal those of any other way."""
    setup, ring = (make_setup(Mlp(), ([4], [2, 1]), sync=sync, cluster=flat_cluster(3)) for sync in (STAR, ALL_REDUCE))
    engine, other = make_engine(setup), make_engine(ring)
    for each in (engine, other):
        each.train(0, 12)
    assert bits(captured(engine)) == bits(captured(other))
    assert engine.clock_s == simulate_segment(setup, 12).end_s
    level = setup.cluster.levels[0].name
    per_update = 2 * sum(bucket.num_bytes for bucket in setup.costs.stages[0].buckets)
    assert engine.num_bytes[STAR, level] == 6 * per_update
    assert {kind for kind, _ in other.num_bytes} - {kind for kind, _ in engine.num_bytes} == {ALL_REDUCE}


@pytest.mark.parametrize("size", [2, 3, 8])
def test_planner_and_simulator_agree_on_a_ring_s_time(size: int) -> None:
    """The formula is in both: this shows a change of only one."""
    level, ends = Level("server", size, 3.0, 0.25, efficiency=0.5, ring_bytes_per_s=1.25), list[float]()
    network = Network(Cluster("flat", "unit", None, (level,)))
    network.sum_up(network.group(ALL_REDUCE, ALL_REDUCE, range(size)), "r", 4096, 0.0, ends.append)
    network.agenda.play()
    assert ends == [pytest.approx(ring_s([level] * size, 4096), rel=1e-12)]
