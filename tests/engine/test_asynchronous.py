"""Asynchronous data parallelism on the virtual clock, against a plain loop over the recorded order of pushes."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from pipebench.checkpoint.progress import Facts
from pipebench.checkpoint.state import CheckpointError
from pipebench.cluster import Cluster, Level
from pipebench.engine.admission import StopRequest
from pipebench.engine.setup import Setup
from pipebench.engine.virtual import VirtualEngine
from pipebench.errors import RecipeError
from pipebench.extensions.asynchronous.pushes import PackedPushes, Pushes, histogram, to_text, unpacked
from pipebench.extensions.asynchronous.recipe import load_push_order
from pipebench.planner.predict import payload
from pipebench.recipe.clusters import load_cluster
from pipebench.recipe.load import load
from pipebench.schedule.modes import MODES
from pipebench.schedule.operations import Op
from pipebench.schedule.programs import programs
from pipebench.simulate.simulation import TimelineEvent
from pipebench.simulate.steady import simulate_all, simulate_segment
from pipebench.train.prepare import prepare
from pipebench.typed_json import read
from tests.checkpoint.support import captured, restored
from tests.engine.test_averages import ASGD, held_out_loss
from tests.engine.test_staleness import OPTIMIZERS
from tests.instruction_text import render
from tests.models import ConvNet
from tests.oracles import asynchronous
from tests.support import Blobs, Mlp, make_engine, make_setup, parameters_of, unit_profile


def asp(model: torch.nn.Module | None = None, num_workers: int = 4, **columns: Any) -> Setup:
    given = {"weights": "newest-pulled", "sync": "asynchronous", "depth": 1, "dataset": Blobs(num_train=46), **columns}
    return make_setup(model or Mlp(), ([], [num_workers]), **given)


def pushes_of(engine: VirtualEngine) -> list[Pushes]:
    return unpacked(engine.facts()["extensions"]["asynchronous"])


def trained(setup: Setup, segments: Sequence[int]) -> VirtualEngine:
    engine, done = make_engine(setup), 0
    for count in segments:
        done += engine.train(done, count)
    return engine


def replayed(setup: Setup, pushes: Sequence[Pushes], optimizer: str) -> asynchronous.Replayed:
    dataset, sampler = setup.dataset, setup.sampler

    def field(name: str, k: int) -> torch.Tensor:
        return dataset.fetch("train", sampler.indices(k), [name])[name]

    return asynchronous.train(
        Mlp(),
        lambda output, k: functional.cross_entropy(output, field("label", k), reduction="sum"),
        lambda k: field("x", k),
        lambda k: float(sampler.size(k)),
        [each.minibatches for each in pushes],
        setup.pipeline.replicas[0],
        OPTIMIZERS[optimizer][1],
        0.1,
        setup.clip_norm,
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_a_plain_loop_over_the_logged_order_ends_with_the_same_weights(num_workers: int, optimizer: str) -> None:
    """With a short minibatch, drains, a segment of fewer minibatches than workers, and a second epoch."""
    setup = asp(num_workers=num_workers, make_optimizer=OPTIMIZERS[optimizer][0])
    engine = trained(setup, [12, 2, 9])
    pushes = pushes_of(engine)
    assert [sorted(each.minibatches) for each in pushes] == [[*range(12)], [*range(2)], [*range(9)]]
    expected = replayed(setup, pushes, optimizer)
    for name, parameter in parameters_of(engine).items():  # which checks that all workers have the same
        assert (parameter - expected.weights[name]).abs().max() < 1e-13
    assert [updates for each in pushes for updates in each.staleness] == expected.staleness
    assert max(replica.weights.most_alive for replica in engine.replicas) <= 2


def test_gradients_are_clipped_by_their_own_norm() -> None:
    setup = asp(clip_norm=0.2, make_optimizer=OPTIMIZERS["sgd"][0])
    engine = trained(setup, [12])
    expected = replayed(setup, pushes_of(engine), "sgd")
    for name, parameter in parameters_of(engine).items():
        assert (parameter - expected.weights[name]).abs().max() < 1e-12


def test_the_staleness_of_equal_workers_is_the_number_of_others() -> None:
    """After the start, the N - 1 other workers each make an update between a pull and a push."""
    (pushes,) = pushes_of(trained(asp(num_workers=4), [20]))
    assert pushes.staleness == [0, 1, 2, 3] + [3] * 16
    assert histogram([pushes]) == {0: 1, 1: 1, 2: 1, 3: 17}


def test_a_worker_far_away_is_staler() -> None:
    """Two servers with two workers each: those beside the parameter server push more often."""
    levels = (Level("server", 2, 1e9, 0.0), Level("cluster", 2, 2000.0, 0.0))
    setup = asp(cluster=Cluster("two", "unit", None, levels), sizes=None, dataset=Blobs(num_train=400))
    (pushes,) = pushes_of(trained(setup, [80]))
    by_worker: dict[int, list[int]] = {}
    for minibatch, updates in zip(pushes.minibatches, pushes.staleness, strict=True):
        by_worker.setdefault(minibatch % 4, []).append(updates)
    near, far = ([sum(by_worker[w]) / 20 for w in workers] for workers in ((0, 1), (2, 3)))
    assert max(near) < min(far)


def test_a_run_repeated_has_the_same_order_and_another_order_can_be_given() -> None:
    first, second = (pushes_of(trained(asp(), [12, 9])) for _ in range(2))
    assert first == second
    reverse = {0: [3, 7, 11, 2, 6, 10, 1, 5, 9, 0, 4, 8]}  # the last worker first, with all of its minibatches
    setup = asp(push_order=reverse, make_optimizer=OPTIMIZERS["momentum"][0])
    engine = trained(setup, [12, 9])
    found = pushes_of(engine)
    assert found[0].minibatches == reverse[0]
    assert found[0].staleness == [0, 0, 0, 3, 0, 0, 6, 0, 0, 9, 0, 0]
    expected = replayed(setup, found, "momentum")
    for name, parameter in parameters_of(engine).items():
        assert (parameter - expected.weights[name]).abs().max() < 1e-13


@pytest.mark.parametrize("num_minibatches", [1, 3, 12])
def test_every_worker_but_the_server_s_sends_twice_the_weights_per_minibatch(num_minibatches: int) -> None:
    """Engine, prediction and formula; a worker without a minibatch pulls once, at the drain."""
    setup = asp(dataset=Blobs(num_train=48))
    engine = trained(setup, [num_minibatches])
    weights = sum(p.nbytes for p in engine.replicas[0].weights.newest.parameters)
    others = sum(k % 4 > 0 for k in range(num_minibatches))
    idle = sum(worker >= num_minibatches for worker in range(1, 4))
    expected = {("parameter-server", "server"): (2 * others + idle) * weights}
    assert {key: value for key, value in engine.num_bytes.items() if value} == {k: v for k, v in expected.items() if v}
    assert +engine.network.num_bytes == +engine.num_bytes
    if num_minibatches == 12:
        rows = unit_profile(setup.graph, setup.dataset, [4]).layers[4]
        foreseen = payload(rows, setup.plan, MODES["dp-asp"], 1, 1)
        assert 12 * foreseen["parameter-server"] == sum(expected.values())


def test_the_server_applies_one_at_a_time_and_its_port_carries_all() -> None:
    """On slow links, the pushes of three workers, 100 s each if alone, share the server's port, and so do pulls."""
    setup = asp(num_workers=4, sizes=None)
    weights = sum(bucket.num_bytes for bucket in setup.costs.stages[0].buckets)
    cluster = Cluster("slow", "unit", None, (Level("server", 4, weights / 100.0, 0.0),))
    ends: dict[tuple[Op, int, int], float] = {}
    stalls_s: dict[int, float] = {}

    def observe(event: TimelineEvent) -> None:
        if event.instruction.op in (Op.PUSH, Op.PULL):
            ends[event.instruction.op, event.instruction.number, event.worker] = event.end_s
        if event.instruction.op is Op.PULL:
            stalls_s[event.worker] = event.stall_s

    setup = asp(num_workers=4, cluster=cluster, dataset=Blobs(num_train=48))
    engine = make_engine(setup, observe)
    engine.train(0, 4)
    backward_s = 7 * 3.0
    arrivals = sorted(time_s for (op, *_), time_s in ends.items() if op is Op.PUSH)
    assert arrivals == pytest.approx([backward_s, *[backward_s + 300.0] * 3], abs=0.1)
    pulls = sorted(time_s for (op, *_), time_s in ends.items() if op is Op.PULL)
    assert pulls == pytest.approx([arrivals[-1], *[arrivals[-1] + 300.0] * 3], abs=0.1)
    # Both ways, in which the worker has nothing else to do; the first has the weights beside it.
    assert stalls_s == pytest.approx({0: 0.0, 1: 600.0, 2: 600.0, 3: 600.0}, abs=0.1)


