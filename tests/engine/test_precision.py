"""Mixed precision: arithmetic, versions and links in 16 bits beside fp32 masters, against plain torch."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from pipebench.engine.virtual import VirtualEngine
from pipebench.model.graph import trace
from pipebench.model.precision import LOW_TYPES, in_precision, lower
from pipebench.schedule.operations import Op
from pipebench.simulate.simulation import TimelineEvent
from pipebench.simulate.timeline import TRAINING_KINDS
from tests.checkpoint.support import captured, restored
from tests.evaluations import MODES, mode_setup, trained
from tests.models import ConvNet, MixedTypes, Tied
from tests.oracles import sequential, staleness
from tests.oracles.mixed_precision import Mixed
from tests.support import Blobs, Mlp, make_engine, make_setup

LR = 0.125  # a power of two: however a step multiplies and adds, it rounds once
NORMS = ("features.1.weight", "features.1.bias", "features.5.weight", "features.5.bias")


def images() -> Blobs:
    """Return image data in single precision."""
    return Blobs(shape=(2, 8, 8), dtype=torch.float32)


def blobs() -> Blobs:
    return Blobs(dtype=torch.float32)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, LR)


def constant(stage: int, before: int, own: int) -> float:
    return LR


def masters_of(engine: VirtualEngine) -> dict[str, torch.Tensor]:
    """Return the optimizers' master weights by the model's names, checking that replicas agree."""
    found: dict[str, torch.Tensor] = {}
    for replica in engine.replicas:
        for name, value in replica.weights.trained().items():
            assert torch.equal(found.setdefault(name, value), value), f"replicas disagree on {name}"
    return {name: value.detach().clone() for name, value in found.items()}


def in_a_loop(model: nn.Module, setup: Any, groups: Sequence[range], low_type: torch.dtype, kept: Any) -> Mixed:
    """Train a model in plain torch: every group of minibatches is one update."""
    mixed = Mixed(copy.deepcopy(model), low_type, kept)

    def minibatch(k: int) -> Any:
        fields = setup.dataset.exact.fetch("train", setup.sampler.indices(k), ["x", "label"])
        return (fields["x"],), fields["label"]

    sequential.train(
        mixed,
        sgd(mixed.parameters()),
        [[minibatch(k) for k in group] for group in groups],
        lambda output, label: functional.cross_entropy(output, label, reduction="sum"),
        len,
    )
    return mixed


@pytest.mark.parametrize("precision", LOW_TYPES)
@pytest.mark.parametrize("mode", ["single", "model"])
def test_one_unit_per_update_equals_a_plain_loop_to_the_bit(precision: str, mode: str) -> None:
    setup = mode_setup(ConvNet(), mode, [4], dataset=images(), make_optimizer=sgd, lr=constant, precision=precision)
    engine = trained(setup, 6)
    expected = in_a_loop(ConvNet(), setup, [range(k, k + 1) for k in range(6)], LOW_TYPES[precision], NORMS)
    found = masters_of(engine)
    for name, master in expected.inner.named_parameters():
        assert torch.equal(found[name], master), name
    buffers = {name: b for replica in engine.replicas for name, b in replica.module.named_buffers()}
    for name, buffer in expected.inner.named_buffers():
        assert torch.equal(buffers[name], buffer), name
        assert buffers[name].dtype == buffer.dtype


@pytest.mark.parametrize("mode", ["dp", "gpipe", "pipedream-flush"])
def test_several_units_per_update_differ_by_the_rounding_of_their_sum(mode: str) -> None:
    setup = mode_setup(Mlp().float(), mode, [4], dataset=blobs(), make_optimizer=sgd, lr=constant, precision="bf16")
    size = setup.pipeline.round_size(0)
    groups = [range(start, start + size) for start in range(0, 4, size)]
    found = masters_of(trained(setup, 4))
    for name, master in in_a_loop(Mlp().float(), setup, groups, torch.bfloat16, ()).inner.named_parameters():
        # 2^-8 is half a unit in bf16's last place: of the gradients' sums, and so of what is added to the weights.
        torch.testing.assert_close(found[name], master, rtol=0, atol=4 * LR * 2**-8, msg=name)
        assert not torch.equal(found[name].bfloat16().float(), found[name])  # the masters are no 16-bit numbers


@pytest.mark.parametrize("vertical_sync", [False, True])
def test_stale_versions_are_the_rounded_masters_of_the_formula(vertical_sync: bool) -> None:
    setup = make_setup(
        Mlp().float(), ([2, 4], [1, 1, 1]), dataset=blobs(), make_optimizer=sgd, lr=constant, precision="bf16",
        weights="stash-vertical-sync" if vertical_sync else "stash",
    )  # fmt: skip
    versions: dict[int, list[dict[str, torch.Tensor]]] = {0: [], 1: [], 2: []}

    def observe(event: TimelineEvent) -> None:
        if event.instruction.op is Op.UPDATE:
            store = engine.replicas[event.worker].weights
            versions[event.worker].append({n: p.detach().clone() for n, p in store.trained().items()})
            for master, low in zip(store.trained().values(), store.newest.parameters, strict=True):
                assert low.dtype is torch.bfloat16
                assert torch.equal(master.bfloat16(), low)

    engine = make_engine(setup, observe)
    engine.train(0, 12)
    stage_of = {n: r.stage.index for r in engine.replicas for n in r.weights.names}

    def field(name: str, k: int) -> torch.Tensor:
        return blobs().fetch("train", setup.sampler.indices(k), [name])[name]

    expected = staleness.train(
        Mixed(Mlp().float(), torch.bfloat16),
        lambda name: stage_of[name.removeprefix("inner.")],
        [1, 1, 1],
        lambda output, k: functional.cross_entropy(output, field("label", k), reduction="sum"),
        lambda k: field("x", k),
        lambda k: float(setup.sampler.size(k)),
        12,
        staleness.sgd(),
        LR,
        vertical_sync=vertical_sync,
    )
    for worker, found in versions.items():
        for mine, theirs in zip(found, expected[worker][1:], strict=True):
            for name, master in mine.items():
                # The engine divides the loss, the formula the gradient: by 4, which rounds nothing.
                assert torch.equal(master, theirs[f"inner.{name}"]), name


@pytest.mark.parametrize("mode", MODES)
def test_versions_have_16_bits_and_masters_and_state_exist_once(mode: str) -> None:
    setup = mode_setup(
        ConvNet(), mode, [4], dataset=images(), precision="bf16",
        make_optimizer=lambda p: torch.optim.Adam(p, 0.01, fused=True),
    )  # fmt: skip
    engine = trained(setup, 6)
    numel = {name: p.numel() for name, p in ConvNet().named_parameters()}
    for replica in engine.replicas:
        weights = replica.weights
        low = sum(numel[n] * (4 if n in NORMS else 2) for n in weights.names)
        whole = sum(numel[n] * 4 for n in weights.names)
        assert weights.version_bytes == low
        assert weights.master_bytes == whole
        assert weights.state_bytes == 2 * whole + 4 * len(weights.names)  # and a counter per parameter
        for version in weights._alive:
            types = {n: p.dtype for n, p in zip(weights.names, version.parameters, strict=True)}
            assert types == {n: torch.float32 if n in NORMS else torch.bfloat16 for n in weights.names}
        assert len(weights._alive) == weights.num_alive
        buffers = sum(buffer.nbytes for buffer in replica.module.buffers())
        gradients_and_units = replica.live_bytes() - weights.num_alive * low - whole - weights.state_bytes - buffers
        assert gradients_and_units == 0  # at a drain


@pytest.mark.parametrize("mode", MODES)
def test_messages_are_half_as_large(mode: str) -> None:
    kinds = TRAINING_KINDS

    def sent(precision: str) -> Mapping[str, int]:
        engine = trained(mode_setup(Mlp().float(), mode, [4], dataset=blobs(), precision=precision))
        assert {k: v for k, v in engine.num_bytes.items() if k[0] in kinds} == {
            k: v for k, v in engine.network.num_bytes.items() if k[0] in kinds
        }
        return {kind: sum(n for (k, _), n in engine.num_bytes.items() if k == kind) for kind in kinds}

    whole, half = sent("fp32"), sent("bf16")
    assert {kind: 2 * count for kind, count in half.items()} == whole
    assert any(whole.values()) or mode == "single"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_holds_masters_and_resumes_to_the_bit(mode: str) -> None:
    def setup() -> Any:
        return mode_setup(
            ConvNet(dropout=0.3), mode, [4], dataset=images(), precision="bf16",
            make_optimizer=lambda p: torch.optim.SGD(p, 0.05, 0.9),
        )  # fmt: skip

    engine = trained(setup(), 4)
    state = captured(engine)
    assert {
        t.dtype for t in (*state.parameters.values(), *(s["momentum_buffer"] for s in state.optimizer.values()))
    } == {torch.float32}
    again = restored(setup(), state)
    engine.train(4, 4)
    again.train(4, 4)
    for mine, theirs in zip(engine.replicas, again.replicas, strict=True):
        for a, b in ((mine.tensors(), theirs.tensors()), (mine.weights.trained(), theirs.weights.trained())):
            assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("taken", "loaded"), [("fp32", "bf16"), ("bf16", "fp32"), ("fp16", "bf16")])
def test_a_checkpoint_loads_into_a_run_of_another_precision(taken: str, loaded: str) -> None:
    def setup(precision: str, mode: str) -> Any:
        return mode_setup(ConvNet(), mode, [4], dataset=images(), precision=precision)

    engine = trained(setup(taken, "pipedream"), 4)
    again = restored(setup(loaded, "dp"), captured(engine))
    before, after = masters_of(engine), masters_of(again)
    assert all(torch.equal(before[name], after[name]) for name in before)
    again.train(4, 2)


@pytest.mark.parametrize("mode", ["model", "gpipe", "pipedream", "dp"])
def test_an_evaluation_computes_with_the_rounded_weights(mode: str) -> None:
    engine = trained(mode_setup(ConvNet(), mode, [4], dataset=images(), precision="bf16"))
    found = engine.evaluate()
    model = ConvNet()
    state = {name: t for r in engine.replicas for name, t in (r.weights.trained() | _buffers(r)).items()}
    model.load_state_dict(state)
    mixed = Mixed(model.eval(), torch.bfloat16, NORMS)
    total = 0.0
    with torch.no_grad():
        for k in range(engine.setup.held_out.minibatches_per_epoch):
            fields = images().fetch("eval", engine.setup.held_out.indices(k), ["x", "label"])
            total += float(functional.cross_entropy(mixed(fields["x"]), fields["label"], reduction="sum"))
    assert found["eval_loss"] == total / 10


def _buffers(replica: Any) -> dict[str, torch.Tensor]:
    return dict(replica.module.named_buffers())


def test_recompute_changes_no_bit() -> None:
    kept, recomputed = (
        masters_of(
            trained(
                make_setup(
                    ConvNet(dropout=0.3), ([4], [1, 1]), dataset=images(), precision="bf16", recompute=recompute,
                    weights="one", microbatches=2, sizes=(2, 4),
                ),
                6,
            )
        )
        for recompute in (False, True)
    )  # fmt: skip
    assert all(torch.equal(kept[name], recomputed[name]) for name in kept)


def test_clipping_takes_the_norm_in_fp32() -> None:
    setup = mode_setup(
        Mlp().float(), "model", [4], dataset=blobs(), make_optimizer=sgd, lr=constant, precision="bf16", clip_norm=0.25
    )
    found = masters_of(trained(setup, 4))
    mixed = Mixed(Mlp().float(), torch.bfloat16)
    fields = [blobs().fetch("train", setup.sampler.indices(k), ["x", "label"]) for k in range(4)]
    sequential.train(
        mixed, sgd(mixed.parameters()), [[((f["x"],), f["label"])] for f in fields],
        lambda output, label: functional.cross_entropy(output, label, reduction="sum"), len, clip_norm=0.25,
    )  # fmt: skip
    for name, master in mixed.inner.named_parameters():
        # The norm is added up per stage, which may differ in fp32's last bits, and then round another way in bf16.
        torch.testing.assert_close(found[name], master, rtol=0, atol=LR * 2**-8, msg=name)


class Normed(nn.Module):
    """Every kind of normalisation, a constant that is read, one that a forward writes, an attention mask; float32."""

    place: torch.Tensor
    mask: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.default_generator.manual_seed(5)
        self.first, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.group, self.rms, self.instance = nn.GroupNorm(3, 3), nn.RMSNorm(8), nn.InstanceNorm1d(3, affine=True)
        self.last = nn.Linear(24, 4)
        self.register_buffer("place", torch.linspace(-1, 1, 24).view(3, 8))
        self.register_buffer("mask", torch.tensor([[0.0, -1e4, 0.0]] * 3))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [n, 6] to [n, 4]."""
        self.seen.add_(1)
        hidden = self.norm(self.first(x)).unsqueeze(1) + self.place
        hidden = hidden + self.attention(hidden, hidden, hidden, attn_mask=self.mask, need_weights=False)[0]
        return self.last(self.instance(self.rms(self.group(hidden))).flatten(1))


