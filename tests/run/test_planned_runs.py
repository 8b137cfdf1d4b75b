"""Recipes that leave the plan, or the mode, to the planner; and its predictions against runs."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from pipebench.cluster import Cluster, Level
from pipebench.errors import PlanError
from pipebench.planner.cost_models import COST_MODELS
from pipebench.planner.flat import SearchStage
from pipebench.planner.planner import Planner
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.load import load
from pipebench.recipe.ranges import CHOICES
from pipebench.schedule.syncs import ALL_REDUCE
from pipebench.simulate.kinds import AGAIN, HELD, KINDS
from pipebench.simulate.network import Network
from pipebench.simulate.steady import simulate_all, simulate_segment
from pipebench.train.job import Job
from pipebench.train.memory_forecast import MemoryForecast
from pipebench.train.prepare import prepare
from pipebench.train.request import plan_request
from tests.modes import WHOLE
from tests.support import Blobs, Mlp, make_engine, make_setup, parameters_of

SMALL = ["model.width=0.05", "train.max_epochs=1"]


def prepared(reference: str, *overrides: str, cluster: Cluster | None = None) -> Job:
    loaded = load(reference, [*SMALL, *overrides])
    recipe = loaded.recipe
    return prepare(recipe, cluster or load_cluster(recipe.cluster.name, recipe.cluster.servers))


def test_a_recipe_may_name_every_cost_model() -> None:
    assert set(CHOICES["parallelism.cost_model"]) == set(COST_MODELS)


def test_plan_auto_holds_every_layer_once_in_stages_that_are_not_empty() -> None:
    for mode in ("pipedream", "gpipe", "pipedream-flush", "model"):
        given = prepared("quickstart", f"parallelism.mode={mode}", "parallelism.plan=auto")
        stages = given.setup.plan.stages
        assert [stage.start for stage in stages[1:]] == [stage.stop for stage in stages[:-1]]
        assert (stages[0].start, stages[-1].stop) == (0, len(given.setup.graph.layers))
        assert all(stage.start < stage.stop for stage in stages)
        assert sum(given.setup.plan.replicas) <= given.cluster.num_workers


def test_mode_auto_is_the_mode_predicted_to_be_fastest_and_keeps_the_others() -> None:
    given = prepared("quickstart", "parallelism.mode=auto", "parallelism.plan=auto")
    assert given.comparison is not None
    seconds = [given.comparison.best.minibatch_s, *(other.minibatch_s for other in given.comparison.others)]
    assert seconds == sorted(seconds)
    assert {given.comparison.best.plan.mode, *(other.plan.mode for other in given.comparison.others)} == set(WHOLE)
    assert given.recipe.parallelism.mode == given.comparison.best.plan.mode
    assert given.setup.plan.replicas == given.comparison.best.plan.replicas


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("reference", "overrides"),
    [
        ("quickstart", []),
        ("quickstart/dp", []),
        ("quickstart/model", []),
        ("quickstart/gpipe", ["parallelism.recompute=false"]),
        ("quickstart", ["parallelism.plan=2-1-1"]),
        ("quickstart", ["parallelism.plan=1-3"]),
        ("modes/pipedream-flush", []),
    ],
)
def test_predicted_memory_equals_a_run_s(reference: str, overrides: list[str]) -> None:
    """It is the live tensors at their most, and the buffers for transfers, which the virtual engine doesn't have."""
    given = prepared(reference, *overrides)
    setup = given.setup
    engine = make_engine(setup)
    engine.train(0, 16)
    planner = Planner(
        plan_request(given.recipe, given.cluster, given.profile, setup.dataset), given.recipe.parallelism.mode
    )
    planned = planner.estimate("", [SearchStage(each.start, each.stop, each.replicas) for each in setup.plan.stages])
    peaks: dict[int, int] = {}
    for stage in range(setup.pipeline.num_stages):
        peaks[stage] = max(engine.peak_bytes[worker] for worker in setup.pipeline.places[stage])
    for index, predicted in enumerate(planned.stages):
        sent = planner.work.states.sent_bytes
        stops = [setup.plan.stages[index].start, setup.plan.stages[index].stop]
        buffers = 2 * sum(sent[cut] for cut in stops if 0 < cut < len(sent) - 1)
        # On a CPU, dropout keeps a number per value, where the profile of a GPU has a byte.
        assert predicted.memory_bytes - buffers == pytest.approx(peaks[index], rel=0.05)


