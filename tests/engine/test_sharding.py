"""Sharded replicas: weights, bytes and memory of ZeRO-1, -2 and -3."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional

from pipebench.checkpoint.state import CheckpointError, ModelState
from pipebench.engine.shards import divided
from pipebench.engine.virtual import VirtualEngine
from pipebench.model.large_batch import LAMB, LARS
from pipebench.recipe.schema import LossScaleRecipe
from pipebench.simulate.kinds import MASTERS, STATE, WEIGHTS
from pipebench.simulate.memory import stage_memories
from pipebench.simulate.memory_meter import MemoryMeter
from pipebench.simulate.meter import Meter
from pipebench.simulate.steady import simulate_all
from tests.models import TiedEnds
from tests.oracles import sharding
from tests.support import Blobs, make_engine, make_setup

SHARDS = ("optimizer", "gradients", "parameters")
PUBLISHED = Path(__file__).parents[2] / "reports" / "published" / "sharding.yaml"
Optimizers = Callable[[Any], torch.optim.Optimizer]


class Wide(nn.Module):
    """Four linear layers, the largest of which is cut by shards."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.default_generator.manual_seed(5)
        self.a, self.b = nn.Linear(6, 300), nn.Linear(300, 200)
        self.c, self.d = nn.Linear(200, 70), nn.Linear(70, 4)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, 6] to [samples, 4]."""
        hidden = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.d(torch.tanh(self.c(hidden)))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01, fused=True)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01, momentum=0.9, weight_decay=0.01, fused=True)


def engine_of(shard: str, replicas: int, *, model: nn.Module | None = None, **given: Any) -> VirtualEngine:
    """Return an engine of data parallelism; sharded, in three groups of layers."""
    columns: dict[str, Any] = {
        "weights": "one",
        "depth": 1,
        "sums": "ordered",
        "dataset": Blobs(56),
        "lr": lambda *_: 0.01,
    }
    columns |= given
    if shard == "none":
        return make_engine(make_setup(model or Wide(), ([], [replicas]), **columns))
    columns |= {"shard": shard, "order": "sequential", "chunks": 3}
    return make_engine(make_setup(model or Wide(), ([2, 4], [replicas] * 3), **columns))


def state_of(engine: VirtualEngine) -> ModelState:
    return ModelState.joined(ModelState.from_plain(state.to_plain()) for _, state in engine.parts())


def assert_equal(found: ModelState, expected: ModelState) -> None:
    assert found.parameters.keys() == expected.parameters.keys()
    for name, parameter in expected.parameters.items():
        assert torch.equal(found.parameters[name], parameter), name
    assert found.optimizer.keys() == expected.optimizer.keys()
    for name, kept in expected.optimizer.items():
        assert kept.keys() == found.optimizer[name].keys()
        for key, value in kept.items():
            assert torch.equal(torch.as_tensor(found.optimizer[name][key]), torch.as_tensor(value)), (name, key)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize(("replicas", "make_optimizer"), [(2, adamw), (3, momentum), (4, adamw)])
def test_weights_are_those_of_a_plain_loop_to_the_bit(shard: str, replicas: int, make_optimizer: Optimizers) -> None:
    """Replicas are added in their order; two updates of whole rounds, and minibatches accumulated."""
    engine = engine_of(shard, replicas, make_optimizer=make_optimizer, accumulate=2)
    engine.train(0, 4 * replicas)
    setup, updates = engine.setup, []
    for start in (0, 2 * replicas):
        own: list[list[sharding.Batch]] = []
        for replica in range(replicas):
            rows = [setup.sampler.indices(start + k * replicas + replica) for k in range(2)]
            fetched = [setup.dataset.fetch("train", each, ["x", "label"]) for each in rows]
            own.append([(each["x"], each["label"]) for each in fetched])
        updates.append(own)
    expected = sharding.trained(
        Wide(), make_optimizer, lambda o, t: functional.cross_entropy(o, t, reduction="sum"), updates
    )
    found = state_of(engine).parameters
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_shards_change_no_bit_of_data_parallelism(replicas: int, reshards: bool) -> None:
    """Thirteen minibatches: the last round lacks units of some replicas, which take part in gathers all the same."""
    plain = engine_of("none", replicas, make_optimizer=adamw)
    plain.train(0, 13)
    for shard in SHARDS:
        engine = engine_of(shard, replicas, make_optimizer=adamw, reshards=reshards)
        engine.train(0, 13)
        assert_equal(state_of(engine), state_of(plain))
        assert engine.evaluate() == plain.evaluate()
        assert engine.num_bytes == engine.network.num_bytes


class TiedInside(TiedEnds):
    """The first layer is in a module: a stage knows its weight by the last layer's name."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.Sequential(self.words)
        del self.words

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        hidden = self.norm(torch.tanh(self.one(torch.tanh(self.ends(x)))))
        return self.classifier(torch.tanh(self.three(torch.tanh(self.two(hidden)))))