@pytest.mark.parametrize("precision", LOW_TYPES)
def test_types_of_every_layer_with_data_and_without(precision: str) -> None:
    graph = in_precision(trace(Normed()), precision)
    low = LOW_TYPES[precision]
    assert graph.rounding is not None
    assert graph.rounding.constants == {"place", "mask"}
    stage = make_engine(make_setup(Normed(), ([], [1]), dataset=blobs(), precision=precision)).replicas[0]
    types = {name: tensor.dtype for name, tensor in stage.tensors().items()}
    norms = {"norm", "group", "rms", "instance"}
    expected = {n: torch.float32 if n.split(".")[0] in norms else low for n, _ in Normed().named_parameters()}
    assert types == expected | {"place": low, "mask": low, "seen": torch.float32}
    engine = make_engine(make_setup(Normed(), ([1, 4], [1, 1, 1]), dataset=blobs(), precision=precision))
    sent = list[Any]()
    hand_over = engine._transport.send

    def send(kind: str, unit: int, source: int, target: int, values: Any) -> None:
        sent.extend(pytree.tree_leaves(values))
        hand_over(kind, unit, source, target, values)

    engine._transport.send = send  # type: ignore[method-assign]
    engine.train(0, 3)
    assert sent
    assert {leaf.dtype for leaf in sent if isinstance(leaf, torch.Tensor)} == {low}
    assert {t.dtype for t in (captured(engine).parameters | captured(engine).buffers).values()} == {torch.float32}