def without_messages(given: Job) -> list[int]:
    """Return the predicted peak of every worker's replicas."""
    kept = [KINDS.index(kind) for kind in (*HELD, AGAIN)]
    return [int(curve.num_bytes[kept].sum(axis=0).max()) for curve in MemoryForecast(given).memory.curves]


@pytest.mark.parametrize("epochs", [1, 2])
def test_short_segments_have_the_optimizer_s_state_beside_their_activations(epochs: int) -> None:
    """A run of one update per epoch has no state in its first, and all of it while later ones run forward."""
    words = ("parallelism.recompute=false", "model.width=0.5", "dataset.num_train=32")
    given = prepared("quickstart/gpipe", *words, f"train.max_epochs={epochs}")
    engine = make_engine(given.setup)
    for epoch in range(epochs):
        engine.train(epoch, epoch + 1)
    peaks = MemoryForecast(given).memory.peaks
    states = [peak.by_kind.get("optimizer state", 0) for peak in peaks]
    assert max(peak.num_bytes for peak in peaks) == pytest.approx(max(engine.peak_bytes), rel=0.02)
    assert [peak.num_bytes for peak in peaks] == pytest.approx(engine.peak_bytes, rel=0.06)
    assert min(states) > 0 or epochs == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("num_minibatches", "epochs", "every", "drains"),
    [
        (2, 3, "{epochs: 3}", (0, 6)),
        (5, 1, "{minibatches: 3}", (0, 3, 5)),
        (5, 1, "{minibatches: 4}", (0, 4, 5)),  # later segments are so short that full stages meet no state
        (2, 4, "{epochs: 2}", (0, 4, 8)),
    ],
)
@pytest.mark.parametrize("mode", ["pipedream", "pipedream-2bw"])
def test_segments_of_several_epochs_and_short_last_ones_have_the_peak_of_the_run(
    mode: str, num_minibatches: int, epochs: int, every: str, drains: tuple[int, ...]
) -> None:
    """A pipeline four deep, which no epoch of these fills: only drains empty it, and state outlives them."""
    words = (f"parallelism.mode={mode}", f"train.max_epochs={epochs}", f"train.evaluate_every={every}")
    data = ("model.width=0.25", f"dataset.num_train={32 * num_minibatches}")
    given = prepared("modes/pipedream-straight", *data, *words)
    engine = make_engine(given.setup)
    for first, stop in itertools.pairwise(drains):
        engine.train(first, stop - first)
    for predicted, measured in zip(without_messages(given), engine.peak_bytes, strict=True):
        assert 0.98 * measured < predicted < 1.01 * measured


def test_short_segments_of_a_server_have_its_optimizer_s_state_on_the_first_worker_alone() -> None:
    words = ("parallelism.mode=dp-asp", "parallelism.plan=auto", "model.width=0.2", "dataset.num_train=128")
    measured, predicted = [], []
    for epochs in (1, 2):
        given = prepared("quickstart/dp", *words, f"train.max_epochs={epochs}")
        engine = make_engine(given.setup)
        for first in range(0, 4 * epochs, 4):
            engine.train(first, first + 4)
        measured.append(engine.peak_bytes)
        predicted.append(without_messages(given))
    more = [two - one for one, two in zip(*predicted, strict=True)]
    assert more == [two - one for one, two in zip(*measured, strict=True)]
    assert more[0] > 0 == more[1]


@pytest.mark.parametrize("servers", [1, 2])
def test_the_first_worker_has_room_for_the_gradients_that_all_others_push_at_once(servers: int) -> None:
    given = prepared("quickstart/dp", "parallelism.mode=dp-asp", "parallelism.plan=auto", f"cluster.servers={servers}")
    planner = Planner(plan_request(given.recipe, given.cluster, given.profile, given.setup.dataset), "dp-asp")
    (stage,) = planner.best().stages
    peak = MemoryForecast(given).memory.fullest
    assert peak.num_bytes <= stage.memory_bytes <= peak.num_bytes + peak.by_kind["weights"]


def test_memory_decides_depth_and_refusal() -> None:
    loaded = load("quickstart", [*SMALL, "parallelism.plan=auto", "cluster.count=2"])
    cluster = loaded.cluster
    needed = Planner(plan_request(loaded.recipe, cluster, prepared("quickstart").profile, Blobs()), "pipedream").best()
    most = max(stage.memory_bytes for stage in needed.stages)
    smaller = prepared("quickstart", "parallelism.plan=auto", cluster=replace(cluster, memory_bytes=int(0.4 * most)))
    assert smaller.setup.plan.replicas != needed.plan.replicas or smaller.setup.pipeline.depth < needed.plan.depth
    with pytest.raises(PlanError, match=r"no plan of mode pipedream fits: the leanest needs .* more than the 10.0 kB"):
        prepared("quickstart", "parallelism.plan=auto", cluster=replace(cluster, memory_bytes=10_000))