@pytest.mark.parametrize("shard", SHARDS)
def test_tied_weights_are_sharded_under_any_of_their_names(shard: str) -> None:
    """0.2.0 looked for the weight's first name in the model: the Transformer with one embedding failed."""
    plain = engine_of("none", 3, model=TiedInside(), make_optimizer=adamw)
    columns: dict[str, Any] = {"weights": "one", "depth": 1, "sums": "ordered", "order": "sequential", "chunks": 1}
    engine = make_engine(
        make_setup(
            TiedInside(), ([], [3]), shard=shard, make_optimizer=adamw, dataset=Blobs(56), lr=lambda *_: 0.01, **columns
        )
    )
    for each in (plain, engine):
        each.train(0, 13)
    assert_equal(state_of(engine), state_of(plain))


@pytest.mark.parametrize("shard", SHARDS)
def test_the_order_of_a_ring_is_kept(shard: str) -> None:
    plain, engine = (engine_of(each, 4, sums="ring", make_optimizer=adamw) for each in ("none", shard))
    for each in (plain, engine):
        each.train(0, 12)
    assert engine.num_bytes == engine.network.num_bytes
    for name, value in state_of(plain).parameters.items():
        torch.testing.assert_close(state_of(engine).parameters[name], value, rtol=1e-12, atol=1e-13)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "given",
    [
        {"clip_norm": 0.05},
        {"precision": "bf16"},
        {"precision": "bf16", "clip_norm": 0.05, "accumulate": 2},
        {"precision": "fp16", "loss_scale": LossScaleRecipe(initial=2.0**40), "clip_norm": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize("replicas", [2, 3])
def test_clipping_precision_and_scaling_are_those_of_data_parallelism(replicas: int, given: dict[str, Any]) -> None:
    """In fp32 the norm over shards has the same bits but for one in 1e8; the scale overflows at first, everywhere."""
    engines, data = [], Blobs(56, dtype=torch.float32)
    for shard in ("none", *SHARDS):
        engine = engine_of(shard, replicas, model=Wide(torch.float32), dataset=data, make_optimizer=adamw, **given)
        engine.train(0, 12)
        engines.append(engine)
    for engine in engines[1:]:
        assert_equal(state_of(engine), state_of(engines[0]))
        if "loss_scale" in given:
            scales = {scale for worker in engine.workers for scale in worker.loss_scales}
            assert scales == {*engines[0].workers[0].loss_scales}
            assert all(skipped > 0 for _, skipped in scales)


@pytest.mark.parametrize("make_optimizer", [LAMB, LARS, torch.optim.Adafactor], ids=lambda kind: kind.__name__)
def test_optimizers_of_whole_tensors_get_them_whole(make_optimizer: Any) -> None:
    plain, *others = (
        engine_of(shard, 3, make_optimizer=lambda p: make_optimizer(p, lr=0.01), steps_on_whole=True)
        for shard in ("none", *SHARDS)
    )
    for each in (plain, *others):
        each.train(0, 12)
    for each in others:
        assert_equal(state_of(each), state_of(plain))


@pytest.mark.parametrize(
    ("before", "after"), [("optimizer", "none"), ("none", "parameters"), ("parameters", "optimizer")]
)
def test_any_mode_resumes_another_s_checkpoint(before: str, after: str) -> None:
    first, second = engine_of(before, 3, make_optimizer=adamw), engine_of(after, 2, make_optimizer=adamw)
    reference, then = engine_of("none", 3, make_optimizer=adamw), engine_of("none", 2, make_optimizer=adamw)
    for each in (first, reference):
        each.train(0, 6)
    second.restore(state_of(first), None, 0.0)
    then.restore(state_of(reference), None, 0.0)
    for each in (second, then):
        each.train(6, 8)
    assert_equal(state_of(second), state_of(then))


def test_a_missing_part_of_a_parameter_is_found() -> None:
    engine = engine_of("gradients", 3)
    engine.train(0, 3)
    parts = [state for name, state in engine.parts() if "replica-1" not in name]
    with pytest.raises(CheckpointError, match="expected of all replicas are "):
        ModelState.joined(parts)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_bytes_equal_the_paper_s(shard: str, replicas: int) -> None:
    engine = engine_of(shard, replicas, dataset=Blobs(4 * 3 * replicas))
    engine.train(0, 3 * replicas)
    weights = sum(bucket.num_bytes for stage in engine.setup.costs.stages for bucket in stage.buckets)
    assert sum(engine.num_bytes.values()) == 3 * sharding.sent_bytes(shard, weights, replicas)
    assert {kind for kind, _ in engine.num_bytes} == {"reduce-scatter", "all-gather"}
    assert sum(n for (kind, _), n in engine.num_bytes.items() if kind == "reduce-scatter") == 3 * weights * (
        replicas - 1
    )


def test_parameters_that_stay_after_the_forward_are_gathered_once() -> None:
    engine = engine_of("parameters", 4, reshards=False, dataset=Blobs(48))
    engine.train(0, 12)
    weights = sum(bucket.num_bytes for stage in engine.setup.costs.stages for bucket in stage.buckets)
    assert sum(engine.num_bytes.values()) == 3 * sharding.sent_bytes("optimizer", weights, 4)


class _Deep(nn.Module):
    """Enough parameters that borders of shards don't count, in equal layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(5)
        self.body = nn.Sequential(nn.Linear(6, 256), *(nn.Linear(256, 256) for _ in range(10)), nn.Linear(256, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [samples, 6] to [samples, 4]."""
        return self.body(x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("shard", "row"), [("optimizer", "zero1"), ("gradients", "zero2"), ("parameters", "zero3")])
@pytest.mark.parametrize("replicas", [2, 8])
def test_memory_equals_the_paper_s(shard: str, row: str, replicas: int) -> None:
    """Mixed precision and Adam, K = 12: replicas, and the simulator's account, while an update is made."""
    formula = yaml.safe_load(PUBLISHED.read_text())["zero"]["formula"][row]
    starts = list(range(2, 12, 2))
    setup = make_setup(
        _Deep(), (starts, [replicas] * 6), weights="one", depth=1, sums="ordered", shard=shard, order="sequential",
        chunks=6, dataset=Blobs(8 * replicas, dtype=torch.float32), make_optimizer=adamw, precision="bf16",
    )  # fmt: skip
    engine = make_engine(setup)
    engine.train(0, 2 * replicas)
    live = [replica.live_by_kind() for replica in engine.workers[0].replicas.values()]
    parameters = sum(p.numel() for p in _Deep().parameters())
    gradients = 2 * parameters / (1 if shard == "optimizer" else replicas)  # gone, after an update
    expected = sharding.state_bytes(formula, parameters, replicas)
    assert sum(each.weights + each.stepped for each in live) + gradients == pytest.approx(expected, rel=0.02)
    predicted = stage_memories(setup.profile, setup.plan, setup.pipeline)
    meter = MemoryMeter(setup.pipeline, [replace(each, state=2 * each.masters) for each in predicted], setup.costs)
    simulate_all(setup, 2 * replicas, Meter(setup.pipeline, meter))
    by_kind = meter.timeline().peaks[0].by_kind
    states = by_kind[WEIGHTS] + by_kind[MASTERS] + by_kind[STATE]
    assert states + gradients == pytest.approx(expected, rel=0.02)


def test_a_border_of_shards_is_at_a_row_or_between_parameters() -> None:
    runs = divided([1, 0], [1000, 3000], 3, whole=False)
    assert [[(p.place, p.start, p.stop) for p in run] for run in runs] == [
        [(1, 0, 1536)], [(1, 1536, 2560)], [(1, 2560, 3000), (0, 0, 1000)],
    ]  # fmt: skip
    whole = divided([1, 0], [1000, 3000], 3, whole=True)
    assert sorted((p.place, p.start, p.stop) for run in whole for p in run) == [(0, 0, 1000), (1, 0, 3000)]


PIPELINES: dict[str, tuple[tuple[list[int], list[int]], dict[str, Any]]] = {
    "1f1b": (([4], [3, 2]), {"weights": "one", "microbatches": 2}),
    "gpipe": (([4], [2, 2]), {"weights": "one", "order": "all-forwards", "microbatches": 2, "clip_norm": 0.05}),
    "interleaved": (
        ([2, 4, 5], [2] * 4), {"weights": "one", "order": "interleaved", "chunks": 2, "microbatches": 4},
    ),
    "zero-bubble": (
        ([4], [1, 3]), {"weights": "one", "order": "zero-bubble", "backward": "split", "microbatches": 4},
    ),
    "hybrid": (([4], [3, 1]), {"weights": "one", "depth": 1}),
    "pipedream": (([2, 4], [1, 3, 1]), {"weights": "stash", "precision": "bf16"}),
    "vertical sync": (([4], [2, 2]), {"weights": "stash-vertical-sync"}),
    "2bw": (([4], [2, 2]), {"weights": "double-buffer", "accumulate": 2}),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PIPELINES)
def test_replicas_of_a_pipeline_s_stage_share_the_optimizer(name: str) -> None:
    """The weights of unsharded ones, to the bit; versions in use stay what they were."""
    plan, columns = PIPELINES[name]
    engines = [
        make_engine(
            make_setup(
                Wide(), plan, sums="ordered", shard=shard, make_optimizer=adamw, lr=lambda *_: 0.01,
                dataset=Blobs(56), **columns,
            )
        )
        for shard in ("none", "optimizer")
    ]  # fmt: skip
    for engine in engines:
        engine.train(0, 13)
    plain, sharded = engines
    assert sharded.num_bytes == sharded.network.num_bytes
    if "clip_norm" not in columns:
        assert_equal(state_of(sharded), state_of(plain))
    for name, value in state_of(plain).parameters.items():
        torch.testing.assert_close(state_of(sharded).parameters[name], value, rtol=1e-12, atol=1e-13)
    assert sum(r.weights.state_bytes for r in sharded.replicas) < sum(r.weights.state_bytes for r in plain.replicas)