def test_statistics_of_batch_norm_are_averaged_at_the_drain() -> None:
    data = Blobs(num_train=48, shape=(2, 8, 8), dtype=torch.float32)
    engine = trained(asp(ConvNet(), 3, dataset=data), [3])
    means = []
    for k in range(3):  # every replica has seen one minibatch, with the initial weights
        model = ConvNet()
        model(data.fetch("train", engine.setup.sampler.indices(k), ["x"])["x"])
        means.append(model.features[1].running_mean)
    expected = torch.stack(means).mean(0)  # type: ignore[arg-type]
    for replica in engine.replicas:
        torch.testing.assert_close(dict(replica.module.named_buffers())["features.1.running_mean"], expected)


def test_a_run_that_is_asked_to_stop_ends_at_a_drain_with_the_same_weights_everywhere() -> None:
    stop = StopRequest()
    setup = asp(dataset=Blobs(num_train=400))
    engine = VirtualEngine(
        setup, make_engine(setup).network, stop=stop,
        on_unit=lambda n, loss, s: setattr(stop, "reason", "interrupted") if s > 50 else None,
    )  # fmt: skip
    done = engine.train(0, 80)
    assert 4 <= done < 80
    assert done % 4 == 0
    (pushes,) = pushes_of(engine)
    assert sorted(pushes.minibatches) == list(range(done))
    stopped, planned = parameters_of(engine), parameters_of(trained(asp(dataset=Blobs(num_train=400)), [done]))
    assert all(torch.equal(stopped[name], planned[name]) for name in planned)


