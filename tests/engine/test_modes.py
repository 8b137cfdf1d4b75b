"""Every mode without staleness equals sequential training; random layers, BatchNorm, bytes."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from pipebench.engine.virtual import VirtualEngine
from pipebench.model.graph import trace
from pipebench.model.optimizer import MakeOptimizer
from pipebench.model.sampling import Sampler
from pipebench.schedule.operations import ACTIVATION, GRADIENT
from pipebench.schedule.syncs import ALL_REDUCE
from pipebench.simulate.timeline import BUFFERS
from tests.models import ConvNet, HalfFrozen, RandomNet, SkipNet
from tests.oracles import sequential
from tests.support import Blobs, Mlp, make_engine, make_setup, momentum, parameters_of


def images(num_train: int = 46) -> Blobs:
    """Return image data in single precision."""
    return Blobs(num_train=num_train, shape=(2, 8, 8), dtype=torch.float32)


def sequentially(
    model: nn.Module,
    dataset: Blobs,
    groups: list[range],
    size: int,
    make: MakeOptimizer,
    clip_norm: float | None = None,
) -> dict[str, torch.Tensor]:
    """Train on groups of minibatches, one update each."""
    sampler = Sampler(dataset.num_train, size, 0)

    def minibatch(k: int) -> Any:
        fields = dataset.fetch("train", sampler.indices(k), ["x", "label"])
        return (fields["x"],), fields["label"]

    model = copy.deepcopy(model)
    updates = [[minibatch(k) for k in group] for group in groups]
    sequential.train(
        model,
        make(list(model.parameters())),
        updates,
        lambda output, target: functional.cross_entropy(output, target, reduction="sum"),
        lambda target: float(len(target)),
        clip_norm,
    )
    return {name: p.detach() for name, p in model.named_parameters()}


def momentum_fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, 0.9, weight_decay=0.01, fused=True)


@pytest.mark.parametrize("starts", [[], [4], [2, 5, 8]], ids=["single", "model-2", "model-4"])
@pytest.mark.parametrize("make", [momentum, momentum_fused])
def test_single_and_model_are_bit_identical_to_a_plain_loop(starts: list[int], make: MakeOptimizer) -> None:
    """Float32, BatchNorm, in-place layers, a short last minibatch, two epochs."""
    dataset, model = images(), ConvNet()
    replicas = [1] * (len(starts) + 1)
    setup = make_setup(
        model, (starts, replicas), weights="one", depth=1, dataset=dataset, make_optimizer=make, minibatch_size=4
    )
    engine = make_engine(setup)
    engine.train(0, 24)
    expected = sequentially(model, dataset, [range(k, k + 1) for k in range(24)], 4, make)
    for name, parameter in parameters_of(engine).items():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("plan", "columns"),
    [
        (([], [4]), {"depth": 1}),
        (([], [3]), {"depth": 1, "accumulate": 2}),
        (([], [1]), {"depth": 1, "accumulate": 3}),
        (([3, 5], [1, 1, 1]), {"depth": 1, "accumulate": 3}),
        (([3, 5], [2, 1, 1]), {"depth": 1}),
        (([3, 8], [2, 3, 1]), {"depth": 1}),
        (([3, 5], [1, 1, 1]), {"order": "all-forwards", "microbatches": 3}),
        (([3, 5], [1, 1, 1]), {"order": "all-forwards", "microbatches": 3, "recompute": True}),
        (([3, 5], [1, 1, 1]), {"order": "all-forwards", "accumulate": 4}),
        (([3, 5], [2, 1, 1]), {"order": "all-forwards", "microbatches": 2}),
        (([3, 5], [1, 1, 1]), {"microbatches": 4}),
        (([3, 5], [1, 1, 1]), {"microbatches": 4, "recompute": True}),
        (([3], [3, 1]), {"microbatches": 2}),
        (([3], [2, 3]), {"microbatches": 3, "accumulate": 2}),
        (([3, 5, 8], [3, 1, 1, 1]), {"microbatches": 4}),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_flushing_modes_equal_sequential_training(plan: tuple[list[int], list[int]], columns: dict[str, Any]) -> None:
    """Also with a short last minibatch (2 of 4 samples) and a short last group."""
    dataset, model, num_minibatches = Blobs(num_train=46), SkipNet(), 12
    setup = make_setup(model, plan, weights="one", dataset=dataset, make_optimizer=momentum_fused, **columns)
    engine = make_engine(setup)
    engine.train(0, num_minibatches)
    group = setup.pipeline.round_size(0)
    assert group == math.lcm(*plan[1]) * columns.get("accumulate", 1)
    groups = [range(a, min(a + group, num_minibatches)) for a in range(0, num_minibatches, group)]
    expected = sequentially(model, dataset, groups, 4, momentum)
    for name, parameter in parameters_of(engine).items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("plan", [([], [1]), ([], [3]), ([3, 5], [1, 1, 1]), ([3, 5], [2, 1, 3])], ids=str)
def test_global_norm_clipping_is_exact_with_a_flush(plan: tuple[list[int], list[int]]) -> None:
    dataset, model = Blobs(num_train=46), SkipNet()
    setup = make_setup(
        model, plan, weights="one", dataset=dataset, make_optimizer=momentum_fused, microbatches=2, clip_norm=0.3
    )
    engine = make_engine(setup)
    engine.train(0, 12)
    group = setup.pipeline.round_size(0)
    groups = [range(a, min(a + group, 12)) for a in range(0, 12, group)]
    expected = sequentially(model, dataset, groups, 4, momentum, clip_norm=0.3)
    unclipped = sequentially(model, dataset, groups, 4, momentum)
    for name, parameter in parameters_of(engine).items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-6, atol=1e-7)  # the norm travels as float32
    assert any((expected[name] - unclipped[name]).abs().max() > 1e-3 for name in expected)
    assert engine.num_bytes == engine.network.num_bytes


def test_clipping_without_a_flush_uses_the_stage_s_own_norm() -> None:
    """The first update of the last stage, clipped to a hundredth, is a hundredth of a unit long."""
    setup = make_setup(SkipNet(), ([9], [1, 1]), clip_norm=0.01, lr=lambda s, b, o: 1.0)
    engine = make_engine(setup)
    before = engine.replicas[1].weights.newest.flats[0].clone()
    engine.train(0, 1)
    moved = (engine.replicas[1].weights.newest.flats[0] - before).norm().item()
    assert moved == pytest.approx(0.01, rel=1e-3)


def test_the_reported_loss_is_on_one_scale() -> None:
    totals = []
    for plan, columns in [
        (([], [1]), {"depth": 1, "weights": "one"}),
        (([3], [1, 1]), {"order": "all-forwards", "microbatches": 2, "weights": "one"}),
        (([3], [2, 1]), {"weights": "stash"}),
    ]:
        seen: list[float] = []
        setup = make_setup(SkipNet(), plan, dataset=Blobs(num_train=46), lr=lambda s, b, o: 0.0, **columns)  # type: ignore[arg-type]
        engine = VirtualEngine(
            setup,
            make_engine(setup).network,
            on_loss=lambda loss, n, w, t, seen=seen: seen.append(float(loss)),  # type: ignore[misc]
        )
        engine.train(0, 12)
        totals.append(sum(seen))
    assert totals[1] == pytest.approx(totals[0], rel=1e-12)
    assert totals[2] == pytest.approx(totals[0], rel=1e-12)


def test_no_cut_and_no_mode_changes_what_random_layers_draw() -> None:
    """Dropout on: model parallelism over three cuts has the bits of a single worker."""
    found = []
    for starts in ([], [3], [2, 7, 9]):
        setup = make_setup(
            ConvNet(dropout=0.5), (starts, [1] * (len(starts) + 1)), weights="one", depth=1, dataset=images()
        )
        engine = make_engine(setup)
        engine.train(0, 12)
        found.append(parameters_of(engine))
    for name, parameter in found[0].items():
        assert torch.equal(parameter, found[1][name])
        assert torch.equal(parameter, found[2][name])


@pytest.mark.parametrize("weights", ["one", "stash"])
def test_recomputation_changes_nothing(weights: str) -> None:
    """Dropout masks and BatchNorm statistics included; whole stages or any of their layers."""
    results = []
    for recompute in (False, True, {1, 2, 6, 9}, {0, 3, 4, 7, 8}):
        setup = make_setup(
            ConvNet(dropout=0.5), ([4, 8], [1, 1, 1]), weights=weights, dataset=images(), recompute=recompute
        )
        engine = make_engine(setup)
        engine.train(0, 12)
        buffers = {n: b.clone() for r in engine.replicas for n, b in r.module.named_buffers()}
        results.append((parameters_of(engine) | buffers, max(engine.peak_bytes)))
    (kept, most_bytes), *others = results
    assert kept["features.1.num_batches_tracked"] == 12
    for again, _ in others:
        assert all(torch.equal(value, again[name]) for name, value in kept.items())
    # A peak holds what one backward computes again: with one minibatch in flight, or of layers whose inputs are kept
    # anyway, recomputation frees nothing.
    assert others[0][1] < most_bytes if weights == "stash" else others[0][1] == most_bytes


def test_the_same_seed_gives_the_same_bits_and_another_does_not() -> None:
    def flat(seed: int) -> torch.Tensor:
        setup = make_setup(ConvNet(dropout=0.5), ([4], [2, 1]), dataset=images(), seed=seed)
        engine = make_engine(setup)
        engine.train(0, 12)
        return engine.replicas[0].weights.newest.flats[0]

    assert torch.equal(flat(1), flat(1))
    assert not torch.equal(flat(1), flat(2))


def test_running_statistics_are_averaged_over_replicas_at_the_drain() -> None:
    """Each replica has its own while it trains, and the mean of all of them after a drain."""
    setup = make_setup(ConvNet(), ([], [3]), weights="one", depth=1, dataset=images(48), minibatch_size=4)
    ends: list[float] = []
    engine = make_engine(setup, lambda event: ends.append(event.end_s))
    engine.train(0, 3)
    means = []
    for k in range(3):  # every replica saw one minibatch: its statistics after one forward of the initial model
        model = ConvNet()
        model(images(48).fetch("train", setup.sampler.indices(k), ["x"])["x"])
        means.append(model.features[1].running_mean)
    expected = torch.stack(means).mean(0)  # type: ignore[arg-type]
    for replica in engine.replicas:
        torch.testing.assert_close(dict(replica.module.named_buffers())["features.1.running_mean"], expected)
    num_bytes = engine.setup.costs.stages[0].buffer_bytes
    assert num_bytes == 2 * (6 + 5) * 4
    assert sum(v for (kind, _), v in engine.num_bytes.items() if kind == BUFFERS) == 2 * (3 - 1) * num_bytes
    (level,) = engine.setup.cluster.levels  # a ring: 2 (r - 1) steps, in each of which everyone sends a share
    took_s = 2 * (3 - 1) * (num_bytes / 3 / level.bandwidth_bytes_per_s + level.latency_s)
    assert engine.clock_s - max(ends) == pytest.approx(took_s)


def test_unchanged_buffers_are_neither_sent_nor_averaged_at_a_drain() -> None:
    """The mean of three equal numbers may be another number."""
    setup = make_setup(HalfFrozen(), ([], [3]), weights="one", depth=1, dataset=images(48), minibatch_size=4)
    engine = make_engine(setup)
    for first in (0, 3):
        engine.train(first, 3)
    assert engine.setup.costs.stages[0].buffer_bytes == 2 * 6 * 4
    assert engine.num_bytes == engine.network.num_bytes
    before = dict(HalfFrozen().named_buffers())
    assert any(
        not torch.equal((b + b + b) / 3, b) for n, b in before.items() if n in ("offset", "features.5.running_mean")
    )
    for replica in engine.replicas:
        found = dict(replica.module.named_buffers())
        changed = {name for name, buffer in before.items() if not torch.equal(found[name], buffer)}
        assert changed == {f"features.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}


def test_evaluation_reads_every_sample_once_and_changes_no_state() -> None:
    setup = make_setup(ConvNet(), ([4], [2, 1]), dataset=images())
    engine = make_engine(setup)
    engine.train(0, 12)
    before = [(r.weights.newest.flats[0].clone(), [b.clone() for b in r.module.buffers()]) for r in engine.replicas]
    scores, counts = engine.evaluate(), dict(engine.num_bytes)
    model = ConvNet()
    state = parameters_of(engine) | {n: b for r in engine.replicas for n, b in r.module.named_buffers()}
    model.load_state_dict(state)
    model.eval()
    fields = images().fetch("eval", range(10), ["x", "label"])
    output = model(fields["x"])
    assert scores["top1"] == (output.argmax(1) == fields["label"]).double().mean().item()
    assert scores["eval_loss"] == pytest.approx(functional.cross_entropy(output, fields["label"]).item(), rel=1e-6)
    for replica, (flat, buffers) in zip(engine.replicas, before, strict=True):
        assert torch.equal(replica.weights.newest.flats[0], flat)
        assert all(torch.equal(a, b) for a, b in zip(replica.module.buffers(), buffers, strict=True))
        assert replica.module.training
    assert counts["evaluation", "server"] > 0


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(1, 13),
    st.booleans(),
    st.integers(1, 3),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_bytes_and_versions(
    replicas: list[int], num_minibatches: int, flushes: bool, microbatches: int, depth: int, random: Any
) -> None:
    """Engine, prediction and closed formula agree; versions stay within bounds."""
    graph_size = 14
    starts = sorted(random.sample(range(1, graph_size), len(replicas) - 1))
    dataset = Blobs(num_train=46)
    setup = make_setup(
        SkipNet(), (starts, replicas), weights="one" if flushes else "stash", dataset=dataset, depth=depth,
        microbatches=microbatches if flushes else 1,
    )  # fmt: skip
    engine = make_engine(setup)
    engine.train(0, num_minibatches)
    assert engine.num_bytes == engine.network.num_bytes
    kinds = dict.fromkeys((ACTIVATION, GRADIENT, ALL_REDUCE), 0)
    for (kind, _), num_bytes in engine.num_bytes.items():
        kinds[kind] += num_bytes
    parameter_bytes = [sum(b.num_bytes for b in stage.buckets) for stage in setup.costs.stages]
    rounds = [math.ceil(num_minibatches / setup.pipeline.round_size(s)) for s in range(len(replicas))]
    assert kinds[ALL_REDUCE] == sum(
        2 * (r - 1) * w * n for r, w, n in zip(replicas, parameter_bytes, rounds, strict=True)
    )
    rows = {len(setup.sampler.indices(k)) for k in range(num_minibatches)}
    if rows == {4} and not flushes:
        edges = setup.costs.activation_bytes
        assert kinds[ACTIVATION] == num_minibatches * sum(size[4] for size in edges.values())
        gradients = setup.costs.gradient_bytes
        assert kinds[GRADIENT] == num_minibatches * sum(size[4] for size in gradients.values())
    for replica in engine.replicas:
        assert replica.weights.most_alive <= (1 if flushes else setup.pipeline.warmups[replica.stage.index])


@st.composite
def random_pipelines(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[int]]:
    size = draw(st.integers(2, 6))
    reads = [draw(st.lists(st.integers(0, i), min_size=1, max_size=3)) for i in range(size)]
    num_layers = len(trace(RandomNet(reads)).layers)
    num_stages = draw(st.integers(1, min(4, num_layers)))
    points = st.integers(1, num_layers - 1)
    starts = sorted(draw(st.sets(points, min_size=num_stages - 1, max_size=num_stages - 1)))
    return reads, starts, draw(st.lists(st.integers(1, 3), min_size=num_stages, max_size=num_stages))


@settings(deadline=None, max_examples=10)
@given(random_pipelines(), st.integers(1, 9), st.integers(1, 3), st.one_of(st.booleans(), st.sets(st.integers(0, 20))))
def test_random_graphs_cuts_and_replicas_equal_sequential_training(
    drawn: tuple[list[list[int]], list[int], list[int]],
    num_minibatches: int,
    microbatches: int,
    recompute: bool | set[int],
) -> None:
    """Whatever the graph and the cut, a flushing pipeline computes what one worker does, and bytes are predicted."""
    reads, starts, replicas = drawn
    dataset, model = Blobs(num_train=34), RandomNet(reads)
    setup = make_setup(
        model, (starts, replicas), weights="one", dataset=dataset, make_optimizer=momentum_fused,
        microbatches=microbatches, recompute=recompute,
    )  # fmt: skip
    engine = make_engine(setup)
    engine.train(0, num_minibatches)
    group = setup.pipeline.block
    groups = [range(a, min(a + group, num_minibatches)) for a in range(0, num_minibatches, group)]
    expected = sequentially(model, dataset, groups, 4, momentum)
    for name, parameter in parameters_of(engine).items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-10, atol=1e-11)
    assert engine.num_bytes == engine.network.num_bytes


def test_bytes_of_an_mlp_by_hand() -> None:
    """Widths 6, 7, 8, 5, 4 in float64; cut 2-1 after the second Tanh: 8 numbers a sample each way."""
    setup = make_setup(Mlp(), ([4], [2, 1]))
    engine = make_engine(setup)
    engine.train(0, 12)
    weights = (6 * 7 + 7) + (7 * 8 + 8)
    assert dict(engine.num_bytes) == {
        (ACTIVATION, "server"): 48 * 8 * 8,
        (GRADIENT, "server"): 48 * 8 * 8,
        (ALL_REDUCE, "server"): 6 * 2 * weights * 8,
    }


def test_gpipe_with_recomputation_holds_less() -> None:
    peaks = []
    for recompute in (False, {1, 2, 3}, True):
        setup = make_setup(
            ConvNet(norm=False), ([], [1]), weights="one", order="all-forwards", microbatches=4, dataset=images(),
            recompute=recompute, minibatch_size=8,
        )  # fmt: skip
        engine = make_engine(setup)
        engine.train(0, 2)
        peaks.append(engine.peak_bytes[0])
    assert peaks[2] < 0.6 * peaks[0]
    assert peaks[2] <= peaks[1] < peaks[0]