def test_constants_and_frozen_parameters_are_kept_exactly_for_checkpoints() -> None:
    model = Normed()
    model.first.weight.requires_grad_(False)
    engine = trained(make_setup(model, ([], [1]), dataset=blobs(), precision="bf16"), 2)
    state = captured(engine)
    assert torch.equal(state.parameters["first.weight"], model.first.weight)
    assert torch.equal(state.buffers["place"], model.place)
    again = restored(make_setup(model, ([], [1]), dataset=blobs(), precision="fp32"), state)
    assert torch.equal(again.replicas[0].tensors()["place"], model.place)


def test_frozen_parameters_of_a_checkpoint_are_used() -> None:
    """Only the exact copy was restored: layers used the model's initial values, rounded."""
    model, other = Normed(), Normed()
    for each in (model, other):
        each.first.weight.requires_grad_(False)
    with torch.no_grad():
        other.first.weight += 1
    state = captured(trained(make_setup(other, ([], [1]), dataset=blobs(), precision="bf16"), 1))
    again = restored(make_setup(model, ([], [1]), dataset=blobs(), precision="bf16"), state)
    weight = again.replicas[0].module.get_parameter("first.weight")
    assert weight.dtype is torch.bfloat16
    assert torch.equal(weight, other.first.weight.bfloat16())


def test_tied_parameters_share_one_master() -> None:
    engine = trained(make_setup(Tied().float(), ([], [1]), dataset=blobs(), precision="bf16"), 3)
    (replica,) = engine.replicas
    assert replica.weights.master_bytes == sum(4 * p.numel() for p in Tied().parameters())


def test_values_are_rounded_once_and_the_model_is_unchanged() -> None:
    model = ConvNet()
    before = copy.deepcopy(model.state_dict())
    trained(mode_setup(model, "pipedream", [4], dataset=images(), precision="bf16"), 3)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype is after[name].dtype for name in before)
    assert lower([model], None) == {}


def test_types_that_a_model_sets_itself_stay() -> None:
    engine = trained(mode_setup(MixedTypes(), "pipedream", [4], precision="bf16"))
    types = {name: t.dtype for r in engine.replicas for name, t in r.weights.trained().items()}
    assert types == {name: p.dtype for name, p in MixedTypes().named_parameters()}