def test_the_log_goes_on_after_a_checkpoint() -> None:
    """Other state is tested with the other weight policies."""
    whole, first = trained(asp(), [12, 9]), trained(asp(), [12])
    again = restored(asp(), captured(first))
    facts = read(Facts, json.loads(json.dumps(first.facts())))
    again.restore(captured(first), facts, first.clock_s)
    again.train(12, 9)
    assert pushes_of(again) == pushes_of(whole)


def test_a_long_order_of_pushes_takes_little_in_a_checkpoint_and_early_ones_are_read() -> None:
    """Once every checkpoint held two numbers per minibatch of the run: 48 MB after 1.8 million."""
    turns = [3 * (k // 3) + (1, 0, 2)[k % 3] for k in range(30_000)]
    pushes = Pushes(12, turns, [max(0, k - 2) for k in range(30_000)])
    packed = PackedPushes.of(pushes)
    assert packed.unpacked() == pushes
    assert packed.packed is not None
    assert len(packed.packed) < 3000
    engine = trained(asp(), [12, 9])
    early = [
        {"first": each.first, "minibatches": each.minibatches, "versions": each.versions} for each in pushes_of(engine)
    ]
    again = trained(asp(), [12])
    server = again.extensions["asynchronous"]
    server.restore(early)
    assert unpacked(server.facts())[:2] == pushes_of(engine)
    with pytest.raises(CheckpointError, match=r"^progress.facts.pushes: packed pushes can't be read: "):
        server.restore([{"first": 0, "packed": packed.packed[:100]}])


def test_all_workers_evaluate_with_the_averages_of_the_server_s_optimizer() -> None:
    data = Blobs(num_train=46)
    setup = asp(make_optimizer=ASGD, dataset=data)
    engine = trained(setup, [12])
    averages = {name: kept["ax"] for name, kept in captured(engine).optimizer.items()}
    scores = engine.evaluate()
    assert scores["eval_loss"] == pytest.approx(held_out_loss(Mlp(), averages, data), rel=1e-12)
    assert scores["eval_loss"] != pytest.approx(held_out_loss(Mlp(), parameters_of(engine), data), rel=1e-4)
    assert engine.num_bytes == engine.network.num_bytes
    again = restored(setup, captured(engine))
    assert again.evaluate() == scores
    engine.train(12, 9)
    again.train(12, 9)
    assert again.evaluate() == engine.evaluate() != scores


def test_the_simulator_finds_its_steady_state() -> None:
    setup = asp(dataset=Blobs(num_train=4 * 400), minibatch_size=4)
    quick, whole = simulate_segment(setup, 400), simulate_all(setup, 400)
    assert quick.end_s == pytest.approx(whole.end_s, rel=1e-9)
    assert quick.num_bytes == whole.num_bytes
    assert quick.busy_s == pytest.approx(whole.busy_s)


def test_lists_are_static_and_printed() -> None:
    lists = [render(program) for program in programs(asp(num_workers=2).pipeline, 3)]
    assert lists == ["0L0 0F0 0B0 0PUSH0 0PULL2 0L2 0F2 0B2 0PUSH2 0PULL2@3", "0L1 0F1 0B1 0PUSH1 0PULL2@3"]


def test_the_log_can_be_read_again(tmp_path: Path) -> None:
    segments = [Pushes(0, [1, 0, 3, 2], [0, 0, 1, 2]), Pushes(4, [0], [0])]
    path = tmp_path / "push-order.json"
    path.write_text(to_text(segments))
    assert load_push_order(str(path), 2) == segments


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            to_text([Pushes(0, [0, 2], [0, 0])]),
            r"segments\[0\].minibatches: got 2 minibatches, allowed is every one from",
        ),
        (
            to_text([Pushes(0, [2, 1, 0], [0, 0, 0])]),
            "got minibatch 0 after 2, and worker 0 of 2 runs them in ascending",
        ),
        ('{"pipebench_push_order": 2, "segments": []}', "pipebench_push_order: got 2, allowed is 1"),
        ('{"pipebench_plan": 1}', "push-order.json"),
        ("[", "push-order.json"),
    ],
)
def test_a_file_without_a_valid_order_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "push-order.json"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        load_push_order(str(path), 2)