def two_servers() -> Cluster:
    levels = (Level("server", 2, 1e6, 1e-3), Level("cluster", 2, 1e5, 1e-3))
    return Cluster("two servers", "unit", None, levels)


def test_placements_change_times_and_levels_but_not_results() -> None:
    """A hierarchical plan, 2-2 with every minibatch inside one server, against the same plan stage by stage."""
    weights, num_bytes = [], []
    for devices in ((0, 1, 2, 3), (0, 2, 1, 3)):
        setup = make_setup(Mlp(), ([3], [2, 2]), cluster=two_servers(), devices=devices)
        engine = make_engine(setup)
        engine.train(0, 12)
        weights.append(parameters_of(engine))
        num_bytes.append(engine.num_bytes)
        assert engine.num_bytes == engine.network.num_bytes  # counted tensors, and the simulator's prediction
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    activations = [
        Counter({level: n for (kind, level), n in each.items() if kind == "activation"}) for each in num_bytes
    ]
    assert set(activations[0]) == {"cluster"}
    assert set(activations[1]) == {"server"}
    assert activations[0].total() == activations[1].total()


def test_a_ring_follows_the_order_of_devices() -> None:
    network = Network(two_servers(), (0, 2, 1, 3))
    network.sum_up(network.group(ALL_REDUCE, "all-reduce", range(4)), "", 400, 0.0, lambda _: None)
    # 4 members pass on 150 bytes in each of 2 x 3 steps over 4; two of the four links leave a server.
    assert network.num_bytes["all-reduce", "server"] == network.num_bytes["all-reduce", "cluster"] == 1200


def test_efficiency_is_the_payload_s_fraction_of_the_bandwidth() -> None:
    full = Cluster("flat", "unit", None, (Level("server", 2, 1e6, 0.0),))
    half = replace(full, levels=(replace(full.levels[0], efficiency=0.5),))
    networks = [Network(cluster) for cluster in (half, full)]
    slow, fast = (each.send(each.connection("activation", 0, 1), 100, 0.0).arrival_s for each in networks)
    assert slow == 2 * fast


@pytest.mark.parametrize(
    ("reference", "overrides"),
    [
        ("quickstart", ["parallelism.plan=2-1-1"]),
        ("quickstart", ["parallelism.plan=1-3"]),
        ("quickstart/dp", []),
        ("quickstart/dp", ["parallelism.accumulate=3"]),
        ("quickstart/gpipe", []),
        ("modes/pipedream-flush", ["parallelism.accumulate=2", "parallelism.plan=2-2", "parallelism.microbatches=1"]),
    ],
)
def test_predicted_bytes_equal_the_simulator_s(reference: str, overrides: list[str]) -> None:
    given = prepared(reference, *overrides)
    setup = given.setup
    request = plan_request(given.recipe, given.cluster, given.profile, setup.dataset)
    planner = Planner(request, given.recipe.parallelism.mode)
    planned = planner.estimate("", [SearchStage(each.start, each.stop, each.replicas) for each in setup.plan.stages])
    sent: Counter[str] = Counter()
    for sign, count in ((1, 96), (-1, 48)):  # whole rounds and flushes; what 48 more minibatches send
        for (kind, _), num_bytes in simulate_all(setup, count).num_bytes.items():
            sent[kind] += sign * num_bytes
    for kind, predicted in planned.num_bytes.items():
        # A ring's members may send a few bytes more or less each: chunks are whole numbers.
        assert sent[kind] / 48 == pytest.approx(predicted, rel=1e-6), kind


@pytest.mark.parametrize("mode", ["gpipe", "zero2", "dp"])
def test_predicted_seconds_equal_the_simulator_s_with_clipping(mode: str) -> None:
    """Where stages, or replicas with shards, wait for the norm of all gradients before an update."""
    given = prepared("quickstart", f"parallelism.mode={mode}", "train.optimizer.clip_norm=1")
    setup = given.setup
    planner = Planner(plan_request(given.recipe, given.cluster, given.profile, setup.dataset), mode)
    assert setup.pipeline.shares_norm == (mode != "dp")
    whole, part = (simulate_segment(setup, count * setup.pipeline.period, ends_epoch=False).end_s for count in (4, 2))
    seconds = (whole - part) / (2 * setup.pipeline.period)
    assert planner.estimate_of(setup.plan).minibatch_s == pytest.approx(seconds, rel=1e-9)
