"""`sync: parameter-server`: the sums of replicas, and the bytes of the 2018 preprint."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pipebench.cluster import Cluster, Level
from pipebench.engine.ring import server_sum
from pipebench.planner.predict import payload
from pipebench.schedule.modes import MODES
from pipebench.schedule.syncs import PARAMETER_SERVER, PARAMETER_SERVER_AFTER
from pipebench.simulate.network import Network
from pipebench.simulate.sums import traffic
from tests.models import SkipNet
from tests.oracles import parameter_server
from tests.support import Blobs, make_engine, make_setup, parameters_of, unit_profile

PUBLISHED = Path(__file__).parents[2] / "reports" / "published" / "pipedream_arxiv18.yaml"


@pytest.mark.parametrize("machines", [2, 3, 4, 8])
def test_every_worker_communicates_the_preprint_s_bytes(machines: int) -> None:
    """A whole number of shares; the oracle counts both ends, the engine every byte once, at its sender."""
    num_bytes = 4 * 840 * machines
    sent, received = Counter[int](), Counter[int]()
    for sender, receiver, size in traffic(PARAMETER_SERVER, num_bytes, machines):
        sent[sender] += size
        received[receiver] += size
    for worker in range(machines):
        assert sent[worker] + received[worker] == parameter_server.communicated_bytes(num_bytes, machines)


@pytest.mark.parametrize("machines", [2, 4, 8, 16])
def test_the_oracle_is_the_published_formula(machines: int) -> None:
    entries = {entry["id"]: entry for entry in yaml.safe_load(PUBLISHED.read_text())["entries"]}
    formula = entries["dp-bytes"]["values"]["formula"].replace("|w_l|", "w")
    published = eval(formula, {"__builtins__": {}}, {"m": machines, "w": 1_000_000})
    assert parameter_server.communicated_bytes(1_000_000, machines) == pytest.approx(published)


@pytest.mark.parametrize(
    ("plan", "columns"),
    [
        (([], [2]), {"weights": "one", "depth": 1}),
        (([], [4]), {"weights": "one", "depth": 1}),
        (([3, 5], [2, 1, 3]), {"weights": "stash"}),
        (([3], [3, 1]), {"weights": "one", "microbatches": 2}),
    ],
    ids=str,
)
def test_weights_equal_a_ring_s_and_bytes_the_formula_s(plan: Any, columns: dict[str, Any]) -> None:
    """Engine, prediction and oracle agree; so do the weights, to the order in which sums are added."""
    engines = []
    for sync in ("all-reduce", PARAMETER_SERVER, PARAMETER_SERVER_AFTER):
        engine = make_engine(make_setup(SkipNet(), plan, dataset=Blobs(num_train=48), sync=sync, **columns))
        engine.train(0, 12)
        engines.append(engine)
    ring, servers, late = engines
    for name, parameter in parameters_of(servers).items():
        torch.testing.assert_close(parameter, parameters_of(ring)[name], rtol=1e-12, atol=1e-13)
    for name, parameter in parameters_of(servers).items():
        assert torch.equal(parameter, parameters_of(late)[name])
    assert late.num_bytes == servers.num_bytes == servers.network.num_bytes
    assert late.now_s >= servers.now_s
    setup = servers.setup
    found = sum(v for (kind, _), v in servers.num_bytes.items() if kind == PARAMETER_SERVER)
    expected = 0.0
    for stage, r in enumerate(plan[1]):
        weights = sum(bucket.num_bytes for bucket in setup.costs.stages[stage].buckets)
        expected += math.ceil(12 / setup.pipeline.round_size(stage)) * parameter_server.sent_bytes(weights, r)
    assert found == pytest.approx(expected)
    assert not any(kind == "all-reduce" for kind, _ in servers.num_bytes)


def test_the_planner_predicts_the_bytes() -> None:
    setup = make_setup(SkipNet(), ([3, 5], [2, 1, 3]), dataset=Blobs(num_train=48), sync=PARAMETER_SERVER)
    rows = unit_profile(setup.graph, setup.dataset, [4]).layers[4]
    mode = replace(MODES["pipedream"], sync=PARAMETER_SERVER)
    engine = make_engine(setup)
    engine.train(0, 12)
    sent = Counter[str]()
    for (kind, _), num_bytes in engine.num_bytes.items():
        sent[kind] += num_bytes
    foreseen = payload(rows, setup.plan, mode, 1, 1)
    assert {kind: 12 * num_bytes for kind, num_bytes in foreseen.items()} == pytest.approx(dict(sent))


def test_members_are_added_in_their_order() -> None:
    values = [torch.tensor([1e16, 1.0]), torch.tensor([1.0, 1e16]), torch.tensor([-1e16, -1e16])]
    counted: list[tuple[int, int, int]] = []
    found = server_sum([v.double() for v in values], lambda *flow: counted.append(flow))
    assert found.tolist() == [(1e16 + 1.0) - 1e16, (1.0 + 1e16) - 1e16]
    assert sum(num_bytes for *_, num_bytes in counted) == 2 * 2 * 16  # 2 (m - 1) |w|


def test_flows_share_ports() -> None:
    """Flat: 2 (m-1)/m of the buffer through every port. Two servers of two: a server's port carries four flows."""
    levels = (Level("server", 2, 1.0, 0.0), Level("cluster", 2, 1.0, 0.0))
    flat = Network(Cluster("flat", "unit", None, (Level("server", 4, 1.0, 0.5),)))
    nested = Network(Cluster("nested", "unit", None, levels))
    ends: list[float] = []
    for network in (flat, nested):
        network.sum_up(network.group(PARAMETER_SERVER, "parameter-server", range(4)), "r", 12, 0.0, ends.append)
        network.agenda.play()
    assert ends == [2 * (3 * 3 + 0.5), 2 * (4 * 3)]
    assert dict(nested.num_bytes) == {
        ("parameter-server", "server"): 4 * 2 * 3,
        ("parameter-server", "cluster"): 8 * 2 * 3,
    }