def test_a_recipe_repeats_an_order(tmp_path: Path) -> None:
    reverse = [Pushes(0, [3, 7, 2, 6, 1, 5, 0, 4], [0] * 8)]
    path = tmp_path / "push-order.json"
    path.write_text(to_text(reverse))
    changes = [f"parallelism.push_order={path}", "model.width=0.0625", "train.evaluate_every={minibatches: 8}"]
    recipe = load("modes/dp-asp", changes).recipe
    setup = prepare(recipe, load_cluster(recipe.cluster.name, recipe.cluster.servers)).setup
    engine = make_engine(setup)
    engine.train(0, 8)
    assert pushes_of(engine)[0].minibatches == reverse[0].minibatches
    with pytest.raises(RecipeError, match=r"push_order: got .* with engine simulated, in which pushes are applied as"):
        load("modes/dp-asp", [*changes, "engine.kind=simulated"])


def test_a_segment_longer_than_the_given_order_continues_in_the_order_of_arrival() -> None:
    setup = asp(push_order={0: [1, 0, 3, 2]})
    (pushes,) = pushes_of(trained(setup, [12]))
    assert pushes.minibatches[:4] == [1, 0, 3, 2]
    assert sorted(pushes.minibatches) == list(range(12))


def test_one_worker_is_single() -> None:
    """There are no other updates, so no gradient is stale."""
    engine = trained(asp(num_workers=1), [12])
    alone = make_engine(make_setup(Mlp(), ([], [1]), weights="one", depth=1, dataset=Blobs(num_train=46)))
    alone.train(0, 12)
    assert all(torch.equal(p, parameters_of(alone)[name]) for name, p in parameters_of(engine).items())
    assert Counter(updates for each in pushes_of(engine) for updates in each.staleness) == {0: 12}
